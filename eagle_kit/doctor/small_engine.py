"""Checks of a small engine: its texts with and without graphs, captures and allocations in traffic, and its
memory beside the plan.

The target and its head are random, made in memory from a seed. The vocabulary is small, so that drafts are
accepted by chance.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.switches import is_disabled
from eagle_kit.doctor.checks import ENGINE_DTYPES, CheckOutcome
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.engine.llm import LLM
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.targets.llama import LlamaModel

VOCAB_SIZE = 13
DRAFT_VOCAB_SIZE = 11
TARGET_SIZES = {
    "model_type": "llama",
    "hidden_size": 96,
    "num_layers": 4,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
SHAPE = "3,4,10"
"""Trees of three steps, so that every operation of a cycle runs."""
ENGINE_OPTIONS = {
    "max_batch_size": 3,
    "max_context": 256,
    "kv_tokens": 2048,
    "shape": SHAPE,
    "prefix_cache": False,
}
"""Without a prefix cache a prompt that comes again is computed in the same way."""
PROMPTS = ([5, 6, 7], [9, 10, 1, 2, 3], [8], [3, 4, 3, 4, 3, 4], [*range(11)] * 9)
"""Five prompts for batches of three; the last one fills several pages."""
MAX_TOKENS = 24
MOST_STEPS = 1000
"""Steps of an engine after which its responses will not end; about 60 are needed."""
TIES = {"float32": 1e-4, "bfloat16": 5e-2}
"""Difference of two logits, relative to the largest, up to which either token may be the most likely one:
implementations sum in different orders, and bf16 rounds each layer."""
SHORT_RESPONSE = 64
"""Tokens that are left for a response and for windows behind the longest prompt."""
MEMORY_SHARE = 1.1
MEMORY_SLACK = 128 << 20
"""Bytes beside a plan: workspaces of libraries."""


class Texts(NamedTuple):
    """Tokens of the responses to :data:`PROMPTS`, and what serving them took.

    Attributes:
        tokens: of each response.
        num_graphs: graphs that were captured until the end.
        num_captured_in_traffic: those of them that were captured when the same prompts came again.
        num_segments_in_traffic: segments of memory that were taken from the driver then.
        accept_length: mean number of tokens of a verification, bonus included.
        messages: what the engine logged of graphs that could not be captured.
    """

    tokens: list[list[int]]
    num_graphs: int
    num_captured_in_traffic: int
    num_segments_in_traffic: int
    accept_length: float
    messages: list[str]


def small_models(dtype: str) -> tuple[LlamaModel, Eagle3Head]:
    """A random target and a random EAGLE-3 head for it on the GPU, the same in every process."""
    target = LlamaModel(TargetConfig(**TARGET_SIZES))  # type: ignore[arg-type]
    _randomise(target, seed=0, deviation=0.1)
    head = Eagle3Head(Eagle3Config.for_target(target.config, DRAFT_VOCAB_SIZE))
    _randomise(head, seed=1, deviation=0.1)

    # The draft's words are the last ones of the target's.
    first = VOCAB_SIZE - DRAFT_VOCAB_SIZE
    is_drafted = torch.arange(VOCAB_SIZE) >= first
    head.set_vocab_map(torch.full((DRAFT_VOCAB_SIZE,), first), is_drafted)
    wanted = getattr(torch, dtype)
    return target.eval().requires_grad_(False).to("cuda", wanted), head.to("cuda", wanted)


def _randomise(model: nn.Module, *, seed: int, deviation: float) -> None:
    """Fill matrices with normal numbers, and vary norms around one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * deviation
            parameter.copy_(noise if parameter.ndim > 1 else 1 + noise)


def serve(dtype: str, **options: Any) -> tuple[LLM, Texts]:
    """Serve the prompts twice, greedily; the engine is warmed up before."""
    # Serve twice.
    target, head = small_models(dtype)
    with _log_of_graphs() as messages:
        llm = LLM(target, head, **{**ENGINE_OPTIONS, **options})
        llm.warm_up("usual")
        tokens = _responses(llm, PROMPTS)
        graphs = _num_graphs(llm)
        segments = _num_segments()
        repeated = _responses(llm, PROMPTS)

    # Compare, and collect what the second time took.
    if any(_differ(llm, dtype, *each) for each in zip(PROMPTS, tokens, repeated, strict=True)):
        messages.append("the same prompts got other texts when they came again")
    engine = llm.engine()
    texts = Texts(
        tokens,
        num_graphs=_num_graphs(llm),
        num_captured_in_traffic=_num_graphs(llm) - graphs,
        num_segments_in_traffic=_num_segments() - segments,
        accept_length=engine.totals.spec.accept_length,
        messages=messages,
    )
    return llm, texts


def _responses(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    """Tokens of the greedy responses to prompts. Raises RuntimeError where they do not end."""
    engine = llm.engine()
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    requests = [llm.make_request(prompt, params) for prompt in prompts]
    for request in requests:
        engine.add_request(request)
    for _ in range(MOST_STEPS):
        if not engine.has_work:
            return [list(request.token_ids) for request in requests]
        engine.step()
    raise RuntimeError(f"the responses have not ended after {MOST_STEPS} steps")


@contextmanager
def _log_of_graphs() -> Iterator[list[str]]:
    """Collect what is logged of graphs, warnings and above."""
    messages: list[str] = []
    logger = logging.getLogger("eagle_kit.engine.graphs")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _num_graphs(llm: LLM) -> int:
    return llm.engine().num_graphs


def _num_segments() -> int:
    """Number of times that torch took memory from the driver."""
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0))


