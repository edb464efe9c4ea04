"""Checks of the arguments of a chat template: ``chat_template_kwargs`` of a request, a record or a config.

Numbers are bounded, and so is the product of the texts' size and the largest number. Other computations of a
template have no bound: the template comes with the model, and jinja's sandbox bounds ``range`` alone.
"""

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from eagle_kit.core.errors import cut
from eagle_kit.data.chat.messages import Unusable

MARKS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""``{% generation %} ... {% endgeneration %}``, which transformers adds to the language to mark responses."""
GLOBALS = ("raise_exception", "strftime_now")
"""Functions that transformers gives to every template."""
MOST_NUMBER = 2**20
"""Largest magnitude of a number: no thinking budget is above a million tokens."""
MOST_PRODUCT = 2**26
"""Most characters of text times the largest number: a template may repeat a text (``a * b``)."""


class WrongArgument(Unusable):
    """An argument that the chat template does not read, or that is too large."""


def check_arguments(tokenizer: Any, template: str, kwargs: Mapping[str, Any]) -> None:
    """Check that a template reads every argument, and that their sizes are within the module's bounds.

    Args:
        tokenizer: the tokenizer. Parameters of its ``apply_chat_template`` are no arguments of a template.
        template: source of the template.
        kwargs: the arguments.

    Raises:
        WrongArgument: an argument is not read by the template, or is too large.
    """
    if not kwargs:
        return

    # Names must be read by the template, and not be reserved.
    reserved = {"messages", *GLOBALS, *tokenizer.special_tokens_map}
    reserved.update(inspect.signature(tokenizer.apply_chat_template).parameters)
    read = names_read(template)
    for name in kwargs:
        if name in reserved:
            raise WrongArgument(f"{cut(name)} is no argument of a chat template of its own")
        if name not in read:
            raise WrongArgument(f"the chat template does not read {cut(name)}")

    # Sizes are checked before the template can multiply them.
    leaves = list(_leaves(kwargs))
    magnitudes = [abs(leaf) for leaf in leaves if not isinstance(leaf, str)]
    if not all(magnitude <= MOST_NUMBER for magnitude in magnitudes):
        raise WrongArgument(f"chat_template_kwargs have a number above {MOST_NUMBER} in magnitude")
    largest = max(magnitudes, default=0)
    num_chars = sum(len(leaf) for leaf in leaves if isinstance(leaf, str))
    if largest * num_chars > MOST_PRODUCT:
        raise WrongArgument(
            f"chat_template_kwargs have {num_chars} characters and the number {largest:g}, whose product is "
            f"above {MOST_PRODUCT}"
        )


@functools.lru_cache
def names_read(template: str) -> frozenset[str]:
    """Names that a template reads without setting them in every branch. Raises Unusable if it cannot be
    parsed."""
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(MARKS.sub("", template))
    except TemplateSyntaxError as error:
        raise Unusable(f"the chat template is no template: {cut(str(error))}") from None
    return frozenset(meta.find_undeclared_variables(tree) - set(environment.globals))


def _leaves(value: Any) -> Iterator[str | float]:
    """Texts and numbers in nested objects and lists, keys included; null, true and false are left out."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif value is not None and not isinstance(value, bool):
        yield value
