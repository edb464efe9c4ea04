"""Engines that decode the same prompts side by side, a cycle of one after a cycle of another.

A machine that others share is faster now and slower then, for seconds on end. Settings that are run one after
another meet different machines; cycles that alternate meet the same one, and their ratios are steady.
"""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.calibrate.cycle_timing import prefill
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.request import Request

WHOLE_REPLY = 1 << 30


class Decoded(NamedTuple):
    """What one engine did: the ``requests``, as they ended, tokens per second while it decoded, and
    milliseconds of a cycle."""

    requests: Sequence[Request]
    rate: float
    cycle_ms: float


class _Lane:
    """One engine. Prefill does not count, nor, unless ``counts_recording``, do cycles that make a recording,
    once in an engine's life."""

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        counts_recording: bool,
        while_whole: bool,
    ) -> None:
        self._engine, self._counts_recording = llm.engine(), counts_recording
        self._while_whole = while_whole
        self.requests = [llm.make_request(prompt, params) for prompt in prompts]
        for request in self.requests:
            request.group = self.requests[0].number
        prefill(self._engine, self.requests)
        self._num_counted, self._num_cycles, self._seconds = 0, 0, 0.0

    @property
    def is_running(self) -> bool:
        ended = any(request.finish_reason is not None for request in self.requests)
        return self._engine.has_work and not (self._while_whole and ended)

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)

    def result(self) -> Decoded:
        cycle_ms = 1e3 * self._seconds / max(self._num_cycles, 1)
        return Decoded(self.requests, self._num_counted / max(self._seconds, 1e-9), cycle_ms)

    def turn(self, num_cycles: int) -> None:
        before, num_warm_ups = self.num_tokens, self._engine.runner.graphs.num_warm_ups
        begun, num_done = time.perf_counter(), 0
        while self.is_running and num_done < num_cycles:
            self._engine.step()
            num_done += 1
        seconds = time.perf_counter() - begun
        if self._counts_recording or self._engine.runner.graphs.num_warm_ups == num_warm_ups:
            self._num_counted += self.num_tokens - before
            self._num_cycles += num_done
            self._seconds += seconds

    def end(self) -> None:
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
    """Decode one batch of prompts with several engines, each in the shapes that it was made with. Cycles that
    make a recording count if ``counts_recording``.

    With ``while_whole`` an engine stops when the first of its requests ends: what comes then is a smaller
    batch, in which those are left that are drafted worst. A server that is asked goes on with others.

    On a CPU the engine that is behind the others runs the next cycle. On a GPU, whose host runs ahead of it,
    each decodes its replies as a whole.
    """
    on_gpu = any(llm.target.embed_tokens.weight.is_cuda for llm in llms.values())
    lanes: dict[str, _Lane] = {}
    try:
        for name, llm in llms.items():
            lanes[name] = _Lane(llm, prompts, params, counts_recording, while_whole)
        while running := [lane for lane in lanes.values() if lane.is_running]:
            min(running, key=lambda lane: lane.num_tokens).turn(WHOLE_REPLY if on_gpu else 1)
        return {name: lane.result() for name, lane in lanes.items()}
    finally:
        for lane in lanes.values():
            lane.end()
