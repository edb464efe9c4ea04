"""A run on GPUs that are not at hand: memory, disk and speed from the sizes of target and head alone.

Nothing is loaded and nothing is measured: sizes come from the modules on the meta device, rates from data
sheets. All figures are estimates; no part of this package has run on a GPU yet.

Legend: T tokens of a forward, R rows with loss, K steps, H hidden, V / Vd target / draft vocabulary, N GPUs.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.shape import SpecShape
from eagle_kit.data.states.format import bytes_per_token
from eagle_kit.models.config import HeadArchitecture, TargetConfig
from eagle_kit.train.algorithm.ttt import LOSS_BLOCK_ON_GPU
from eagle_kit.train.plan.activations import Numerics, training_bytes
from eagle_kit.train.plan.estimate import Workload, capture_flops, head_flops
from eagle_kit.train.plan.gpus import Gpu
from eagle_kit.train.plan.sizes import head_sizes, num_weights

UTILISATION = 0.4
"""Share of the data sheet's FLOP/s that matmuls of a step are assumed to reach."""
USABLE = 0.92
"""Share of a GPU's memory that may be planned for; the rest is lost to fragments."""
RUNTIME_BYTES = 1.5e9
"""CUDA context, kernels, libraries' workspaces."""
SUPERVISED_SHARE = 0.75
"""Share of the tokens that replies are assumed to make; memory is planned for all of them."""
OPTIMISER_TRAFFIC = 40
"""Bytes that AdamW, clipping and zeroing move per weight and step."""
UNKNOWN_TOKENS = 100e6
"""Tokens of the data where the config does not say how many are learned from."""


@dataclass(frozen=True)
class PlacementStrategy:
    """How the models lie on the GPUs.

    Attributes:
        name: for people.
        target: ``whole`` on every GPU, ``sharded`` over all, or ``stored`` (its states were captured before).
        shards_head: weights of the head, gradients and AdamW are shared out over the GPUs.
    """

    name: str
    target: str = "whole"
    shards_head: bool = False


STRATEGIES = (
    PlacementStrategy("fits"),
    PlacementStrategy("head sharded", shards_head=True),
    PlacementStrategy("target sharded", "sharded"),
    PlacementStrategy("both sharded", "sharded", shards_head=True),
    PlacementStrategy("from a store", "stored"),
    PlacementStrategy("from a store, head sharded", "stored", shards_head=True),
)
"""In the order in which they are tried: the first that fits is taken."""


@dataclass(frozen=True)
class Placement:
    """A strategy on N GPUs.

    Attributes:
        memory: bytes of each GPU by name; ``judge`` is not there together with what training holds.
        peak: bytes of each GPU at the worst moment.
        fits: whether that is within what may be used.
        seconds_per_step: expected.
        tokens_per_day: of all GPUs, prompts included, without judging.
    """

    num_gpus: int
    strategy: PlacementStrategy
    memory: dict[str, float]
    peak: float
    fits: bool
    seconds_per_step: float
    tokens_per_day: float


