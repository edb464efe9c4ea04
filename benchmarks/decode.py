"""``python benchmarks decode``: windows and cycles, and plain decoding beside transformers.

Legend: B requests, N window nodes.
"""

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.case import Case, Form, Machine
from benchmarks.engine.load import decoding, loaded, random_prompts, window_forms
from benchmarks.peers import peer_rate, transformers_model, transformers_seconds
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.engine.llm import LLM

WINDOWS = (1, 2, 4, 5, 8, 16)
SHAPES = ("3,1,4", "4,1,5", "5,4,16")
CONTEXT = 256
TEXT = "Tell me about the history of Rome, and about Greece, in a long essay."


def make_cases(target: str, draft: str | None, compare: bool) -> list[Case]:
    """Load a target, and a draft if there is one, for :func:`cases`; ``compare`` loads the target in
    transformers too."""
    llm = LLM(target, draft=draft, max_batch_size=1, max_context=1024)
    model = transformers_model(target, llm.target.embed_tokens.weight) if compare else None
    return list(cases(llm, model))


def cases(llm: LLM, model: Any = None, batches: Sequence[int] = (1, 8)) -> Iterator[Case]:
    """Windows and cycles at batch 1, eagerly so that they compare, and tokens/s of plain decoding."""
    eager = loaded(llm.target, llm.draft, 1, CONTEXT, graph_mode="off")

    def windows(machine: Machine) -> dict[str, Any]:
        return machine.compare(window_forms(eager, WINDOWS, CONTEXT))

    def cycle(shape: SpecShape, machine: Machine) -> dict[str, Any]:
        window = window_forms(eager, (shape.tokens,), CONTEXT)
        with decoding(eager, random_prompts(eager, 1, CONTEXT), shape) as engine:
            ours = machine.compare({"cycle": lambda: Form(engine.step, "in a row")})
        times = {**ours["times_us"], **machine.compare(window)["times_us"]}
        (cycle_us, window_us) = (time["median"] for time in times.values())
        return {"times_us": times, "figures": {"times its target window": cycle_us / window_us}}

    yield Case("window", f"batch 1, {CONTEXT} tokens", windows)
    for text in SHAPES if llm.draft is not None else ():
        shape = SpecShape.parse(text)
        yield Case("cycle", text, partial(cycle, shape), {"shape": text})
    for batch in batches:
        yield Case("plain decoding", f"batch {batch}", partial(_rates, llm, model, batch), {"batch": batch})


def _rates(llm: LLM, model: Any, batch: int, machine: Machine) -> dict[str, Any]:
    """Tokens/s of a batch, in turns with transformers' ``generate``."""
    prompt = llm.tokenize_task(TEXT)
    ours = loaded(llm.target, None, batch, len(prompt))
    for _ in range(2):  # as a server that has been running
        decode_rate(ours, [prompt] * batch)
    peer = partial(transformers_seconds, model)
    if model is not None:
        peer([prompt] * batch, 2)
    pairs = [
        (decode_rate(ours, [prompt] * batch), model and peer_rate(peer, [prompt] * batch)) for _ in range(3)
    ]
    rate = statistics.median(mine for mine, _ in pairs)
    if model is None:
        return {"figures": {"tokens/s": rate}}
    theirs = statistics.median(other for _, other in pairs)
    return {"figures": {"tokens/s": rate, "transformers tokens/s": theirs, "times faster": rate / theirs}}


def decode_rate(llm: LLM, prompts: list[list[int]], num_tokens: int = 64) -> float:
    """Tokens/s of plain decoding of a batch after its first tokens."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, shape="none")
    # The batch is whole from the last prefill on, so the last request's time is the batch's.
    return len(prompts) * (num_tokens - 1) / outputs[-1].decode_s
