"""Command lines of SGLang and vLLM as those of `eagle-kit serve`: each flag is translated, or refused.

The table is :mod:`eagle_kit.config.other_engines`.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagle_kit.config.other_engines import OtherFlag, OtherFlags, other_flags
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import parse_json
from eagle_kit.report.stages import say

CONFIG = "speculative-config"
"""Flag of vLLM whose value is a JSON object; its keys are flags of the table."""
NUMBERS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
"""Units of numbers in vLLM."""


@dataclass(frozen=True)
class Given:
    """A value on the command line.

    Attributes:
        label: the flag as it was written.
        value: the value; of a switch ``true`` or ``false``.
        flag: the flag of another engine; None for one of ours.
    """

    label: str
    value: str
    flag: OtherFlag | None = None

    @property
    def text(self) -> str:
        """Flag and value for messages."""
        if self.flag is not None and self.flag.takes == "none":
            return self.label
        return f"{self.label} {self.value}".rstrip()


@dataclass
class CommandLine:
    """A command line while it is translated.

    Attributes:
        parser: of the command.
        words: our own words, in their order.
        others: flags of other engines, in their order.
        options: values by option: the last one of our flags, and those that flags of others set.
        model: index of the model among ``words``; None if it has no flag of ours.
        unknown: the first word with a flag of no engine; empty if there is none.
    """

    parser: argparse.ArgumentParser
    words: list[str] = field(default_factory=list)
    others: list[Given] = field(default_factory=list)
    options: dict[str, Given] = field(default_factory=dict)
    model: int | None = None
    unknown: str = ""

    def find(self, name: str) -> Given | None:
        """A flag of other engines by its name in the table, if it was given."""
        return next((each for each in self.others if each.flag is not None and each.flag.name == name), None)

    def value(self, option: str) -> str | None:
        """Value of an option; None if it was not given."""
        given = self.options.get(option)
        return None if given is None else given.value

    def set(self, option: str, given: Given, value: str) -> None:
        """Set an option for a flag of another engine. Raise UserError where it has another value already."""
        before = self.options.get(option)
        if before is not None and not _are_equal(before.value, value):
            raise UserError(f"{given.text} was given beside {before.text}.", "Give one or the other.")
        self.options[option] = Given(given.label, value, given.flag)


def _are_equal(one: str, other: str) -> bool:
    """True for the same text in any case, and for the same number."""
    if one.lower() == other.lower():
        return True
    try:
        return float(one) == float(other)
    except ValueError:
        return False


def translate(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Write a command line with our flags in place of those of SGLang and vLLM.

    Underscores in names of flags become dashes. Notes on flags that mean something else here are printed.

    Args:
        parser: of a command that has the options of `eagle-kit serve`, or some of them.
        words: as they were typed.

    Returns:
        The words for argparse; of a line with an unknown flag that flag alone, since its value could be taken
        for the model.

    Raises:
        UserError: a flag or value that is not taken here, or that contradicts another one.
    """
    table = other_flags()
    line = CommandLine(parser)
    own = _read_words(line, words, table)
    if line.unknown:
        return [line.unknown]
    if not line.others and own == list(words):
        return own

    # Set options, first by flags that stand for themselves, then by those that look at others.
    for given in line.others:
        if given.flag is not None and not given.flag.rule:
            _apply(line, given)
    for name, rule in RULES.items():
        for given in line.others:
            if given.flag is not None and given.flag.rule == name:
                _note(given)
                rule(line, given)
    return _with_options(line)


def _read_words(line: CommandLine, words: Sequence[str], table: OtherFlags) -> list[str]:
    """Sort words into our own and those of other engines; returns our own."""
    number = 0
    while number < len(words):
        word = words[number]
        number += 1

        # What is no flag: the model, or a value of a flag that argparse will name.
        if word == "--":
            line.words += words[number - 1 :]
            break
        if not word.startswith("-") or word[1:2].isdigit():
            _add_model(line, word)
            continue

        # A flag of ours, with as many words as it takes.
        written, equals, value = word.partition("=")
        name = _full_name(line.parser, table, written.replace("_", "-"))
        flag, is_off = _find(table, name)
        if is_off and flag is not None and flag.is_taken and flag.takes != "none":
            flag = None
        action = line.parser._option_string_actions.get(name)
        if action is not None and (flag is None or not _is_needed(flag)):
            rest = [value] if equals else _values(action.nargs, words[number:])
            number += 0 if equals else len(rest)
            line.words += [f"{name}={value}"] if equals else [name, *rest]
            text = " ".join(rest) if rest else str(action.const).lower()
            line.options[action.dest] = Given(written, text)
            continue

        # A flag of no engine.
        if flag is None and name.startswith("--"):
            line.unknown = word
            break
        if flag is None:
            line.words.append(name + equals + value)
            continue

        # A flag of another engine, with as many words as it takes there.
        if not flag.is_taken and is_off:
            continue
        if not flag.is_taken:
            raise _refusal(Given(written + equals + value, "", flag))
        if equals or flag.takes == "none":
            rest = [value] if equals else ["false" if is_off else "true"]
        else:
            rest = _values(None if flag.takes == "one" else "+", words[number:])
            number += len(rest)
        if not rest:
            raise UserError(f"{written} was given without a value.", "Give one, or leave it out.")
        if flag.takes == "many" and not _has_model(line) and not words[number:] and len(rest) > 1:
            _add_model(line, rest.pop())
        _add_other(line, written, flag, " ".join(rest), table)
    return line.words


