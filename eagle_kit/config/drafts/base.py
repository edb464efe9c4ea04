"""Keys of ``head:`` that several kinds of heads have, and the error for a key of another kind.

The config of a kind is two models: one of the section ``head`` (:class:`HeadConfig`), which names the kind,
and one of the section ``training`` (:class:`~eagle_kit.config.training.TrainingConfig`).
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
"""Default number of tokens that a head with an output layer of its own can propose."""


def refuse_unknown_keys(given: Iterable[str], schema: type[BaseModel], section: str, kind: str) -> None:
    """Raise UserError for the first key that a schema does not have.

    Args:
        given: keys of a section.
        schema: model of the section.
        section: name of the section, ``head`` or ``training``.
        kind: kind of the head.
    """
    known = list(schema.model_fields)
    for key in given:
        if key in known:
            continue

        # The keys of the kind, unless another key is near.
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
    """The draft head that a run makes. Each kind has a class with its own keys.

    Code that is the same for all kinds reads the properties.

    Attributes:
        training_schema: model of the section ``training`` for this kind.
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
        """Raise UserError for settings of the section ``training`` that this head does not have."""

    @property
    def first_draft(self) -> str | None:
        """Name of the draft whose weights the run begins with; None for a new head."""
        return None

    @property
    def vocab_map_file(self) -> str | None:
        """File of the draft vocabulary; None if it is counted, or if there is none."""
        return None

    @property
    def num_counted_tokens(self) -> int | None:
        """Size of the draft vocabulary that is counted in the data; None if none is counted."""
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
        if self.draft_vocab_size is None:
            return DRAFT_VOCAB_SIZE
        return self.draft_vocab_size

    @property
    def num_counted_tokens(self) -> int | None:
        """See :class:`HeadConfig`."""
        if self.start_from is not None:
            return None
        return self.effective_draft_vocab_size
