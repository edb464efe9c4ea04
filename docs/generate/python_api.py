"""``python.md``: the public classes of the package, which the site fills in from their docstrings."""

import eagle_kit
from generate.markdown import wrapped

RESULTS = (
    "eagle_kit.core.output.TokenLogprobs",
    "eagle_kit.core.stats.SpecStats",
    "eagle_kit.engine.text_forwards.TextStates",
)
"""Classes that methods return and that `eagle_kit` does not export."""


def python_page() -> str:
    """A directive of mkdocstrings for each class."""
    written = (
        "Written by `make reference`. The site shows signatures and docstrings here. "
        "`LLM.hidden_states` returns hidden states, and `LLM.acceptance` measures the accept length. "
        "[Use the engine from Python](../how-to/use-from-python.md) has examples."
    )
    lines = ["# Python", "", *wrapped(written), "", "## Exported by `eagle_kit`"]
    for name in eagle_kit.__all__:
        exported = getattr(eagle_kit, name)
        if isinstance(exported, type):
            lines += ["", f"### {name}", "", f"::: {exported.__module__}.{name}"]
    lines += ["", "## Classes of results"]
    for path in RESULTS:
        lines += ["", f"### {path.rpartition('.')[2]}", "", f"::: {path}"]
    return "\n".join(lines) + "\n"