def _full_name(parser: argparse.ArgumentParser, table: OtherFlags, name: str) -> str:
    """Complete the name of a flag, which may be in another case or the beginning of one flag only.

    Returns:
        The name as it was given if several flags begin with it, or none.
    """
    is_known = name in parser._option_string_actions or _find(table, name)[0] is not None
    if is_known or not name.startswith("--"):
        return name
    lowered = name.lower()
    if lowered in parser._option_string_actions or _find(table, lowered)[0] is not None:
        return lowered

    # Flags that begin so, by what they set: both engines and ours may have one for it. Ours go before.
    own = {}
    for known, action in parser._option_string_actions.items():
        if known.startswith(lowered):
            own[action.dest] = known
    others = {}
    for known, flag in table.by_name.items():
        if known.startswith(lowered) and "." not in known:
            others[flag.option or flag.flag] = known
    found = own or others
    return next(iter(found.values())) if len(found) == 1 else name


def _is_needed(flag: OtherFlag) -> bool:
    """Whether the table is asked about a flag that we have too: for values that we do not have."""
    return flag.takes == "many" or (flag.takes == "one" and bool(flag.values))


def _has_model(line: CommandLine) -> bool:
    """Whether a model was given so far, in whatever way."""
    return line.model is not None or line.find("model-path") is not None


def _add_model(line: CommandLine, word: str) -> None:
    """Add a word that is no flag: the model if it is the first one."""
    if line.model is None and any(action.dest == "model" for action in line.parser._actions):
        line.model = len(line.words)
        line.options["model"] = Given("the model", word)
    line.words.append(word)


def _find(table: OtherFlags, name: str) -> tuple[OtherFlag | None, bool]:
    """Find a flag of another engine; also whether it is written as ``--no-NAME``.

    ``--NAME.KEY`` is a key of the JSON object of ``--NAME``.
    """
    if name in table.by_name:
        return table.by_name[name], False
    if name.startswith("--no-") and f"--{name[5:]}" in table.by_name:
        return table.by_name[f"--{name[5:]}"], True
    base, _, key = name.partition(".")
    if key and base in table.by_name:
        flag = table.by_name[base]
        return table.by_name.get(f"{flag.flag}.{key}", flag), False
    return None, False


def _values(nargs: int | str | None, words: Sequence[str]) -> list[str]:
    """The words that are the values of a flag."""
    if nargs == 0:
        return []
    most = 1 if nargs in (None, "?") else len(words)
    values = []
    for word in words[:most]:
        is_flag = word.startswith("-") and not word[1:2].isdigit() and word != "-"
        if is_flag:
            break
        values.append(word)
    return values


def _add_other(line: CommandLine, written: str, flag: OtherFlag, value: str, table: OtherFlags) -> None:
    """Add a flag of another engine, or the keys of its JSON object."""
    if flag.name != CONFIG:
        line.others.append(Given(written, value, flag))
        return
    if "." in written:
        raise UserError(f"{written} is no key that is known here.", "Leave it out.")
    config = parse_json(value, written, 'Give a JSON object such as {"method": "eagle3", "model": "DRAFT"}.')
    if not isinstance(config, dict):
        raise UserError(f"{written} is no JSON object.", 'Give one such as {"model": "DRAFT"}.')
    for key, item in config.items():
        found = table.by_name.get(f"--{CONFIG}.{key.replace('_', '-')}")
        if found is None:
            raise UserError(f"{written} has the key {key}, which is not known here.", "Leave the key out.")
        if item is not None:
            text = item if isinstance(item, str) else json.dumps(item)
            line.others.append(Given(f"{written} {key}", text, found))


