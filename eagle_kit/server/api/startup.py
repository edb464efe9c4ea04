"""Start of a server: the served model, and a short self-test."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION
from eagle_kit.drafts.files.draft import AnyDraft, DraftFolder
from eagle_kit.drafts.files.named_target import DEFAULT_ORIGIN, NamedTarget, named_by

if TYPE_CHECKING:
    from eagle_kit.core.shape import SpecShape
    from eagle_kit.engine.llm import LLM

LOW_ACCEPT_LENGTH = {"chain": 1.2, "tree": 1.3}
"""Fewer tokens per verify are suspicious. A head that fits its target emits more on plain questions; the
layer ids in the wrong order left one at 1.11 with a chain and 1.21 with a tree, where 1.45 and 1.70 were
right. Layer ids that are off by one cost far less and cannot be told from a weak head here."""
PROMPTS = (
    "What is the capital of France?",
    "Write the numbers from one to ten as words.",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that adds two numbers.",
)
NUM_TOKENS = 32
CHECKED_CAUSES = {
    "target weights": "Another target than the one of its training",
    "target": "Another target than the one of its training",
    "chat template": "Another chat template",
    "layer ids": "Layer ids in the other convention, inputs against outputs",
    "vocabulary": "A vocabulary map of other ids",
}
"""Subject of a finding -> the cause of low acceptance that it is a sign of, the likeliest first."""


@dataclass(frozen=True)
class ServedModel:
    """Target and perhaps draft that a command line names.

    Attributes:
        target, draft: names, as ``resolve_model`` takes them.
        origin: where the target's name came from.
        opened: the draft, where it was opened to find its target.
    """

    target: str
    draft: str | None
    origin: str = field(default="given on the command line", compare=False)
    opened: DraftFolder | None = field(default=None, compare=False, repr=False)

    @property
    def to_serve(self) -> AnyDraft | None:
        """What is given to :class:`~eagle_kit.engine.llm.LLM` as the draft."""
        return None if self.draft is None else self.opened or self.draft

    @property
    def named(self) -> NamedTarget:
        """The target with its origin."""
        return NamedTarget(self.target, self.origin)


def find_model(draft_or_target: str, target: str | None, default_target: str) -> ServedModel:
    """Tell a draft from a target: a model with a draft's config is a draft and names its own target.

    Args:
        target: given explicitly, it makes ``draft_or_target`` a draft whatever is in it (a small model of
            its own, for STANDALONE, looks like a target).
        default_target: of drafts that name none.

    Raises:
        UserError: the draft names a target that is not known here.
    """
    if target is not None:
        return ServedModel(target, draft_or_target)
    found = DraftFolder.as_published(draft_or_target, "draft or target")
    if found.kind.is_whole_model:
        return ServedModel(draft_or_target, None)
    named = named_by(found) or NamedTarget(default_target, DEFAULT_ORIGIN)
    return ServedModel(named.name, draft_or_target, named.origin, found)


@contextmanager
def warnings_as_lines(say: Callable[[str], None]) -> Iterator[None]:
    """Pass warnings raised inside, such as of a draft that may not fit, to ``say``, one line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for message in dict.fromkeys(str(item.message) for item in caught if item.category is UserWarning):
        say(f"warning: {message}")


@dataclass(frozen=True)
class SelfTest:
    """Greedy responses with speculation against without.

    Attributes:
        accept_length: tokens per verify, over all prompts.
        num_tokens: emitted with speculation.
        seconds, plain_seconds: for the same prompts with and without.
        differing: (prompt number, first differing token) of a response that is not the plain one, or None.
        is_tree: whether drafts branch.
    """

    accept_length: float
    num_tokens: int
    seconds: float
    plain_seconds: float
    differing: tuple[int, int] | None
    is_tree: bool = False

    @property
    def is_low(self) -> bool:
        """True if tokens per verify are so few that a weak head does not explain them."""
        return 0 < self.accept_length < LOW_ACCEPT_LENGTH["tree" if self.is_tree else "chain"]