@dataclass(frozen=True)
class Planner:
    """Answers for one config on one kind of GPU.

    Attributes:
        config: the run.
        target, draft: the architectures.
        gpu: the kind.
    """

    config: TrainConfig
    target: TargetConfig
    draft: HeadArchitecture
    gpu: Gpu

    @cached_property
    def num_target_weights(self) -> tuple[int, int]:
        """Weights that a token meets, embedding and output layer included once each, and all."""
        met, total = num_weights(self.target)
        ends = (
            (1 if self.target.tie_word_embeddings else 2) * self.target.vocab_size * self.target.hidden_size
        )
        return met + ends, total

    @cached_property
    def num_head_weights(self) -> int:
        """Trained weights."""
        return head_sizes(self.draft).total

    @cached_property
    def num_steps(self) -> int | None:
        """Optimiser steps of the schedule; None when it depends on how many conversations there are."""
        return self.config.training.max_steps

    @property
    def schedule_tokens(self) -> float:
        """Tokens that the schedule visits, all rows full; :data:`UNKNOWN_TOKENS` when it does not say."""
        per_step = self.config.training.sequences_per_step * self.config.data.max_length
        return float(self.num_steps * per_step) if self.num_steps else UNKNOWN_TOKENS

    @property
    def numerics(self) -> Numerics:
        """Of the run, on a GPU."""
        return Numerics(2 if self.config.training.precision == "bfloat16" else 4, is_gpu=True)

    def state_bytes(self, dtype: str) -> float:
        """Disk that a token takes in a store of the format ``dtype``."""
        sizes = len(self.draft.aux_layer_ids), self.target.hidden_size
        return float(bytes_per_token(dtype, self.config.training.precision, *sizes))

    def shares(self, num_gpus: int) -> tuple[int, int] | None:
        """Forwards of a GPU in a step, and packed rows of each; None when the rows cannot be shared out."""
        rows, forwards = self.config.training.sequences_per_step, self.config.training.gradient_accumulation
        if rows % num_gpus or (forwards is not None and rows // num_gpus % forwards):
            return None
        mine = rows // num_gpus
        return forwards or mine, mine // (forwards or mine)

    def place(self, num_gpus: int) -> Placement | None:
        """The first strategy that fits, else the last one tried; None when the rows cannot be shared out."""
        if self.shares(num_gpus) is None:
            return None
        placements = [self._placement(num_gpus, strategy) for strategy in self._strategies(num_gpus)]
        return next((placement for placement in placements if placement.fits), placements[-1])

    def gpus_to_capture(self) -> int | None:
        """The smallest power of two of GPUs, up to 64, over which the sharded target can run at all."""
        for num_gpus in (1, 2, 4, 8, 16, 32, 64):
            needed = self._target_bytes("whole" if num_gpus == 1 else "sharded", num_gpus)
            needed += self._target_forward(self.config.data.max_length) + RUNTIME_BYTES
            if needed <= USABLE * self.gpu.memory:
                return num_gpus
        return None

    def capture_tokens_per_day(self, num_gpus: int) -> float:
        """Tokens a day that ``num_gpus`` capture, one packed row each at a time."""
        work = self._work(self.config.data.max_length, 1.0)
        seconds = self._capture_seconds(work, "whole" if num_gpus == 1 else "sharded", num_gpus)
        return num_gpus * work.tokens / seconds * 86400

    def _strategies(self, num_gpus: int) -> list[PlacementStrategy]:
        return [s for s in STRATEGIES if num_gpus > 1 or not (s.shards_head or s.target == "sharded")]

    def _placement(self, num_gpus: int, strategy: PlacementStrategy) -> Placement:
        memory = self._memory(num_gpus, strategy)
        judging = memory.get("judge", 0.0)
        training = memory["states and activations"] + memory["teacher and logits"]
        peak = sum(memory.values()) - min(judging, training)
        seconds = self._seconds_per_step(num_gpus, strategy)
        tokens = self.config.training.sequences_per_step * self.config.data.max_length
        fits = peak <= USABLE * self.gpu.memory
        return Placement(num_gpus, strategy, memory, peak, fits, seconds, tokens / seconds * 86400)

    def _memory(self, num_gpus: int, strategy: PlacementStrategy) -> dict[str, float]:
        """Bytes of each GPU. A sharded head keeps its matrices in the dtype of matmuls and one gradient whole
        while it works; otherwise the gradients are also copied to be summed."""
        shares = self.shares(num_gpus)
        assert shares is not None
        training, width, weights = self.config.training, self.numerics.operand, self.num_head_weights
        copy = width if width < 4 else 0
        per_weight = 16.0 + copy + (4 if num_gpus > 1 else 0)
        if strategy.shards_head:
            per_weight = 16.0 / num_gpus + width + 4
        tokens = shares[1] * self.config.data.max_length
        states = tokens * (len(self.draft.aux_layer_ids) + 1) * self.target.hidden_size * width
        layers, loss = training_bytes(
            self.draft, tokens, tokens, training.ttt_length, LOSS_BLOCK_ON_GPU, self.numerics
        )
        if strategy.target != "stored":
            layers = max(layers, self._target_forward(tokens))
        memory = {
            "target": self._target_bytes(strategy.target, num_gpus),
            "head, gradient and AdamW": per_weight * weights,
            "states and activations": states + layers,
            "teacher and logits": loss,
        }
        if self.config.judge.every and strategy.target == "whole":
            memory["judge"] = self._judge_bytes()
        return memory | {"runtime": RUNTIME_BYTES}

    def _target_bytes(self, kind: str, num_gpus: int) -> float:
        """Weights of the target on each GPU, and the rows of its output that make the teacher. Sharded, the
        embedding and the output layer stay whole and two layers are gathered at a time; from a store only the
        embedding is needed besides those rows."""
        target, width = self.target, self.numerics.operand
        table = width * target.vocab_size * target.hidden_size
        teacher = float(width * self.draft.draft_vocab_size * target.hidden_size)
        ends = table * (1 if target.tie_word_embeddings else 2)
        layers = width * self.num_target_weights[1] - ends
        if kind == "stored":
            return teacher + table
        if kind == "sharded":
            return teacher + ends + layers / num_gpus + 2 * layers / target.num_layers
        return teacher + ends + layers

    def _target_forward(self, tokens: int) -> float:
        """What one layer of the target holds at once, over T tokens."""
        target, moe = self.target, self.target.moe
        values = 6 * target.hidden_size
        attention = (2 * target.num_heads + 2 * target.num_kv_heads) * target.head_dim
        inner = 3 * target.intermediate_size
        if moe is not None:
            routed = moe.num_experts_per_token * (3 * moe.intermediate_size + 2 * target.hidden_size)
            inner = max(inner, routed + 3 * moe.shared_intermediate_size)
        return float(self.numerics.operand * tokens * (values + max(attention, inner)))

    def _judge_bytes(self) -> float:
        """The engine's copy of the head, its pool of keys and values, prompts half a row long, and logits."""
        judge, width = self.config.judge, self.numerics.operand
        context = self.config.data.max_length // 2 + judge.max_tokens
        per_token = self.target.cache.values_per_token + self.draft.cache.values_per_token
        window = max(SpecShape.parse(shape).tokens for shape in judge.shapes)
        pool = judge.batch_size * context * per_token * width
        logits = 2 * judge.batch_size * window * self.target.vocab_size * 4
        return float(width * self.num_head_weights + pool + logits)

    def _work(self, tokens: int, supervised: float) -> Workload:
        """A forward whose rows are full, each a single document."""
        config = self.config
        return Workload(
            tokens=tokens,
            rows=round(tokens * supervised),
            steps=config.training.ttt_length,
            mean_context=config.data.max_length / 2,
        )

    def _capture_seconds(self, work: Workload, kind: str, num_gpus: int) -> float:
        """A forward of the target: its arithmetic, or reading its weights, or gathering them."""
        whole = self.numerics.operand * self.num_target_weights[1]
        rate = UTILISATION * self.gpu.flops(self.config.training.precision)
        seconds = max(capture_flops(self.target, work) / rate, whole / self.gpu.bandwidth)
        gathered = whole * (num_gpus - 1) / num_gpus if kind == "sharded" else 0.0
        return max(seconds, gathered / self.gpu.link)

    def _seconds_per_step(self, num_gpus: int, strategy: PlacementStrategy) -> float:
        shares = self.shares(num_gpus)
        assert shares is not None
        forwards, rows = shares
        work = self._work(rows * self.config.data.max_length, SUPERVISED_SHARE)
        rate = UTILISATION * self.gpu.flops(self.config.training.precision)
        seconds = head_flops(self.draft, work) / rate
        if strategy.target != "stored":
            seconds += self._capture_seconds(work, strategy.target, num_gpus)
        trained = self.num_head_weights
        update = OPTIMISER_TRAFFIC * trained / (num_gpus if strategy.shards_head else 1) / self.gpu.bandwidth
        exchange = 2 * 4 * trained * (num_gpus - 1) / num_gpus / self.gpu.link
        return forwards * seconds + update + exchange

    @property
    def days(self) -> dict[int, float]:
        """Days that the schedule takes on one and on eight GPUs, where it can run."""
        found = {n: self.place(n) for n in (1, 8)}
        return {
            n: self.schedule_tokens / placement.tokens_per_day
            for n, placement in found.items()
            if placement is not None and placement.fits and math.isfinite(placement.tokens_per_day)
        }