def _apply(line: CommandLine, given: Given) -> None:
    """Set the option of a flag. Raise UserError for a value that is refused."""
    flag = given.flag
    assert flag is not None

    # Other flags may go before this one, for a part of its meaning or for all of it.
    overrides = [line.find(name) is not None for name in flag.yields_to]
    if overrides and all(overrides):
        return
    _note(given)
    if flag.is_same(given.value):
        return
    value = flag.value_of(given.value)
    if value is None and not (flag.sets and given.value == "true"):
        raise _refusal(given)
    if value is not None and not (overrides and overrides[0]):
        line.set(flag.option, given, value)
    if value is not None and flag.takes == "many" and len(value.split()) > 1 and flag.option != "batch_sizes":
        raise UserError(f"{given.text}: there is one value here.", "Give one.")
    for option, other in flag.sets.items():
        line.set(option, given, other)


def _refusal(given: Given) -> UserError:
    """The error for a flag, or a value of it, that is not taken."""
    assert given.flag is not None
    engines = " and ".join(given.flag.engines)
    return UserError(
        f"{given.text} of {engines} is refused. {given.flag.why}", given.flag.remedy_of(given.value)
    )


def _note(given: Given) -> None:
    """Print what differs here from what a flag means in its engine."""
    assert given.flag is not None
    note = given.flag.note(given.value)
    if note:
        say(f"note: {given.text}: {note}")


def _with_options(line: CommandLine) -> list[str]:
    """Our own words, and those for the options that flags of others have set. Raise UserError for an option
    that the command does not have."""
    actions = {action.dest: action for action in line.parser._actions}
    words = list(line.words)
    front = []
    for option, given in line.options.items():
        if option == "model" and given.flag is not None and "model" in actions:
            if line.model is None:
                front = [given.value]
            continue
        if given.flag is None:
            continue
        name = "target" if option == "model" else option
        if name not in actions:
            raise UserError(
                f"{given.text} is a flag of servers, and {line.parser.prog} is none.", "Leave it out."
            )
        words += _words_of(actions[name], given.value)
    return [*front, *words]


def _words_of(action: argparse.Action, value: str) -> list[str]:
    """The words that give an option a value."""
    flag = action.option_strings[0]
    if action.nargs == 0:
        return [flag] if str(action.const).lower() == value else []
    if action.nargs in ("+", "*"):
        return [flag, *value.split()]
    if isinstance(action, argparse._AppendAction):
        return [f"{flag}={each}" for each in value.split()]
    return [f"{flag}={value}"]


def _number(line: CommandLine, given: Given) -> None:
    """A number that may end with a unit: ``32k`` is 32000 and ``32K`` is 32768, as in vLLM."""
    flag = given.flag
    assert flag is not None
    if not flag.is_same(given.value):
        line.set(flag.option, given, str(_whole_number(given)))


def _whole_number(given: Given) -> int:
    """A value with its unit. Raise UserError if it is no whole number."""
    digits = given.value[:-1] if given.value[-1:].isalpha() else given.value
    unit = NUMBERS.get(given.value[len(digits) :])
    is_number = unit is not None and digits.replace(".", "", 1).isdigit()
    if unit is None or not is_number or not (float(digits) * unit).is_integer():
        raise UserError(f"{given.text} is no number.", "Give a whole number, such as 8192 or 8k.")
    return int(float(digits) * unit)


def _prompt_limit(line: CommandLine, given: Given) -> None:
    """``--max-prefill-tokens``: beside ``--chunked-prefill-size`` the smaller one holds, as in SGLang."""
    tokens = _whole_number(given)
    chunk = line.options.get("prefill_tokens")
    if chunk is None or chunk.flag is None:
        line.set("prefill_tokens", given, str(tokens))
    elif tokens < int(chunk.value):
        line.options["prefill_tokens"] = Given(given.label, str(tokens), given.flag)


def _server_level(line: CommandLine, given: Given) -> None:
    """Level of uvicorn's log: here that of the package, whose own flag goes before."""
    level = line.value("log_level")
    if level is None:
        line.set("log_level", given, given.value)
    elif level.lower() != given.value.lower():
        say(f"note: {given.text}: one level holds for the package and uvicorn, {level}.")


def _names(line: CommandLine, given: Given) -> None:
    """``--served-model-name``: the first one is the name in answers, and requests may give the others."""
    first, *others = given.value.split()
    line.set("model_name", given, first)
    if others:
        line.set("model_aliases", given, " ".join(others))