def self_test(llm: "LLM", shape: "SpecShape", num_tokens: int = NUM_TOKENS) -> SelfTest:
    """Decode ``num_tokens`` in answer to each of a few questions, both ways; afterwards the engine decodes
    plainly, and its counters are zero."""
    prompts = short_prompts(llm)
    params = SamplingParams(max_tokens=min(num_tokens, llm.max_context // 4), temperature=0.0)
    started = time.perf_counter()
    drafted = llm.generate(prompts, params, shape=shape)
    between = time.perf_counter()
    plain = llm.generate(prompts, params, shape=NO_SPECULATION)
    ended = time.perf_counter()
    differing = None
    for number, (one, other) in enumerate(zip(drafted, plain, strict=True)):
        if one.token_ids != other.token_ids and differing is None:
            pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
            differing = (number, next((i for i, (a, b) in pairs if a != b), len(plain[number].token_ids)))
    num_verifies = sum(output.stats.num_verifies for output in drafted)
    num_emitted = sum(output.stats.num_emitted_tokens for output in drafted)
    engine = llm.engine(NO_SPECULATION)
    engine.totals = type(engine.totals)()
    return SelfTest(
        accept_length=num_emitted / num_verifies if num_verifies else 0.0,
        num_tokens=sum(len(output.token_ids) for output in drafted),
        seconds=between - started,
        plain_seconds=ended - between,
        differing=differing,
        is_tree=shape.topk > 1,
    )


def short_prompts(llm: "LLM") -> list[Any]:
    """Tokenise questions as chats, or as texts for a model without a template; cut to a short context."""
    return [llm.tokenize_task(prompt)[: llm.max_context // 2] for prompt in PROMPTS]


def report(
    test: SelfTest, *, exact: bool, low_causes: Callable[[], Sequence[str]], is_given: bool = True
) -> list[str]:
    """Format the self-test as lines.

    Args:
        exact: whether responses must be the plain ones to the token (fp32).
        low_causes: asked for the likely causes when acceptance is suspiciously low.
        is_given: whether the user gave the shape.
    """
    lines = [
        f"self-test  {test.accept_length:.2f} tokens per verify over {test.num_tokens} tokens, "
        f"{test.seconds:.1f} s with speculation, {test.plain_seconds:.1f} s without"
    ]
    if is_given and test.seconds > 1.2 * test.plain_seconds:
        lines.append(
            "note: these responses are slower with speculation than without; --shape auto chooses a shape, "
            "or plain decoding, by measurements."
        )
    return lines + doubts(test, exact=exact, low_causes=low_causes)


def doubts(test: SelfTest, *, exact: bool, low_causes: Callable[[], Sequence[str]]) -> list[str]:
    """Format what a self-test found wrong as lines; see :func:`report`."""
    lines = []
    if test.differing is not None:
        prompt, token = test.differing
        where = f"response {prompt} differs from plain decoding from token {token} on"
        if exact:
            lines.append(f"warning: {where}; in fp32 it must not, so please report it.")
        else:
            lines.append(f"note: {where}; rounding of half types does this where two tokens nearly tie.")
    if test.is_low:
        lines.append(
            f"warning: {test.accept_length:.2f} tokens per verify are suspiciously few; chance gives 1. "
            "Likely causes, in order:"
        )
        lines += [f"  {number}. {cause}" for number, cause in enumerate(low_causes(), 1)]
    return lines


def causes_of_low_acceptance(
    draft: AnyDraft, target: str, dtype: str, chat_template: Path | None = None
) -> list[str]:
    """List causes of low acceptance, the most likely first, without those that a check rules out.

    Args:
        chat_template: file of the one in use, in place of the target's.
    """
    from eagle_kit.drafts.files.findings import amount_of_training
    from eagle_kit.drafts.files.validate import validate_draft
    from eagle_kit.models.loading.loader import read_target_config
    from eagle_kit.models.loading.source import resolve_target

    opened = DraftFolder.open(draft, read_target_config(resolve_target(target)))
    findings = {finding.subject: finding for finding in validate_draft(opened, target, chat_template)}
    causes = [
        f"{cause}: {findings[subject].cause} {findings[subject].remedy}"
        for subject, cause in CHECKED_CAUSES.items()
        if subject in findings and findings[subject].level != "ok"
    ]

    # What the files cannot rule out.
    training = amount_of_training(opened.files.metadata)
    causes.append(f"A head that was trained too little, or on few texts.{training}")
    same_name = findings.get("target")
    if same_name is not None and same_name.level == "ok":
        causes.append(f"Another target of the same name: {same_name.cause}")
    if dtype != "float32":
        causes.append(f"Another dtype, or a quantised target: this one is decoded in {dtype}.")
    causes[-1] += (
        f" `eagle-kit diagnose {draft} --target {target}` tries each of these and more, and names the one "
        "that it is."
    )
    return causes
