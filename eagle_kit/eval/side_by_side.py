"""Engines that decode the same prompts side by side, a cycle of one after a cycle of another.

A machine that others share changes its speed for seconds at a time. Engines that run one after
another meet it at different speeds; engines that alternate cycle by cycle meet the same speed, so
the ratios of their rates are steady.
"""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.calibrate.cycle_timing import prefill
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.request import Request

WHOLE_RESPONSE = 1 << 30
"""Cycles that are enough for any response."""


class Decoded(NamedTuple):
    """What one engine did.

    Attributes:
        requests: as they ended.
        rate: tokens per second while it decoded.
        cycle_ms: milliseconds of a cycle.
    """

    requests: Sequence[Request]
    rate: float
    cycle_ms: float


class _Lane:
    """One engine with its requests, which are prefilled when it is made.

    Neither prefill nor, unless ``counts_recording``, cycles that make a recording are counted: an
    engine makes its recordings once.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        counts_recording: bool,
        while_whole: bool,
    ) -> None:
        self._engine = llm.engine()
        self._counts_recording = counts_recording
        self._while_whole = while_whole
        self._num_counted_tokens = 0
        self._num_cycles = 0
        self._seconds = 0.0
        self.requests = [llm.make_request(prompt, params) for prompt in prompts]
        for request in self.requests:
            request.group = self.requests[0].number
        prefill(self._engine, self.requests)

    @property
    def is_running(self) -> bool:
        """False once all requests have ended, or one of them with ``while_whole``."""
        if self._while_whole and any(request.finish_reason is not None for request in self.requests):
            return False
        return self._engine.has_work

    @property
    def num_tokens(self) -> int:
        """Tokens of all responses so far."""
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def result(self) -> Decoded:
        """The requests, and the figures of the cycles that count."""
        rate = self._num_counted_tokens / max(self._seconds, 1e-9)
        cycle_ms = 1e3 * self._seconds / max(self._num_cycles, 1)
        return Decoded(self.requests, rate, cycle_ms)

    def run(self, num_cycles: int) -> None:
        """Run ``num_cycles`` cycles, or as many as there are."""
        runner = self._engine.runner
        tokens_before = self.num_tokens
        warm_ups_before = runner.graphs.num_warm_ups
        num_done = 0
        started = time.perf_counter()
        while self.is_running and num_done < num_cycles:
            self._engine.step()
            num_done += 1
        seconds = time.perf_counter() - started
        if self._counts_recording or runner.graphs.num_warm_ups == warm_ups_before:
            self._num_counted_tokens += self.num_tokens - tokens_before
            self._num_cycles += num_done
            self._seconds += seconds

    def end(self) -> None:
        """Abort the requests that have not ended."""
        for request in self.requests:
            self._engine.abort(request)
        self._engine.drain()


def decode_side_by_side(
    llms: Mapping[str, LLM],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    counts_recording: bool = False,
    while_whole: bool = False,
) -> dict[str, Decoded]:
    """Decode one batch of prompts with several engines, each in the shapes that it was made with.

    On a CPU the engine that has emitted the fewest tokens runs the next cycle. On a GPU, whose host
    runs ahead of it, each decodes its responses as a whole.

    Args:
        counts_recording: also count cycles that make a recording.
        while_whole: stop an engine when the first of its requests ends. Behind it the batch is
            smaller, and has the requests whose drafts are accepted least; a server would admit
            others in its place.
    """
    on_gpu = any(llm.target.embed_tokens.weight.is_cuda for llm in llms.values())
    num_cycles = WHOLE_RESPONSE if on_gpu else 1
    lanes: dict[str, _Lane] = {}
    try:
        for name, llm in llms.items():
            lanes[name] = _Lane(llm, prompts, params, counts_recording, while_whole)
        while running := [lane for lane in lanes.values() if lane.is_running]:
            slowest = min(running, key=lambda lane: lane.num_tokens)
            slowest.run(num_cycles)
        return {name: lane.result for name, lane in lanes.items()}
    finally:
        for lane in lanes.values():
            lane.end()
