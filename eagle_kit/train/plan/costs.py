"""Memory, disk, arithmetic and time of a run, one formula for each, for ``--dry-run`` and ``--plan`` alike.

Legend: T tokens of a forward, R rows with loss at step 0, K steps, H hidden, V / Vd target / draft
vocabulary, N processes.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from eagle_kit.config.engine import SNAPSHOTS_PER_REQUEST, EngineConfig
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.gpus import RUNTIME_BYTES
from eagle_kit.core.shape import MAX_WINDOW, SpecShape
from eagle_kit.data.chat.dataset import PreparedData
from eagle_kit.data.hidden_states.format import bytes_per_token
from eagle_kit.distributed.collectives import Share
from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.count import layer_weights
from eagle_kit.models.sharding import Sharding
from eagle_kit.objective.loss import LOSS_BLOCK, LOSS_BLOCK_ON_GPU
from eagle_kit.train.plan.activations import Numerics, training_bytes
from eagle_kit.train.plan.sizes import HeadArchitecture, HeadSizes, attended, head_sizes, num_weights

RUNTIME_BYTES_ON_CPU = 700e6
"""Python, torch and the tokenizer."""
OPTIMISER_TRAFFIC = 40
"""Bytes that AdamW, clipping and zeroing move per weight and step."""


@dataclass(frozen=True)
class Workload:
    """Size of one forward of the trainer.

    Attributes:
        tokens: T, tokens of its packed rows.
        rows: R, rows that carry loss at step 0.
        steps: K.
        mean_context: mean number of keys a token attends to.
        later: rows of all later steps together, in multiples of R; None for all of them, K - 1.
    """

    tokens: int
    rows: int
    steps: int
    mean_context: float
    later: float | None = None

    @property
    def later_rows(self) -> float:
        """Rows of the steps behind the first."""
        return self.rows * (self.steps - 1 if self.later is None else self.later)


def data_workload(config: TrainConfig, data: PreparedData, num_rows: int) -> Workload:
    """Forward of ``num_rows`` average packed rows of ``data``."""
    tokens, conversations = (
        num_rows * count / len(data) for count in (data.num_tokens, data.num_conversations)
    )
    context = min(config.data.max_length, data.num_tokens / max(1, data.num_conversations)) / 2
    supervised = data.num_supervised_tokens / max(1, data.num_tokens)
    return make_workload(config, tokens, tokens * supervised, conversations, context)


def make_workload(
    config: TrainConfig, tokens: float, supervised: float, conversations: float, mean_context: float
) -> Workload:
    """Forward of ``tokens`` of as many ``conversations``, of which the rows that a config samples are
    trained."""
    sampled = config.training.row_sampling
    if sampled is not None and sampled.most is not None:  # of every conversation; long ones have more to drop
        supervised = min(supervised, sampled.most * conversations)
    steps = config.training.ttt_length
    later = None if sampled is None else sum(sampled.shares(steps)[1:])
    return Workload(round(tokens), round(supervised), steps, mean_context, later)


def capture_flops(target: TargetConfig, work: Workload) -> float:
    """Floating-point operations of the target over T tokens and of its choice among V at R rows, which
    captured states on disk save."""
    flops = 2.0 * work.tokens * layer_weights(target, active=True)
    flops += 2.0 * work.tokens * work.mean_context * target.num_attention_layers * attended(target)
    return flops + 2.0 * work.rows * target.hidden_size * target.vocab_size


def head_flops(draft: HeadArchitecture, work: Workload) -> float:
    """Floating-point operations that one forward and backward of the head need.

    Counted: the teacher's logits over Vd at R rows once; the head's fusion, keys and values at T tokens and
    everything else at R rows, in each of the K steps those that are trained there (a few less carry loss).
    Of several layers each runs over T tokens, and those behind the first over the rows of all steps too. Of
    blocks behind anchors, which R are, the teacher's logits are those at all positions that their rows learn
    from, and the layers run over the rows of blocks. A backward pass is twice its forward, but the fusion's
    input needs no gradient.
    """
    sizes, T, R = head_sizes(draft), work.tokens, work.rows
    flops = 2.0 * R * draft.target_hidden_size * draft.draft_vocab_size + 4.0 * T * sizes.fuse
    attention = 2.0 * work.mean_context * sizes.attended
    row, keys = 2.0 * (sizes.behind + sizes.output) + attention, 2.0 * sizes.before
    if sizes.num_layers > 1:
        everywhere = keys + 2.0 * sizes.behind + attention
        return flops + 3.0 * work.steps * (T * everywhere + R * 2.0 * sizes.output)
    if size := draft.block_rows(work.steps):  # the text's rows go through fc, keys and values alone
        layers, rows = 1 + sizes.num_plain, R * size
        flops += 2.0 * (min(R * work.steps, T) - R) * draft.target_hidden_size * draft.draft_vocab_size
        flops += 3.0 * layers * (T * keys + rows * (keys + 2.0 * sizes.behind + attention))
        return flops + 3.0 * R * work.steps * 2.0 * sizes.output
    later = work.later_rows
    if sizes.num_plain:
        everywhere = keys + 2.0 * (sizes.behind + sizes.plain) + (1 + sizes.num_plain) * attention
        return flops + 3.0 * ((T + later) * everywhere + (R + later) * 2.0 * sizes.output)
    flops += 3.0 * (T * keys + R * row)
    return flops + 3.0 * later * (keys + row)


@dataclass(frozen=True)
class Layout:
    """Models on N processes.

    Attributes:
        num_processes: N.
        target: ``whole`` in every process, ``sharded`` over all, or ``stored`` (its states were captured).
        sharding: of the head: ``none``, ``fsdp2``, ``zero1``, ``zero2`` or ``zero3``.
    """

    num_processes: int = 1
    target: str = "whole"
    sharding: str = "none"

    @property
    def head_bytes(self) -> float:
        """Bytes per weight of the head: fp32 weight, gradient and two moments. ZeRO keeps a second fp32 copy
        of the weights in shards; FSDP2 and ZeRO-3 gather the weights, 4 bytes each, for a step."""
        count = self.num_processes
        return {
            "none": 16.0,
            "fsdp2": 4.0 + 16.0 / count,
            "zero1": 8.0 + 12.0 / count,
            "zero2": 8.0 + 12.0 / count,
            "zero3": 4.0 + 20.0 / count,
        }[self.sharding]


@dataclass(frozen=True)
class Rates:
    """Speed of one process: FLOP/s that matmuls are expected to reach, bytes/s of its memory and of the link
    to the other processes, infinite where not counted."""

    flops: float
    bandwidth: float = math.inf
    link: float = math.inf


@dataclass(frozen=True)
class Costs:
    """Costs of a run by process.

    Attributes:
        config: the run.
        target, draft: the architectures.
        is_gpu: processes have a GPU each; else they are on CPUs.
    """

    config: TrainConfig
    target: TargetConfig
    draft: HeadArchitecture
    is_gpu: bool

    @cached_property
    def target_weights(self) -> tuple[int, int]:
        """Weights that a token meets, embedding and output layer included once each, and all matrices."""
        met, total = num_weights(self.target)
        return met + self._end_weights, total

    @cached_property
    def head(self) -> HeadSizes:
        """Sizes of the head; weights that it shares with the target are not counted."""
        return head_sizes(self.draft)

    @property
    def numerics(self) -> Numerics:
        """Bytes of operands, and the form of the kernels."""
        return Numerics(2 if self.config.training.precision == "bfloat16" else 4, is_gpu=self.is_gpu)

    def shares(self, num_processes: int) -> tuple[int, int] | None:
        """Forwards of a process in a step, and packed rows of each; None when rows cannot be shared out."""
        rows, forwards = self.config.training.sequences_per_step, self.config.training.gradient_accumulation
        mine = rows // num_processes
        if rows % num_processes or mine % (forwards or mine):
            return None
        return forwards or mine, mine // (forwards or mine)

    def memory(self, layout: Layout, tokens: int, rows: int) -> dict[str, float]:
        """Bytes of each process by name, for forwards of T tokens and R rows; ``judge`` is not there together
        with ``states and activations`` and ``teacher and logits``, see :meth:`peak`. A target that FSDP2
        shards is there a second time for the judge, cut by tensor parallelism; one that is not cut over so
        many processes is not judged."""
        config, width = self.config, self.numerics.operand
        per_weight = layout.head_bytes + 4.0 * (config.training.ema_decay is not None)
        states = tokens * (len(self.draft.aux_layer_ids) + 1) * self.target.hidden_size * width
        block = LOSS_BLOCK_ON_GPU if self.is_gpu else LOSS_BLOCK
        layers, loss = training_bytes(
            self.draft, tokens, rows, config.training.ttt_length, block, self.numerics
        )
        if layout.target != "stored":
            layers = max(layers, self.target_forward(tokens))
        memory = {
            "target": self.target_bytes(layout),
            "head, gradient and optimiser": per_weight * self.head.total + self._autocast_bytes(),
            "states and activations": states + layers,
            "teacher and logits": loss,
        }
        judged = self._judged(layout)
        if judged is not None:
            memory["judge"] = self._judge_bytes(layout, judged)
            if layout.target == "sharded" and not self._is_cut:
                memory["target, cut for the judge"] = width * self._cut_weights(judged, layout)
        return memory | {"runtime": RUNTIME_BYTES if self.is_gpu else RUNTIME_BYTES_ON_CPU}

    def _autocast_bytes(self) -> float:
        """Bytes of autocast's copy of the head; that of its output layer belongs to the loss."""
        width = self.numerics.operand
        if width == 4:
            return 0.0
        of_loss = self.draft.owns_output * self.draft.draft_vocab_size * self.draft.hidden_size
        return float(width * (self.head.total - of_loss))

    @staticmethod
    def peak(memory: dict[str, float]) -> float:
        """Bytes at the worst moment: training and judging take turns."""
        training = memory["states and activations"] + memory["teacher and logits"]
        return sum(memory.values()) - min(memory.get("judge", 0.0), training)

    def target_bytes(self, layout: Layout) -> float:
        """Weights of the target in each process, and its output rows of the draft vocabulary where these are
        copied. Embedding and output layer are always whole; of a sharded target two layers are gathered at a
        time, unless it is cut by tensor parallelism, which cannot be over any number: then it is infinite."""
        is_part = self.draft.draft_vocab_size < self.target.vocab_size
        held = float(self._end_weights + is_part * self.draft.draft_vocab_size * self.target.hidden_size)
        layers = self.target_weights[1] - self._end_weights
        if layout.target == "sharded" and self._is_cut:
            part = self._part(layout)
            held += math.inf if part is None else self._cut_weights(part, layout)
        elif layout.target == "sharded":
            held += layers / layout.num_processes + 2 * layers / self.target.num_layers
        elif layout.target == "whole":
            held += layers
        return self.numerics.operand * held

    def target_forward(self, tokens: int) -> float:
        """Bytes that one layer of the target holds at once, over T tokens."""
        target, moe = self.target, self.target.moe
        values = 6 * target.hidden_size
        attention = (2 * target.num_heads + 2 * target.num_kv_heads) * target.head_dim
        inner = 3 * target.intermediate_size
        if moe is not None:
            routed = moe.num_experts_per_token * (3 * moe.intermediate_size + 2 * target.hidden_size)
            inner = max(inner, routed + 3 * moe.shared_intermediate_size)
        return float(self.numerics.operand * tokens * (values + max(attention, inner)))

    def state_bytes(self, form: str) -> float:
        """Disk that the states of a token take in the format ``form``."""
        sizes = len(self.draft.aux_layer_ids), self.target.hidden_size
        return float(bytes_per_token(form, self.config.training.precision, *sizes))

    def disk(self, num_rows: int) -> dict[str, float]:
        """Bytes of the run folder, and of the cache for ``num_rows`` packed rows, by name."""
        training, weights = self.config.training, 4.0 * self.head.total
        copies = 3 + (training.ema_decay is not None)  # weights, two moments, the average
        kept = training.keep_last + 1
        disk = {f"{kept} checkpoints": copies * weights * kept, "best": weights}
        if training.cache_hidden_states == "disk":
            per_token = self.state_bytes(training.state_format)
            disk["captured states"] = per_token * self.config.data.max_length * num_rows
        return disk

    def capture_seconds(self, work: Workload, layout: Layout, rates: Rates) -> float:
        """Time of a forward of the target: its arithmetic, or reading its weights, or gathering them; under
        tensor parallelism, which runs the rows of all processes, the sums of two states a layer besides."""
        whole, count = self.numerics.operand * self.target_weights[1], layout.num_processes
        seconds = max(capture_flops(self.target, work) / rates.flops, whole / rates.bandwidth)
        if layout.target != "sharded":
            return seconds
        if self._is_cut:
            states = self.numerics.operand * work.tokens * self.target.hidden_size
            return (
                seconds + count * 2 * self.target.num_layers * 2 * states * (count - 1) / count / rates.link
            )
        return max(seconds, whole * (count - 1) / count / rates.link)

    @property
    def _is_cut(self) -> bool:
        """True where a sharded target is cut by tensor parallelism."""
        return self.config.training.target_placement == "tensor-parallel"

    def step_seconds(self, work: Workload, forwards: int, layout: Layout, rates: Rates) -> float:
        """Time of an optimiser step of ``forwards`` forwards in each process; capturing the states of a
        ``stored`` target is not counted."""
        seconds = head_flops(self.draft, work) / rates.flops
        if layout.target != "stored":
            seconds += self.capture_seconds(work, layout, rates)
        trained, count = self.head.total, layout.num_processes
        mine = trained if layout.sharding == "none" else trained / count
        update = OPTIMISER_TRAFFIC * mine / rates.bandwidth
        exchange = 2 * 4 * trained * (count - 1) / count / rates.link
        return forwards * seconds + update + exchange

    @property
    def _end_weights(self) -> int:
        """Weights of the embedding and of the output layer, one matrix where they are tied."""
        ends = 1 if self.target.tie_word_embeddings else 2
        return ends * self.target.vocab_size * self.target.hidden_size

    def _part(self, layout: Layout) -> TargetConfig | None:
        """Architecture of the last process's part by tensor parallelism, which is the largest; None where the
        target is not cut over so many."""
        if isinstance(self.target, BridgedConfig):
            return None
        share = Share(layout.num_processes - 1, layout.num_processes)
        try:
            return Sharding.of(self.target, share, None, False).rank_config()
        except UserError:
            return None

    def _judged(self, layout: Layout) -> TargetConfig | None:
        """What the judge decodes with in each process; None where nothing is judged."""
        if not self.config.judge.every or layout.target == "stored":
            return None
        return self.target if layout.target == "whole" else self._part(layout)

    def _cut_weights(self, part: TargetConfig, layout: Layout) -> int:
        """Weights of the layers of a process's ``part``, and its rows of an output layer that is not tied."""
        rows = 0 if self.target.tie_word_embeddings else -(-self.target.vocab_size // layout.num_processes)
        return num_weights(part)[1] - self._end_weights + rows * self.target.hidden_size

    def _judge_bytes(self, layout: Layout, judged: TargetConfig) -> float:
        """The engine's copy of the head, its pool of keys and values, prompts half a row long, with room for
        a window of each request and scratch for another one, states of recurrent layers, logits, and a
        layer's tensors of a prefill step; on a CPU a packed copy of the target too. An output layer that is
        cut and not tied is gathered before the pool is there, for the time it takes to read the head."""
        judge, width = self.config.judge, self.numerics.operand
        prompt = self.config.data.max_length // 2
        context = prompt + judge.max_tokens + 2 * MAX_WINDOW
        per_token = judged.cache.values_per_token + self.draft.cache.values_per_token
        window = max(SpecShape.parse(shape).tokens for shape in judge.shapes)
        pool = float(judge.batch_size * context * per_token * width)
        most = EngineConfig(max_batch_size=judge.batch_size).resolve(on_gpu=self.is_gpu).prefill_tokens
        pool += self.target_forward(min(judge.batch_size * prompt, most))
        logits = 2 * judge.batch_size * window * self.target.vocab_size * 4
        if (states := judged.states) is not None:
            count = 1 + (1 + SNAPSHOTS_PER_REQUEST) * judge.batch_size
            pool += count * states.num_bytes(width)
            pool += judge.batch_size * window * states.num_bytes_of_node(width)
        is_cut, packed, gathered = layout.target == "sharded", 0.0, 0
        if is_cut and not self.target.tie_word_embeddings:
            gathered = 2 * width * self.target.vocab_size * self.target.hidden_size
        if not self.is_gpu:
            packed = width * self._cut_weights(judged, layout) if is_cut else self.target_bytes(layout)
        return float(width * self.head.total + max(pool + logits, gathered) + packed)
