"""Flags and keywords of SGLang's and vLLM's engines: what each means here, or why it is refused. Torch-free.

The table is ``other_engines.toml`` beside this file. It is read when a flag or keyword is not known here.
"""

import tomllib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Literal

TABLE = Path(__file__).with_name("other_engines.toml")
LEAVE_OUT = "Leave it out."
KEYWORDS = {
    "model": "Write LLM(TARGET, draft=DRAFT).",
    "draft": "Give draft=DRAFT.",
    "speculative_algorithm": "Give algorithm.",
    "tokens": "Give shape, steps,topk,tokens: 4,1,5 drafts a chain of 4, and 5,4,16 a tree.",
}
KEYWORDS["steps"] = KEYWORDS["topk"] = KEYWORDS["tokens"]
"""What to write in Python for options of `eagle-kit serve` that ``EngineConfig`` does not have."""


@dataclass(frozen=True)
class OtherFlag:
    """A flag of SGLang's or vLLM's server, or a key of vLLM's ``speculative_config``.

    Attributes:
        name: the flag without dashes in front; a key is ``speculative-config.KEY``.
        engines: those that have it.
        also: other names, with dashes in front.
        takes: number of words that follow it: ``none`` is a switch, whose value is ``true``, or ``false`` as
            ``--no-NAME``; ``many`` are all words up to the next flag.
        option: option of `eagle-kit serve` that it sets; empty for none.
        values: value of the option by theirs; a pattern such as ``*_mtp`` stands for several.
        passes: whether other values than :attr:`values` are values of the option.
        same: values, or patterns, that ask for what is done anyway.
        sets: further options that any value but :attr:`same` sets.
        rule: name of the function that reads a value together with other flags; empty for most.
        yields_to: flags that go before this one, each for a part of its meaning, the first for the option.
        notes: what is printed, by value; ``*`` for all others.
        why: reason of a refusal, or what is done anyway; one sentence.
        remedy: what to do where a value is refused; empty to leave the flag out or to choose another value.
        keyword: what to write in Python; empty for what follows from the option.
    """

    name: str
    engines: tuple[str, ...]
    also: tuple[str, ...] = ()
    takes: Literal["one", "none", "many"] = "one"
    option: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    passes: bool = False
    same: tuple[str, ...] = ()
    sets: Mapping[str, str] = field(default_factory=dict)
    rule: str = ""
    yields_to: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    remedy: str = ""
    keyword: str = ""

    @property
    def flag(self) -> str:
        """The flag as it is written."""
        dashes = "-" if len(self.name) <= 2 else "--"  # such as -O3
        return f"{dashes}{self.name}"

    @property
    def is_taken(self) -> bool:
        """False if every use of the flag is refused."""
        return bool(self.option or self.same or self.sets or self.rule)

    @property
    def allowed(self) -> list[str]:
        """Values that are taken, where they are a list."""
        return [*self.same, *self.values]

    def is_same(self, value: str) -> bool:
        """True for a value that asks for what is done anyway. ``--no-NAME`` of a switch that is refused is
        one."""
        if any(fnmatch(value.lower(), each.lower()) for each in self.same):
            return True
        return self.takes == "none" and value == "false" and "false" not in self.values

    def value_of(self, value: str) -> str | None:
        """Value of the option for one of theirs; None if there is none."""
        for theirs, ours in self.values.items():
            if fnmatch(value.lower(), theirs.lower()):
                return ours
        takes_all = self.option and self.takes != "none" and not self.values
        return value if self.passes or takes_all else None

    def note(self, value: str) -> str:
        """What is printed where the flag is used; empty for nothing."""
        return self.notes.get(value, self.notes.get("*", ""))

    def remedy_of(self, value: str) -> str:
        """What to do where a value is refused."""
        if self.remedy:
            return self.remedy
        if self.takes == "none" or not self.allowed:
            return LEAVE_OUT
        return f"Leave it out, or use one of {', '.join(self.allowed)}."

    def keyword_remedy(self, fields: Container[str]) -> str:
        """What to write in Python in place of the keyword of the same name.

        Args:
            fields: names of the fields of ``EngineConfig``.
        """
        if self.keyword:
            return self.keyword
        if self.option in KEYWORDS:
            return KEYWORDS[self.option]
        if self.option in fields and self.takes == "none":
            value = self.values.get("true", self.values.get("false"))
            return f"Give {self.option}={_literal(value)}."
        if self.option in fields:
            return f"Give {self.option}."
        if self.option:
            return f"{LEAVE_OUT[:-1]}: it is an option of eagle-kit serve."
        return f"{self.why} {self.remedy or LEAVE_OUT}".strip()


def _literal(value: str | None) -> str:
    """A value of an option as Python writes it."""
    if value is None or value.isdigit():
        return str(value)
    if value in ("true", "false"):
        return value.capitalize()
    return repr(value)


@dataclass(frozen=True)
class OtherFlags:
    """All flags of the table.

    Attributes:
        flags: in the order of the file; those that are refused for one reason follow the others.
        versions: version of each engine whose flags all are there.
        by_name: flag by each of its names, with dashes in front.
    """

    flags: tuple[OtherFlag, ...]
    versions: Mapping[str, str]
    by_name: Mapping[str, OtherFlag]


@cache
def other_flags() -> OtherFlags:
    """Read the table, once."""
    with TABLE.open("rb") as file:
        table = tomllib.load(file)

    # Flags with an entry of their own.
    flags = []
    for name, entry in table["flags"].items():
        flags.append(_flag(name, entry))

    # Flags that are refused for one reason.
    for group in table["refused"]:
        engines_of: dict[str, list[str]] = {}
        for engine in table["versions"]:
            for name in group.get(engine, "").split():
                engines_of.setdefault(name, []).append(engine)
        for name, engines in engines_of.items():
            flags.append(
                OtherFlag(name, tuple(engines), why=group["why"], remedy=group.get("remedy", LEAVE_OUT))
            )

    by_name = {}
    for flag in flags:
        for name in (flag.flag, *flag.also):
            by_name[name] = flag
    return OtherFlags(tuple(flags), table["versions"], by_name)


def _flag(name: str, entry: Mapping[str, Any]) -> OtherFlag:
    """A flag of the table."""
    lists = {key: tuple(entry[key]) for key in ("engines", "also", "same", "yields_to") if key in entry}
    return OtherFlag(name=name, **{**entry, **lists})


def keyword_remedy(name: str, fields: Container[str]) -> str | None:
    """What to write in place of a keyword of SGLang's or vLLM's engine; None for other names.

    Args:
        name: of the keyword.
        fields: names of the fields of ``EngineConfig``.
    """
    table = other_flags().by_name
    flag_name = f"--{name.replace('_', '-')}"
    switch = flag_name.replace("--no-", "--", 1)
    flag = table.get(flag_name) or table.get(switch)
    if flag is None:
        flag = table.get(flag_name.removeprefix("-"))  # such as -tp
    return None if flag is None else flag.keyword_remedy(fields)