def reference_texts(given: Mapping[str, Any]) -> CheckOutcome:
    """Texts of the engine in each dtype, as expected of all others."""
    texts = {}
    for dtype in ENGINE_DTYPES:
        texts[dtype] = serve(dtype, graph_mode="off", lag=0)[1].tokens
    count = sum(len(each) for each in texts.values())
    return CheckOutcome(True, f"{count} responses", {"texts": texts})


def check_texts(dtype: str, form: str, given: Mapping[str, Any]) -> CheckOutcome:
    """Compare the texts of an engine with those of the references.

    Args:
        form: ``"eager"``, or ``"graphs, lag 0"`` or ``"graphs, lag 1"``.
        given: ``expected``, tokens of the responses by dtype; without it nothing is compared.
    """
    # Graphs and a lag of 1 are the defaults, which a switch may change; asking for them would be a mistake.
    is_eager = form == "eager"
    options: dict[str, Any] = {}
    if is_eager:
        options["graph_mode"] = "off"
    if not form.endswith("lag 1"):
        options["lag"] = 0
    llm, found = serve(dtype, **options)
    faults = list(found.messages)

    # Texts.
    num_ties = 0
    expected = given.get("expected", {}).get(dtype, found.tokens)
    for number, (right, text) in enumerate(zip(expected, found.tokens, strict=True)):
        if _differ(llm, dtype, PROMPTS[number], right, text):
            place = _first_difference(right, text)
            faults.append(f"the text of prompt {number} differs from token {place} on")
        elif right != text:
            num_ties += 1

    # Graphs.
    if not is_eager and not is_disabled("graphs") and found.num_graphs == 0:
        faults.append("no graph was captured")
    if found.num_captured_in_traffic:
        faults.append(f"{found.num_captured_in_traffic} graphs were captured in traffic")
    if found.num_segments_in_traffic:
        faults.append(f"memory was allocated {found.num_segments_in_traffic} times in traffic")
    detail = f"{found.num_graphs} graphs, accept length {found.accept_length:.2f}, {num_ties} ties"
    return CheckOutcome(not faults, "; ".join(faults) or detail, found._asdict())


def _first_difference(right: Sequence[int], text: Sequence[int]) -> int | None:
    """Number of the first token that differs or is missing; None for equal texts."""
    for place, (one, other) in enumerate(zip(right, text, strict=False)):
        if one != other:
            return place
    if len(right) != len(text):
        return min(len(right), len(text))
    return None


def _differ(llm: LLM, dtype: str, prompt: Sequence[int], right: Sequence[int], text: Sequence[int]) -> bool:
    """True if two greedy texts of a prompt part where the target prefers one token to the other.

    The target's forward without a cache decides: logits are nearer to each other than :data:`TIES` at a tie.
    """
    place = _first_difference(right, text)
    if place is None:
        return False
    if place == min(len(right), len(text)):
        return True  # one ended too early
    logits = llm.logits([*prompt, *right[:place]])[-1].float()
    gap = (logits[right[place]] - logits[text[place]]).abs() / logits.abs().max()
    return not float(gap) <= TIES[dtype]


# ---- Memory ----


def check_memory(given: Mapping[str, Any]) -> CheckOutcome:
    """Planned and measured memory of the small engine in bf16."""
    before = _used_bytes()
    llm, _ = serve("bfloat16")
    return _compare_with_plan(llm, before)


def check_memory_of_models(given: Mapping[str, Any]) -> CheckOutcome:
    """Planned and measured memory of an engine with the options' defaults.

    Args:
        given: ``target`` and ``draft``, as ``LLM`` takes them.
    """
    before = _used_bytes()
    llm = LLM(given["target"], given.get("draft"))
    llm.engine()
    assert llm.memory_plan is not None
    llm.warm_up()
    return _compare_with_plan(llm, before)


def _compare_with_plan(llm: LLM, before: int) -> CheckOutcome:
    """Compare the plan of an engine with what this process takes of the GPU.

    Args:
        before: bytes in use of the GPU before the models were loaded.
    """
    # Traffic with prompts that are as long as they may be. Timings in a warm-up have buffers of their own.
    torch.cuda.reset_peak_memory_stats()
    longest = llm.max_context - SHORT_RESPONSE
    prompts = [[1 + number] * longest for number in range(2)]
    _responses(llm, prompts, SHORT_RESPONSE // 4)

    # The plan and what was taken.
    plan = llm.memory_plan
    assert plan is not None
    planned = plan.total - plan.graphs.bytes
    stats = torch.cuda.memory_stats()
    allocated = stats["allocated_bytes.all.peak"]
    reserved = stats["reserved_bytes.all.peak"]
    used = _used_bytes() - before
    values = {
        "plan": str(plan),
        "planned": planned,
        "planned_graphs": plan.graphs.bytes,
        "allocated_peak": allocated,
        "reserved_peak": reserved,
        "used_of_gpu": used,
    }
    graphs = plan.graphs.bytes / 1e6
    detail = (
        f"planned {planned / 1e6:.0f} MB and {graphs:.0f} for graphs; at the peak {allocated / 1e6:.0f} MB "
        f"allocated, {reserved / 1e6:.0f} reserved; the GPU has {used / 1e6:.0f} less"
    )
    return CheckOutcome(allocated <= planned * MEMORY_SHARE + MEMORY_SLACK, detail, values)


def _used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free
