"""Evaluation sets whose prompts are kept out of training."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.forms import RawText, Record, TokenRow
from eagle_kit.data.chat.messages import Unusable
from eagle_kit.data.chat.overlap import CONTAMINATED, TestPrompts
from eagle_kit.data.tasks.sets import Task, load_tasks

RULE = 1
"""Raise when what counts as holding a prompt changes, so that rows are packed anew."""


@dataclass(frozen=True)
class ExcludedSets:
    """Evaluation sets of ``data.decontaminate``, read once.

    Attributes:
        tasks: the sets by their names.
    """

    tasks: dict[str, Task]

    @classmethod
    def load(cls, names: Sequence[str]) -> "ExcludedSets":
        """Read the sets. Raises UserError for one that cannot be read."""
        try:
            tasks: list[Task] = load_tasks(names) if names else []
        except UserError as error:
            raise UserError(f"data.decontaminate: {error.cause}", error.remedy) from None
        return cls(dict(zip(names, tasks, strict=True)))

    @property
    def about(self) -> dict[str, str]:
        """Fingerprint of each set by its name."""
        return {name: task.fingerprint for name, task in self.tasks.items()}

    @cached_property
    def _prompts(self) -> TestPrompts:
        """N-grams of the prompts, counted for the first record: none is checked if rows are in the cache."""
        return TestPrompts(user_messages(self.tasks.values()))

    @property
    def identity(self) -> list[Any]:
        """The part of a fingerprint of packed sequences that these sets decide; empty without sets."""
        return [RULE, *self.about.values()] if self.tasks else []

    def check(self, record: Record) -> None:
        """Raise :class:`Unusable` for a record that holds a prompt of a set in any of its messages, responses
        and calls included. Rows of tokens have no words and are not checked."""
        if not self.tasks or isinstance(record, TokenRow):
            return
        texts = [record.text] if isinstance(record, RawText) else _texts(record.messages)
        if any(map(self._prompts.are_in, texts)):
            raise Unusable(CONTAMINATED)


def user_messages(tasks: Iterable[Task]) -> Iterator[str]:
    """User messages of all prompts: of the context before the first turn, and the turns."""
    for task in tasks:
        for prompt in task.prompts:
            for message in prompt.context:
                if message["role"] == "user":
                    yield message["content"]
            yield from prompt.turns


def _texts(value: Any) -> Iterator[str]:
    """All texts of messages: contents, reasoning, and the arguments of calls."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            if name != "role":
                yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
