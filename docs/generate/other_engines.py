"""``other-engines.md``: what flags of SGLang's and vLLM's servers mean here."""

from itertools import groupby

from eagle_kit.cli.app import build_parser
from eagle_kit.config.other_engines import OtherFlag, other_flags
from generate.markdown import table, wrapped

RULES = {
    "keys": "the flags of its keys, below",
    "revision": "the model's name, `org/model@revision`",
    "tokenizer": "taken where it is the target",
    "modules": "`--speculative-algorithm NEXTN` without a draft",
    "parallel-drafting": "`--speculative-algorithm P-EAGLE`",
    "replicas": "taken where it fits the ranks",
    "expert-ranks": "`--enable-expert-parallel`",
    "chain": "`--shape N,1,N+1`",
}
"""What flags set whose meaning depends on others, by their rules."""


def other_engines_page() -> str:
    """Flags that are taken, with what they set, and flags that are refused, by reason."""
    versions = " and ".join(f"{engine} {version}" for engine, version in other_flags().versions.items())
    written = (
        "Written by `make reference` from `eagle_kit/config/other_engines.toml`, which has the flags of "
        f"{versions}, and of older versions. `eagle-kit serve` takes the arguments of `vllm serve` and of "
        "`python -m sglang.launch_server`. Names may have underscores, and `--no-NAME` turns a switch off. A "
        "flag beside ours must have the same value."
    )
    lines = ["# Flags of other engines", "", *wrapped(written)]

    # Flags that are taken.
    ours = _our_flags()
    flags = other_flags().flags
    rows = [_row(flag, ours) for flag in flags if flag.is_taken]
    lines += ["", "## Taken", "", *table(("flag", "engine", "here", "notes"), rows)]

    # Flags that are refused.
    lines += ["", "## Refused"]
    refused = [flag for flag in flags if not flag.is_taken]
    for (why, remedy), group in groupby(refused, key=lambda flag: (flag.why, flag.remedy_of(""))):
        names = ", ".join(f"`{name}`" for flag in group for name in (flag.flag, *flag.also))
        lines += ["", *wrapped(f"{why} {remedy}"), "", *wrapped(f"* {names}", "  ")]
    return "\n".join(lines) + "\n"


def _our_flags() -> dict[str, str]:
    """Our flag by the option that it sets."""
    commands = next(action for action in build_parser(["serve"])._actions if action.dest == "==SUPPRESS==")
    assert isinstance(commands.choices, dict)
    flags = {}
    for action in commands.choices["serve"]._actions:
        flags[action.dest] = action.option_strings[0] if action.option_strings else "the first argument"
    return flags


def _row(flag: OtherFlag, ours: dict[str, str]) -> tuple[str, str, str, str]:
    """Row of a flag that is taken."""
    names = ", ".join(f"`{name}`" for name in (flag.flag, *flag.also))
    notes = [f"`{value}`: {text}" if value != "*" else text for value, text in flag.notes.items()]
    text = " ".join([flag.why, *notes]).strip()
    return names, ", ".join(flag.engines), _meaning(flag, ours), text


def _meaning(flag: OtherFlag, ours: dict[str, str]) -> str:
    """What a flag sets."""
    if flag.rule in RULES:
        return RULES[flag.rule]
    parts = []
    option = ours.get(flag.option, "")
    if flag.takes == "none":
        parts += [_switch(option, value) for value in flag.values.values()]
    elif option:
        parts.append(f"`{option}`" if option.startswith("-") else option)
        parts += [f"`{theirs}` as `{mine}`" for theirs, mine in flag.values.items() if theirs != mine]
    parts += [_switch(ours[name], value) for name, value in flag.sets.items()]
    if flag.same:
        values = ", ".join(f"`{each}`" for each in flag.same)
        parts.append("nothing" if flag.takes == "none" else f"nothing for {values}")
    return "; ".join(parts)


def _switch(option: str, value: str) -> str:
    """Our flag with the value that a switch gives it."""
    return f"`{option}`" if value in ("true", "false") else f"`{option} {value}`"
