"""Memory, disk, arithmetic and time of a run, one formula for each, for ``--dry-run`` and ``--plan`` alike.

Legend: T tokens of a forward, R supervised rows at step 0 (for heads that draft blocks: anchors), K steps, H
hidden, V / Vd target / draft vocabulary, N processes.
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
from eagle_kit.models.config import HeadArchitecture, TargetConfig
from eagle_kit.models.count import layer_weights
from eagle_kit.models.sharding import Sharding
from eagle_kit.objective.loss import LOSS_BLOCK, LOSS_BLOCK_ON_GPU
from eagle_kit.train.plan.activations import Numerics, training_bytes
from eagle_kit.train.plan.sizes import HeadSizes, attended, head_sizes, num_weights

RUNTIME_BYTES_ON_CPU = 700e6
"""Python, torch and the tokenizer."""
OPTIMISER_TRAFFIC = 40
"""Bytes that AdamW, clipping and zeroing move per weight and step."""


@dataclass(frozen=True)
class Workload:
    """Size of one forward in training.

    Attributes:
        tokens: T.
        rows: R.
        steps: K.
        mean_context: mean number of keys that a token attends to.
        later: rows of all later steps together, in multiples of R; None is K - 1, all of them.
    """

    tokens: int
    rows: int
    steps: int
    mean_context: float
    later: float | None = None

    @property
    def later_rows(self) -> float:
        """Rows of all steps but the first."""
        later = self.steps - 1 if self.later is None else self.later
        return self.rows * later


def data_workload(config: TrainConfig, data: PreparedData, num_rows: int) -> Workload:
    """Workload of a forward over ``num_rows`` average packed sequences of ``data``."""
    tokens = num_rows * data.num_tokens / len(data)
    conversations = num_rows * data.num_conversations / len(data)
    mean_length = data.num_tokens / max(1, data.num_conversations)
    context = min(config.data.max_length, mean_length) / 2
    supervised = data.num_supervised_tokens / max(1, data.num_tokens)
    return make_workload(config, tokens, tokens * supervised, conversations, context)


def make_workload(
    config: TrainConfig, tokens: float, supervised: float, conversations: float, mean_context: float
) -> Workload:
    """Workload of a forward, with the rows that ``config`` samples for training.

    Args:
        tokens: tokens of the packed sequences.
        supervised: supervised tokens among them.
        conversations: conversations in the packed sequences.
        mean_context: mean number of keys that a token attends to.
    """
    steps = config.training.ttt_length
    sampling = config.training.row_sampling
    later = None
    if sampling is not None:
        later = sum(sampling.shares(steps)[1:])

        # The limit holds for every conversation; that of the mean one is taken.
        if sampling.most is not None:
            supervised = min(supervised, sampling.most * conversations)
    return Workload(round(tokens), round(supervised), steps, mean_context, later)


def capture_flops(target: TargetConfig, work: Workload) -> float:
    """Floating-point operations of the target: its layers at T tokens, and its logits over V at R rows.

    Captured hidden states on disk save them.
    """
    layers = 2.0 * work.tokens * layer_weights(target, active=True)
    attention = 2.0 * work.tokens * work.mean_context * target.num_attention_layers * attended(target)
    logits = 2.0 * work.rows * target.hidden_size * target.vocab_size
    return layers + attention + logits


def head_flops(draft: HeadArchitecture, work: Workload) -> float:
    """Floating-point operations of one forward and backward of the head, and of its teacher.

    A backward pass is twice its forward, but the fusion's input needs no gradient. A step has a few rows less
    than the one before, which is not counted.
    """
    sizes = head_sizes(draft)
    tokens = work.tokens
    rows = work.rows
    block_size = draft.block_rows(work.steps)

    # Logits of the teacher. The rows of a block learn from positions that other blocks do not have.
    num_teachers = rows
    if sizes.num_layers == 1 and block_size:
        num_teachers = min(rows * work.steps, tokens)
    teacher = 2.0 * num_teachers * draft.target_hidden_size * draft.draft_vocab_size

    # A row before attention, in attention and after it, and in the output layer.
    before = 2.0 * sizes.before
    attention = 2.0 * work.mean_context * sizes.attended
    after = 2.0 * sizes.after
    output = 2.0 * sizes.output

    # A layer for each step, over all tokens.
    if sizes.num_layers > 1:
        forward = work.steps * (tokens * (before + attention + after) + rows * output)

    # Blocks: of the text, the layers compute keys and values alone.
    elif block_size:
        num_layers = 1 + sizes.num_plain
        block_rows = rows * block_size
        layers = num_layers * (tokens * before + block_rows * (before + attention + after))
        forward = layers + rows * work.steps * output

    # Several layers, over all tokens and over the rows of later steps at once.
    elif sizes.num_plain:
        layers = before + after + 2.0 * sizes.plain + (1 + sizes.num_plain) * attention
        forward = (tokens + work.later_rows) * layers + (rows + work.later_rows) * output

    # One layer, step by step. Only step 0 has keys and values of all tokens.
    else:
        row = attention + after + output
        forward = tokens * before + rows * row + work.later_rows * (before + row)

    fusion = 2.0 * tokens * sizes.fuse
    return teacher + 2 * fusion + 3 * forward


@dataclass(frozen=True)
class ProcessLayout:
    """Distribution of the models over N processes.

    Attributes:
        num_processes: N.
        target: ``whole`` in every process, ``sharded`` over all, or ``stored`` if its hidden states were
            captured before.
        sharding: sharding of the head: ``none``, ``fsdp2``, ``zero1``, ``zero2`` or ``zero3``.
    """

    num_processes: int = 1
    target: str = "whole"
    sharding: str = "none"

    @property
    def head_bytes(self) -> float:
        """Bytes per weight of the head: weight, gradient and two moments, in fp32.

        ZeRO has a second fp32 copy of the weights, in shards. FSDP2 and ZeRO-3 gather the weights, 4 bytes
        each, for a step. FSDP2 sums gradients in the last backward pass of a step, and has a whole gradient
        until then.
        """
        by_sharding = {
            "none": 16.0,
            "fsdp2": 8.0 + 12.0 / self.num_processes,
            "zero1": 8.0 + 12.0 / self.num_processes,
            "zero2": 8.0 + 12.0 / self.num_processes,
            "zero3": 4.0 + 20.0 / self.num_processes,
        }
        return by_sharding[self.sharding]


@dataclass(frozen=True)
class Rates:
    """Speed of one process; infinite rates are not counted.

    Attributes:
        flops: FLOP/s that matmuls are expected to reach.
        bandwidth: bytes/s of its memory.
        link: bytes/s of the link to the other processes.
    """

    flops: float
    bandwidth: float = math.inf
    link: float = math.inf


@dataclass(frozen=True)
class RunCosts:
    """Costs of a run for each process.

    Attributes:
        config: config of the run.
        target: architecture of the target.
        draft: architecture of the head.
        is_gpu: each process has a GPU; False if they run on CPUs.
    """

    config: TrainConfig
    target: TargetConfig
    draft: HeadArchitecture
    is_gpu: bool

    @cached_property
    def target_weights(self) -> tuple[int, int]:
        """Weights of the target: those that one token is multiplied with, with embedding and output layer,
        and those of all matrices."""
        active, total = num_weights(self.target)
        return active + self._end_weights, total

    @cached_property
    def head(self) -> HeadSizes:
        """Sizes of the head; weights that it shares with the target are not counted."""
        return head_sizes(self.draft)

    @property
    def numerics(self) -> Numerics:
        """Bytes of a matmul's operand, and the device."""
        operand = 2 if self.config.training.precision == "bfloat16" else 4
        return Numerics(operand, is_gpu=self.is_gpu)

    def shares(self, num_processes: int) -> tuple[int, int] | None:
        """Share of a process in an optimiser step.

        Returns:
            Number of its forwards, and packed sequences of each; None if the rows cannot be divided equally.
        """
        training = self.config.training
        rows, rest = divmod(training.sequences_per_step, num_processes)
        forwards = training.gradient_accumulation or rows
        if rest or rows % forwards:
            return None
        return forwards, rows // forwards

    def memory(self, layout: ProcessLayout, tokens: int, rows: int) -> dict[str, float]:
        """Bytes of each process by name; for the peak see :meth:`peak`.

        Validation needs the whole target, or its shard by tensor parallelism. A target that FSDP2 shards is
        loaded a second time for it. Without a shard for so many processes, there is no ``validation``.

        Args:
            tokens: T of each forward.
            rows: R of each forward.
        """
        training = self.config.training
        width = self.numerics.operand

        # The head, with the average of its weights if there is one.
        per_weight = layout.head_bytes
        if training.ema_decay is not None:
            per_weight += 4.0
        head = per_weight * self.head.total + self._autocast_bytes()

        # A forward and backward. The layers of the target run before those of the head.
        num_states = len(self.draft.aux_layer_ids) + 1
        states = tokens * num_states * self.target.hidden_size * width
        block = LOSS_BLOCK_ON_GPU if self.is_gpu else LOSS_BLOCK
        peak = training_bytes(self.draft, tokens, rows, training.ttt_length, block, self.numerics)
        layers = peak.layers
        if layout.target != "stored":
            layers = max(layers, self.target_forward(tokens))
        memory = {
            "target": self.target_bytes(layout),
            "head, gradient and optimiser": head,
            "states and activations": states + layers,
            "teacher and logits": peak.loss,
        }

        # Validation.
        validated = self._validated_target(layout)
        if validated is not None:
            memory["validation"] = self._validation_bytes(layout, validated)
            if layout.target == "sharded" and not self._is_cut:
                memory["target, cut for validation"] = width * self._cut_weights(validated, layout)

        memory["runtime"] = RUNTIME_BYTES if self.is_gpu else RUNTIME_BYTES_ON_CPU
        return memory

    def _autocast_bytes(self) -> float:
        """Bytes of autocast's copy of the head, without the output layer, whose copy belongs to the loss."""
        width = self.numerics.operand
        if width == 4:
            return 0.0
        num_copied = self.head.total
        if self.draft.owns_output:
            num_copied -= self.draft.draft_vocab_size * self.draft.hidden_size
        return float(width * num_copied)

    @staticmethod
    def peak(memory: dict[str, float]) -> float:
        """Bytes at the worst moment. Training and validation take turns, so the larger of both counts."""
        training = memory["states and activations"] + memory["teacher and logits"]
        return sum(memory.values()) - min(memory.get("validation", 0.0), training)

    def target_bytes(self, layout: ProcessLayout) -> float:
        """Bytes of the target's weights in each process.

        Embedding and output layer are always whole. FSDP2 gathers two layers at a time; tensor parallelism
        gathers none, but it cannot divide a target by any number: then the result is infinite.
        """
        num_weights = float(self._end_weights)

        # A copy of the output rows of a smaller draft vocabulary.
        if self.draft.draft_vocab_size < self.target.vocab_size:
            num_weights += self.draft.draft_vocab_size * self.target.hidden_size

        # Layers.
        layers = self.target_weights[1] - self._end_weights
        if layout.target == "sharded" and self._is_cut:
            part = self._part(layout)
            num_weights += math.inf if part is None else self._cut_weights(part, layout)
        elif layout.target == "sharded":
            num_weights += layers / layout.num_processes + 2 * layers / self.target.num_layers
        elif layout.target == "whole":
            num_weights += layers
        return self.numerics.operand * num_weights

    def target_forward(self, tokens: int) -> float:
        """Bytes of the tensors of one layer of the target that are alive together, over T tokens."""
        target = self.target
        moe = target.moe
        states = 6 * target.hidden_size
        attention = (2 * target.num_heads + 2 * target.num_kv_heads) * target.head_dim
        mlp = 3 * target.intermediate_size
        if moe is not None:
            routed = moe.num_experts_per_token * (3 * moe.intermediate_size + 2 * target.hidden_size)
            mlp = max(mlp, routed + 3 * moe.shared_intermediate_size)
        return float(self.numerics.operand * tokens * (states + max(attention, mlp)))

    def state_bytes(self, form: str) -> float:
        """Bytes on disk of the captured hidden states of one token in the format ``form``."""
        num_aux_layers = len(self.draft.aux_layer_ids)
        precision = self.config.training.precision
        return float(bytes_per_token(form, precision, num_aux_layers, self.target.hidden_size))

    def disk(self, num_rows: int) -> dict[str, float]:
        """Bytes on disk by name: the run folder, and the cache for ``num_rows`` packed sequences."""
        training = self.config.training
        weights = 4.0 * self.head.total

        # A checkpoint has weights, two moments and the average. A new one is written before the oldest goes.
        num_copies = 3 if training.ema_decay is None else 4
        num_checkpoints = training.keep_last + 1
        disk = {f"{num_checkpoints} checkpoints": num_copies * weights * num_checkpoints, "best": weights}

        if training.cache_hidden_states == "disk":
            per_token = self.state_bytes(training.state_format)
            disk["captured states"] = per_token * self.config.data.max_length * num_rows
        return disk

    def capture_seconds(self, work: Workload, layout: ProcessLayout, rates: Rates) -> float:
        """Seconds of a forward of the target: the longer of its arithmetic and of reading its weights.

        FSDP2 gathers the weights meanwhile. Tensor parallelism runs the rows of all processes, and sums two
        states in every layer.
        """
        num_processes = layout.num_processes
        weights = self.numerics.operand * self.target_weights[1]
        seconds = max(capture_flops(self.target, work) / rates.flops, weights / rates.bandwidth)
        if layout.target != "sharded":
            return seconds

        # A gather sends each process all but its share; a sum sends that twice.
        others_share = (num_processes - 1) / num_processes
        if self._is_cut:
            states = self.numerics.operand * work.tokens * self.target.hidden_size
            num_sums = num_processes * 2 * self.target.num_layers
            return seconds + num_sums * 2 * states * others_share / rates.link
        return max(seconds, weights * others_share / rates.link)

    @property
    def _is_cut(self) -> bool:
        """True if a sharded target is sharded by tensor parallelism."""
        return self.config.training.target_placement == "tensor-parallel"

    def step_seconds(self, work: Workload, forwards: int, layout: ProcessLayout, rates: Rates) -> float:
        """Seconds of an optimiser step with ``forwards`` forwards in each process.

        The capture of a ``stored`` target's hidden states is not counted.
        """
        seconds = head_flops(self.draft, work) / rates.flops
        if layout.target != "stored":
            seconds += self.capture_seconds(work, layout, rates)

        # Update of this process's weights, and the sum of the gradients over all processes.
        num_processes = layout.num_processes
        trained = self.head.total
        updated = trained if layout.sharding == "none" else trained / num_processes
        update = OPTIMISER_TRAFFIC * updated / rates.bandwidth
        exchange = 2 * 4 * trained * (num_processes - 1) / num_processes / rates.link
        return forwards * seconds + update + exchange

    @property
    def _end_weights(self) -> int:
        """Weights of embedding and output layer, which are one matrix if they are tied."""
        num_matrices = 1 if self.target.tie_word_embeddings else 2
        return num_matrices * self.target.vocab_size * self.target.hidden_size

    def _part(self, layout: ProcessLayout) -> TargetConfig | None:
        """Architecture of the last rank's shard by tensor parallelism, which is the largest.

        Returns:
            The architecture; None if the target cannot be sharded over so many processes.
        """
        if isinstance(self.target, BridgedConfig):
            return None
        share = Share(layout.num_processes - 1, layout.num_processes)
        try:
            return Sharding.of(self.target, share, None, False).rank_config()
        except UserError:
            return None

    def _validated_target(self, layout: ProcessLayout) -> TargetConfig | None:
        """Architecture of the target, or of its shard, that validation decodes with in each process.

        Returns:
            The architecture; None if there is no validation.
        """
        if not self.config.validation.every or layout.target == "stored":
            return None
        if layout.target == "whole":
            return self.target
        return self._part(layout)

    def _cut_weights(self, part: TargetConfig, layout: ProcessLayout) -> int:
        """Weights of a process's shard: its layers, and its rows of an output layer that is not tied."""
        output_rows = 0
        if not self.target.tie_word_embeddings:
            output_rows = math.ceil(self.target.vocab_size / layout.num_processes)
        return num_weights(part)[1] - self._end_weights + output_rows * self.target.hidden_size

    def _validation_bytes(self, layout: ProcessLayout, validated: TargetConfig) -> float:
        """Bytes that validation needs besides the target's weights.

        Args:
            validated: architecture of the target, or of this process's shard.
        """
        validation = self.config.validation
        batch_size = validation.batch_size
        width = self.numerics.operand
        window = max(SpecShape.parse(shape).tokens for shape in validation.shapes)

        # Keys and values: prompts of half a row, responses, a window of each request, and its scratch.
        prompt = self.config.data.max_length // 2
        context = prompt + validation.max_tokens + 2 * MAX_WINDOW
        per_token = validated.cache.values_per_token + self.draft.cache.values_per_token
        decoding = float(batch_size * context * per_token * width)

        # Tensors of a layer in a prefill step.
        options = EngineConfig(max_batch_size=batch_size).resolve(on_gpu=self.is_gpu)
        decoding += self.target_forward(min(batch_size * prompt, options.prefill_tokens))

        # States of recurrent layers: of requests, of snapshots, and of the nodes of a window.
        states = validated.states
        if states is not None:
            num_states = 1 + (1 + SNAPSHOTS_PER_REQUEST) * batch_size
            decoding += num_states * states.num_bytes(width)
            decoding += batch_size * window * states.num_bytes_of_node(width)

        # Logits of target and draft, in fp32.
        decoding += 2 * batch_size * window * self.target.vocab_size * 4

        # An output layer in shards is gathered while the head is read, before the engine has its pool.
        is_sharded = layout.target == "sharded"
        gathered = 0
        if is_sharded and not self.target.tie_word_embeddings:
            gathered = 2 * width * self.target.vocab_size * self.target.hidden_size

        # On a CPU the engine packs the target's weights into copies.
        packed = 0.0
        if not self.is_gpu:
            packed = self.target_bytes(layout)
            if is_sharded:
                packed = width * self._cut_weights(validated, layout)
        return float(width * self.head.total + max(decoding, gathered) + packed)