def _chain(line: CommandLine, given: Given) -> None:
    """``num_speculative_tokens``: a chain of so many drafts."""
    if not given.value.isdigit() or int(given.value) < 1:
        raise UserError(f"{given.text} is no number of drafts.", "Give a whole number from 1 on.")
    drafts = int(given.value)
    line.set("shape", given, f"{drafts},1,{drafts + 1}")


def _draft(line: CommandLine, given: Given) -> None:
    """The draft: ``[ngram]`` is an algorithm, and the target itself stands for the modules in its folder."""
    if given.value.strip("[]").lower() == "ngram":
        line.set("speculative_algorithm", given, "NGRAM")
        return
    algorithm = (line.value("speculative_algorithm") or "").upper()
    if given.value == line.value("model") and algorithm in ("EAGLE", "NEXTN"):
        say(f"note: {given.text}: the modules in the target's folder are the draft (NEXTN).")
        line.options["speculative_algorithm"] = Given(given.label, "NEXTN", given.flag)
        return
    line.set("draft", given, given.value)


def _modules(line: CommandLine, given: Given) -> None:
    """``--enable-multi-layer-eagle``: without a draft, the modules in the target's folder."""
    algorithm = (line.value("speculative_algorithm") or "EAGLE").upper()
    if given.value == "true" and algorithm == "EAGLE" and not _has_draft(line):
        line.options["speculative_algorithm"] = Given(given.label, "NEXTN", given.flag)


def _has_draft(line: CommandLine) -> bool:
    """Whether a draft was given beside the target."""
    return any(line.value(option) is not None for option in ("draft", "target"))


def _parallel_drafting(line: CommandLine, given: Given) -> None:
    """``parallel_drafting`` of an EAGLE head: P-EAGLE."""
    if given.value != "true":
        return
    algorithm = (line.value("speculative_algorithm") or "EAGLE3").upper()
    if algorithm not in ("EAGLE", "EAGLE3", "P-EAGLE"):
        raise UserError(f"{given.text} was given for {algorithm}.", "Use P-EAGLE, DFLASH or DSPARK heads.")
    line.options["speculative_algorithm"] = Given(given.label, "P-EAGLE", given.flag)


def _revision(line: CommandLine, given: Given) -> None:
    """Revision of the model or of the draft: part of its name here."""
    assert given.flag is not None
    option = "model" if given.flag.name == "revision" else "draft"
    name = line.value(option)
    if name is None:
        raise UserError(f"{given.text} was given without a {option}.", "Give both, or leave it out.")
    if Path(name).exists():
        raise UserError(f"{given.text} is of hub ids, and {name} is on this machine.", "Leave it out.")
    revised = Given(given.label, f"{name}@{given.value}", given.flag)
    if option == "model" and line.model is not None:
        line.words[line.model] = revised.value
    line.options[option] = revised


def _tokenizer(line: CommandLine, given: Given) -> None:
    """The tokenizer: always the target's."""
    target = line.value("model") if line.value("target") is None else line.value("target")
    if given.value != target:
        raise UserError(f"{given.text} is not the target.", "Leave it out: the tokenizer is the target's.")


def _replicas(line: CommandLine, given: Given) -> None:
    """``--dp-size``: 1, or with data-parallel attention as many as ranks."""
    ranks = line.value("tensor_parallel") or "1"
    if line.value("data_parallel_attention") is not None:
        if given.value != ranks:
            raise UserError(
                f"{given.text}: {ranks} ranks share requests, each has its own, and all heads.",
                f"Give {given.label} {ranks}.",
            )
    elif given.value != "1":
        raise UserError(
            f"{given.text}: a server is one replica.",
            "Start several behind a router (docs/how-to/serve-a-fleet.md), or give --enable-dp-attention.",
        )


def _expert_ranks(line: CommandLine, given: Given) -> None:
    """``--ep-size``: 1, or as many as ranks."""
    ranks = line.value("tensor_parallel") or "1"
    if given.value not in ("1", ranks):
        raise UserError(
            f"{given.text}: {ranks} ranks share the target, and all of them share experts, or none.",
            f"Give {given.label} {ranks} or 1.",
        )
    if given.value != "1":
        line.set("expert_parallel", given, "true")


RULES: dict[str, Callable[[CommandLine, Given], None]] = {
    "number": _number,
    "prompt-limit": _prompt_limit,
    "server-level": _server_level,
    "names": _names,
    "chain": _chain,
    "draft": _draft,
    "modules": _modules,
    "parallel-drafting": _parallel_drafting,
    "revision": _revision,
    "tokenizer": _tokenizer,
    "replicas": _replicas,
    "expert-ranks": _expert_ranks,
}
"""Functions of flags whose meaning depends on other flags, by their names in the table."""
