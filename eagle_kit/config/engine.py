"""Options of the decoding engine, for ``LLM(...)``, the server, the command line, evaluation, and validation
during training. Torch-free.

An option is documented here and nowhere else: flags take their help from the fields (``cli/arguments.py``),
and ``LLM`` takes the fields as keywords.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from eagle_kit.config.options import Options
from eagle_kit.config.other_engines import keyword_remedy
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import MAX_WINDOW, NO_SPECULATION, ShapeTable
from eagle_kit.core.switches import VARIABLE, is_disabled

GraphMode = Literal["cycle", "off"]
PrefillBackend = Literal["auto", "triton", "flash-attn", "flashinfer"]
LinearOption = Literal["auto", "torch", "triton"]
DEFAULT_MAX_CONTEXT = 8192
DEFAULT_BATCH_SIZE = 8
SERVER_BATCH_SIZE = 256
"""Most requests of a batch where an engine takes a whole GPU; as in vLLM."""
SERVER_UTILIZATION = 0.9
"""Share of a GPU's memory that a server takes. The rest is for what no plan counts: fragments of torch's
allocator, modules of kernels, buffers of NCCL."""
SNAPSHOTS_PER_REQUEST = 4
SMALL_BATCH_SIZES = (1, 2, 4, 8, 16)
"""Sizes that small batches are padded to on a GPU."""
BATCH_SIZE_STEP = 8
"""Step between the sizes above them. A batch of 33 is padded by a fifth; to the next power of two it would
nearly double."""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_size(text: Any) -> Any:
    """``"4G"``, ``"512Mi"``, ``"2.5GB"`` as bytes; numbers and None as they are. Raises UserError."""
    if not isinstance(text, str):
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise UserError(f"The size {text!r} cannot be read.", "Write it like 4G, 512Mi or 1000000000.")
    return int(float(match[1]) * UNITS[match[2] or ""])


def _is_disabled(part: str, option: str, *, is_wanted: bool) -> bool:
    """Return whether ``EAGLE_KIT_DISABLE`` disables ``part``. Raise UserError if ``option`` asks for it."""
    if not is_disabled(part):
        return False
    if is_wanted:
        raise UserError(
            f"The option {option} asks for {part}, which {VARIABLE} disables.", "Leave one of the two out."
        )
    return True


def algorithm_name(given: Any) -> Any:
    """Name of an algorithm as the kinds of drafts write it: capitals, except for ``auto``. Other values than
    texts as they are."""
    if not isinstance(given, str):
        return given
    return "auto" if given.lower() == "auto" else given.upper()


def _shape_table(given: Any) -> ShapeTable | None:
    """Read the option ``shape``; None stands for the text ``auto`` from here on."""
    if given is None or given == "auto":
        return None
    return ShapeTable.parse(given)


def _sizes_up_to(max_batch_size: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """``max_batch_size`` behind those of ``sizes`` that are smaller, ascending."""
    return (*sorted({size for size in sizes if size < max_batch_size}), max_batch_size)


class NgramConfig(Options):
    """Matching of n-grams, for the algorithm ``NGRAM``; names and defaults as in SGLang."""

    min_match_window_size: int = Field(default=1, ge=1)
    """Least tokens that must agree."""

    max_match_window_size: int = Field(default=12, ge=1)
    """Most tokens that are compared."""

    min_bfs_breadth: int = Field(default=1, ge=1)
    """Children of a node for the longest match."""

    max_bfs_breadth: int = Field(default=10, ge=1)
    """Children of a node for the shortest match, which says little, so that more continuations are tried."""

    match_type: Literal["BFS", "PROB"] = "BFS"
    """BFS fills the tree level by level, longer and then newer matches first; PROB takes the most probable
    node next, and of its children those with the highest counts of matches.
    """

    branch_length: int = Field(default=18, ge=1)
    """Most tokens of a continuation."""

    capacity: int = Field(default=10_000_000, ge=1)
    """Tokens of the log."""

    @property
    def max_bytes(self) -> int:
        """Memory of a full log: measured 217 bytes per token (columns of 4 and 8 bytes, and the keys)."""
        return 220 * self.capacity

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> "NgramConfig":
        for low, high in (
            ("min_match_window_size", "max_match_window_size"),
            ("min_bfs_breadth", "max_bfs_breadth"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise UserError(
                    f"{low} is {getattr(self, low)} and {high} is {getattr(self, high)}.",
                    f"Give whole numbers with {low} <= {high}.",
                )
        if self.capacity < self.max_match_window_size:
            raise UserError(
                f"capacity is {self.capacity}.", "Give a capacity of at least the match window's tokens."
            )
        return self


class EngineConfig(Options):
    """Options of an engine; None is chosen by the model and the device (:meth:`resolve`)."""

    algorithm: Annotated[str, BeforeValidator(algorithm_name)] = "auto"
    """Kind of the draft, in any case: auto reads it from the draft; EAGLE3, P-EAGLE, DFLASH, DSPARK, EAGLE
    and STANDALONE refuse drafts of other kinds, and without a draft a head that lies in a folder of the
    target's is taken; NEXTN is EAGLE, or, without a draft, takes the MTP modules in the target's own folder;
    NGRAM drafts from earlier text, without a draft; NONE drafts nothing.
    """

    token_map: Path | None = None
    """File with the target ids that an EAGLE, NEXTN or STANDALONE draft may propose (FR-Spec, arXiv
    2502.14856): .pt, .safetensors, .json, the .npz of data vocab, or org/repository/FILE of the hub.
    """

    shape: Annotated[ShapeTable | None, BeforeValidator(_shape_table)] = None
    """Speculation shape steps,topk,tokens such as 4,1,5 (a chain) or 5,4,16 (a tree), or none; several by
    batch size: '5,4,16 8:4,1,5 32:none'. auto, the default, chooses cycle by cycle from measured costs and
    acceptance where the draft allows it, else by the draft and the target.
    """

    chat_template: Path | None = None
    """File with the Jinja source of a chat template, in place of the target's."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of a GPU's memory that the process may take in all, its weights included; of what other programs
    leave free it takes no larger share. The batch, the context and the key-value pool then have defaults by
    that memory. Default 0.9 in a server on a GPU; elsewhere the pool takes what the batch needs.
    """

    max_batch_size: int | None = Field(default=None, ge=1)
    """Most requests decoded together; default 8, and with gpu_memory_utilization 256, or fewer where the pool
    holds less than 1024 tokens for each.
    """

    max_context: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and response, at most the target's context, which a larger number stands for;
    default that context, at most 8192, and with gpu_memory_utilization at most what the pool holds.
    """

    page_size: int = Field(default=16, ge=1)
    """Tokens per page of the key-value pool."""

    prefix_cache: bool = True
    """Share and keep the pages of common prefixes."""

    prefill_tokens: int | None = Field(default=None, ge=1)
    """Most prompt tokens computed in one step; default 512 on a CPU, 8192 on a GPU."""

    decode_prefill_tokens: int | None = Field(default=None, ge=1)
    """Most of them in a step that also decodes, for as long as they take the next cycle waits; default
    prefill_tokens on a CPU, 1024 on a GPU (of 8 B parameters some 25 ms, where 8192 take 200; parts of a few
    hundred would hardly compute longer than they read the weights).
    """

    mixed_prefill_tokens: int | None = Field(default=None, ge=1)
    """Share of prompts in a step that also decodes for others, in tokens that have none before them; default
    12 on a CPU, 1024 on a GPU.
    """

    prefill_backend: PrefillBackend = "auto"
    """Attention of the target's prompts on a GPU: triton is ours; flash-attn and flashinfer are libraries
    that you install, which read the pool in place; auto, the default, takes the fastest of those that are
    installed, measured in the server's warm-up and kept in the cache folder. On a CPU always ours.
    """

    linear_backend: LinearOption = "auto"
    """Linear layers of up to 64 rows in bf16 or fp16 on a GPU: torch is cuBLAS, triton is ours; auto, the
    default, takes the faster one for each size, measured in the server's warm-up. What was measured is kept
    in the cache folder, for the same choices after a restart.
    """

    kv_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the key-value pool holds; default what the batch needs, or what fits, and with
    gpu_memory_utilization all that fits.
    """

    kv_memory: Annotated[int | None, BeforeValidator(parse_size)] = Field(default=None, ge=1)
    """Size of the key-value pool in bytes, or such as 4G or 512Mi, in place of a number of tokens."""

    state_snapshots: int | None = Field(default=None, ge=0)
    """States kept for cached prefixes of targets with recurrent layers, which go on from one of them; default
    four for each request of a batch, or what fits into a quarter of the room for the pool.
    """

    kv_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Dtype of the key-value pool: the model's, or fp8, half of bf16. LOSSY: text is close to that of another
    dtype, not equal.
    """

    lag: int | None = Field(default=None, ge=0, le=1)
    """Steps between a cycle and its results on the host, 0 or 1; default 0 on a CPU, 1 on a GPU."""

    batch_sizes: tuple[int, ...] | None = None
    """Batches are padded to the next of these; default exact sizes on a CPU, on a GPU powers of two up to 16
    and multiples of 8 above.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and states: float32, bfloat16, float16, or auto: fp32 on a CPU, bf16 on a GPU."""

    quantization: Literal["auto", "fp8", "none"] = "auto"
    """Quantization of the target's linear layers and routed experts: auto keeps those in fp8 that the
    checkpoint has so, none widens them, fp8 also casts the others when they are loaded, with a scale for each
    output. LOSSY: the target is another one then, near the unquantised. Embedding, output layer, norms and
    routers stay in dtype; slow on a CPU, which widens the weights in every step.
    """

    device: str = "auto"
    """Device: auto, cpu or cuda; with tensor_parallel also a list such as cuda:2,cuda:3, one of each rank."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Processes that share the target, each with a part of its weights and of the key-value pool."""

    expert_parallel: bool = False
    """They share routed experts by number, whole ones each, in place of a part of every expert."""

    data_parallel_attention: bool = False
    """Latents of a request are in the pool of one of these processes only, which attends to them with all
    heads; of another target's attention they share heads.
    """

    rank_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds after which a process of them that does not answer is given up."""

    load_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds in which each of them must have started and loaded its part; more where files come slowly."""

    tree: Literal["dynamic", "static"] = "dynamic"
    """Topology of drafted trees: dynamic keeps the draft's best nodes (EAGLE-2), static is EAGLE-1's fixed
    tree, whose shape is 5,4,26.
    """

    sampled_drafts: bool = False
    """Sample drafts from the draft's own distribution where requests sample (chains and static trees)."""

    verifier: Literal["target-only", "relaxed", "rejection", "block"] | None = None
    """Verification of the drafts of requests that sample; default the lossless one, or relaxed with
    thresholds.
    """

    accept_threshold_single: float = Field(default=1.0, ge=0.0, le=1.0)
    """LOSSY below 1: accept a draft token of at least this probability."""

    accept_threshold_acc: float = Field(default=1.0, ge=0.0, le=1.0)
    """LOSSY below 1: divide the probability of a draft token by this before it is accepted by chance."""

    seed: int = 0
    """Seed of requests that bring none."""

    graph_mode: GraphMode | None = None
    """Capture of whole cycles: as CUDA graphs on a GPU, as lists of operations that need no Python on a CPU
    (cycle, the default), or not at all (off).
    """

    nvtx: bool = False
    """Mark the parts of a step with NVTX ranges, for Nsight Systems."""

    graph_memory: Annotated[int | None, BeforeValidator(parse_size)] = Field(default=None, ge=1)
    """Memory of a GPU for CUDA graphs, in bytes or such as 4G; default what the pool leaves, at least 15 % of
    what both share. What is left out is padded to a larger batch or runs without a graph.
    """

    ngram: NgramConfig = NgramConfig()
    """Matching of n-grams."""

    @model_validator(mode="after")
    def _options_go_together(self) -> "EngineConfig":
        if self.kv_tokens is not None and self.kv_memory is not None:
            raise UserError("The pool has a size in tokens and one in bytes.", "Give one or the other.")
        if self.state_snapshots and not self.prefix_cache:
            raise UserError("Snapshots are for the prefix cache, which is off.", "Leave one of the two out.")
        if self.expert_parallel and self.tensor_parallel == 1:
            raise UserError(
                "Expert parallelism shares experts among the ranks of tensor parallelism, and there is one.",
                "Give tensor_parallel, or leave expert_parallel out.",
            )
        if self.data_parallel_attention and self.tensor_parallel == 1:
            raise UserError(
                "Data-parallel attention shares requests among the ranks of tensor parallelism, and there is "
                "one.",
                "Give tensor_parallel, or leave data_parallel_attention out.",
            )
        if self.is_relaxed and self.sampled_drafts:
            raise UserError("Accept thresholds were given for sampled drafts.", "Leave one of the two out.")
        if self.is_relaxed and self.verifier not in (None, "relaxed"):
            raise UserError(
                f"Accept thresholds were given for the verifier {self.verifier}.", "Leave one of the two out."
            )
        return self

    @classmethod
    def remedy_of_unknown(cls, name: str) -> str:
        """See :class:`~eagle_kit.config.options.Options`; names of SGLang and vLLM are known."""
        return keyword_remedy(name, EngineConfig.model_fields) or super().remedy_of_unknown(name)

    @property
    def has_auto_shape(self) -> bool:
        """True if shapes are to be chosen by measurements: ``shape`` is ``"auto"``, or was left out."""
        return self.shape is None

    @property
    def is_relaxed(self) -> bool:
        """True if a threshold makes acceptance lossy."""
        return (self.accept_threshold_single, self.accept_threshold_acc) != (1.0, 1.0)

    @property
    def batch_size(self) -> int:
        """Most requests decoded together where memory does not decide it."""
        return self.max_batch_size or DEFAULT_BATCH_SIZE

    def resolve(
        self, *, on_gpu: bool, max_positions: int = DEFAULT_MAX_CONTEXT, can_record: bool = True
    ) -> "ResolvedConfig":
        """Fill in options that depend on the device and the target.

        Args:
            on_gpu: whether the device is a GPU.
            max_positions: longest context of the target.
            can_record: whether cycles can be recorded on a CPU.

        Raises:
            UserError: an option asks for what ``EAGLE_KIT_DISABLE`` disables.
        """
        # Switches for faults of some hardware.
        can_capture = not _is_disabled("graphs", "graph_mode", is_wanted=self.graph_mode == "cycle")
        can_lag = not _is_disabled("lag", "lag", is_wanted=bool(self.lag))
        if self.graph_memory is not None and not on_gpu:
            raise UserError(
                "graph_memory is the memory of CUDA graphs, and the engine runs on a CPU.", "Leave it out."
            )

        # Defaults of a server that takes a whole GPU, and of all other engines.
        if on_gpu and self.gpu_memory_utilization is not None:
            max_batch_size = self.max_batch_size or SERVER_BATCH_SIZE
            max_context = self.max_context or max_positions
        else:
            max_batch_size = self.batch_size
            max_context = self.max_context or DEFAULT_MAX_CONTEXT

        # Defaults of the device.
        if on_gpu:
            prefill_tokens = self.prefill_tokens or 8192
            decode_prefill_tokens = self.decode_prefill_tokens or 1024
            mixed_prefill_tokens = self.mixed_prefill_tokens or 1024
            larger_sizes = range(SMALL_BATCH_SIZES[-1] + BATCH_SIZE_STEP, max_batch_size, BATCH_SIZE_STEP)
            default_sizes: tuple[int, ...] = (*SMALL_BATCH_SIZES, *larger_sizes)
        else:
            prefill_tokens = self.prefill_tokens or 512
            decode_prefill_tokens = self.decode_prefill_tokens or prefill_tokens
            mixed_prefill_tokens = self.mixed_prefill_tokens or 12
            default_sizes = tuple(range(1, max_batch_size + 1))
        default_graph_mode = "cycle" if can_capture and (on_gpu or can_record) else "off"
        default_lag = int(on_gpu and can_lag)

        shape = self.shape or ShapeTable.parse(NO_SPECULATION)

        # The largest batch is the last of the sizes.
        sizes = default_sizes if self.batch_sizes is None else self.batch_sizes
        resolved = {
            "max_batch_size": max_batch_size,
            "max_context": min(max_context, max_positions),
            "prefill_tokens": prefill_tokens,
            "decode_prefill_tokens": min(prefill_tokens, decode_prefill_tokens),
            "mixed_prefill_tokens": min(prefill_tokens, mixed_prefill_tokens),
            "lag": default_lag if self.lag is None else self.lag,
            "batch_sizes": _sizes_up_to(max_batch_size, sizes),
            "graph_mode": self.graph_mode or default_graph_mode,
            "shape": shape,
            "draft_scratch": max(MAX_WINDOW, shape.num_draft_nodes),
        }
        return ResolvedConfig(**{**dict(self), **resolved})


