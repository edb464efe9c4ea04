"""Keys of ``head:`` that several kinds of heads have, and how a key of another kind is refused.

A config of a kind is two models: of its section ``head`` (:class:`HeadConfig`), which names the kind, and
of the section ``training`` beside it (:class:`~eagle_kit.config.training.TrainingConfig`).
"""

import difflib
from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eagle_kit.config.loading.keys import SYNONYMS
from eagle_kit.config.options import Section
from eagle_kit.config.training import TrainingConfig
from eagle_kit.core.errors import UserError

DRAFT_VOCAB_SIZE = 8192
"""Tokens that a head with an output layer of its own can propose, where a config does not say it."""


def refuse_unknown_keys(given: Iterable[str], schema: type[BaseModel], section: str, kind: str) -> None:
    """Raise UserError for the first ``given`` key that ``schema``, a ``section`` of ``kind``, lacks."""
    known = list(schema.model_fields)
    for key in given:
        if key in known:
            continue
        own = ", ".join(name for name in known if name not in TrainingConfig.model_fields)
        if section == "head":
            # A file for another kind of head may have the key, and no override takes a key away.
            remedy = (
                f"Leave it out (on a command line 'head={{kind: {kind}}}' replaces the whole section); "
                f"the keys of head that this kind has are {own}."
            )
        else:
            remedy = f"The keys of {section} that this kind has, besides those of all kinds, are {own}."
        for nearest in difflib.get_close_matches(key, known, n=1, cutoff=0.8):
            remedy = f"Did you mean {section}.{nearest}?"
        if SYNONYMS.get(key) in known:
            remedy = f"Did you mean {section}.{SYNONYMS[key]}?"
        raise UserError(f"{section}.{key} has no meaning for a head of the kind {kind}.", remedy)


class HeadConfig(Section):
    """The draft head that a run makes. A kind's keys are those of its own class.

    The properties are read by code that asks for no kind.

    Attributes:
        training_schema: of the section ``training`` beside it.
    """

    # Unknown keys are kept until all others are read, and then refused by a sentence that names the kind.
    model_config = ConfigDict(extra="allow")

    training_schema: ClassVar[type[TrainingConfig]] = TrainingConfig

    kind: str

    @model_validator(mode="after")
    def _keys_are_of_the_kind(self) -> "HeadConfig":
        refuse_unknown_keys(self.model_extra or {}, type(self), "head", self.kind)
        return self

    def check_training(self, training: TrainingConfig) -> None:
        """Raise UserError where the section ``training`` asks for something that this head does not have."""

    @property
    def first_draft(self) -> str | None:
        """Name of the draft whose weights the run begins with; None for a new head."""
        return None

    @property
    def vocab_map_file(self) -> str | None:
        """File of the draft vocabulary; None where it is counted, or where there is none."""
        return None

    @property
    def num_counted_tokens(self) -> int | None:
        """Size of the draft vocabulary that is chosen from the data; None where none is chosen."""
        return None


class CapturedStatesHeadConfig(HeadConfig):
    """Heads that read captured hidden states of the target and may have an output layer of their own."""

    draft_vocab_size: int | None = Field(default=None, ge=2)
    """Size of the draft vocabulary: the most frequent tokens under the loss mask. Null is 8192; the published
    EAGLE-3 heads have 32,000.
    """

    vocab_map: str | None = None
    """Draft vocabulary to use instead: a file of ``eagle-kit data vocab``, made for the same tokenizer."""

    aux_layer_ids: tuple[int, ...] | None = None
    """Captured layers, as "input of layer i". Null is ``(2, L//2, L-3)``."""

    lm_head_init: Literal["target", "random"] = "target"
    """First weights of the output layer: ``target`` copies the target's rows of the draft vocabulary,
    ``random``, as in the code of EAGLE-3, does not. With ``target`` the final norm of EAGLE-3 and P-EAGLE
    heads begins as the target's, scaled down.
    """

    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the MLP; null is the target's."""

    start_from: str | None = None
    """A draft of any known layout, as a folder or a hub id, whose training is continued. Its weights, sizes
    and draft vocabulary are used; of the keys of ``head`` only ``kind`` may be set beside it.
    """

    @model_validator(mode="after")
    def _start_from_says_the_rest(self) -> "CapturedStatesHeadConfig":
        if self.start_from is None:
            return self
        for name, field in type(self).model_fields.items():
            if name not in ("kind", "start_from") and getattr(self, name) != field.default:
                raise ValueError(f"{name} is that of the head that start_from names")
        return self

    @property
    def first_draft(self) -> str | None:
        """See :class:`HeadConfig`."""
        return self.start_from

    @property
    def vocab_map_file(self) -> str | None:
        """See :class:`HeadConfig`."""
        return self.vocab_map

    @property
    def effective_draft_vocab_size(self) -> int:
        """:attr:`draft_vocab_size`, or 8192 if it is null."""
        return DRAFT_VOCAB_SIZE if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def num_counted_tokens(self) -> int | None:
        """See :class:`HeadConfig`."""
        return self.effective_draft_vocab_size if self.start_from is None else None