class ResolvedConfig(EngineConfig):
    """Options of an engine on one device. Only the pool's size may be missing; a memory plan fills it in."""

    shape: Annotated[ShapeTable, BeforeValidator(_shape_table)]
    """Shapes where none are chosen by measurements: the given ones, or the draft's default. With auto an
    engine runs a policy instead (``autotune/policy.py``).
    """

    draft_scratch: int
    """Scratch rows of a request in the draft's store: those of a window, or more for a larger draft."""
    max_batch_size: int
    max_context: int
    prefill_tokens: int
    decode_prefill_tokens: int
    mixed_prefill_tokens: int
    lag: int
    batch_sizes: tuple[int, ...]
    graph_mode: GraphMode

    def with_batch_size(self, max_batch_size: int) -> "ResolvedConfig":
        """These options with at most ``max_batch_size`` requests in a batch, and batch sizes up to it."""
        sizes = _sizes_up_to(max_batch_size, self.batch_sizes)
        return self.replace(max_batch_size=max_batch_size, batch_sizes=sizes)

    def num_lookahead_tokens(self, steps: int) -> int:
        """Tokens beyond its known ones that a request may need pages for: those of the cycles in flight and
        of the next cycle, and a draft's entry of the root.

        Args:
            steps: depth of the draft.
        """
        return (self.lag + 1) * (steps + 1) + 2

    def num_pages_of(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.page_size)

    @property
    def num_shards(self) -> int:
        """Shards of the page pool: one for each rank of data-parallel attention, else 1."""
        return self.tensor_parallel if self.data_parallel_attention else 1

    @property
    def shard_batch_size(self) -> int:
        """Most requests of one shard in a batch."""
        return -(-self.max_batch_size // self.num_shards)

    def shard_batch_sizes(self, size: int) -> tuple[int, ...]:
        """Sizes that the requests of each shard are padded to, in a batch of ``size``.

        The first is an even share. Each of the others is the double of the one before, up to the most
        requests of a shard.
        """
        most = min(size, self.shard_batch_size)
        sizes = [-(-size // self.num_shards)]
        while sizes[-1] < most:
            sizes.append(min(2 * sizes[-1], most))
        return tuple(sizes)

    @property
    def num_shard_pages(self) -> int:
        """Pages of one shard of the pool."""
        return self.num_pages // self.num_shards

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots of states, for targets with recurrent layers."""
        if not self.prefix_cache:
            return 0
        if self.state_snapshots is None:
            return SNAPSHOTS_PER_REQUEST * self.max_batch_size
        return self.state_snapshots

    @property
    def snapshots(self) -> range:
        """Indices of the snapshots: after the states of the requests and that of padding."""
        first = self.max_batch_size + 1
        return range(first, first + self.num_snapshots)

    @property
    def most_rows(self) -> int:
        """Most nodes of a batch's windows that memory is planned for: the largest window of one request, or
        the given shape in the largest batch."""
        return max(MAX_WINDOW, self.max_batch_size * self.shape.tokens)

    @property
    def num_pages(self) -> int:
        """Pages of the pool; all shards are equal."""
        assert self.kv_tokens is not None, "the memory plan gives the pool its size"
        return self.num_pages_of(self.kv_tokens) // self.num_shards * self.num_shards

    @property
    def max_pages(self) -> int:
        """Most pages of one request. It is that of the deepest shape, so that a change of the shape does not
        change page tables."""
        return self.num_pages_of(self.max_context + self.num_lookahead_tokens(MAX_WINDOW - 1))
