"""Line of the log about a server's traffic, in vLLM's words: throughput, requests, pool, drafts, memory."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.device_memory import GpuMemory, gpu_memory

if TYPE_CHECKING:
    from eagle_kit.engine.engine import Engine
    from eagle_kit.server.async_engine import AsyncEngine

LOGGER_NAME = __name__
"""Name of the logger that has the lines, at the level INFO."""
NUM_SHAPES = 3
"""Most shapes that a line names."""


@dataclass(frozen=True)
class Counts:
    """Counters and gauges of an engine at one time.

    Attributes:
        at: ``time.monotonic()`` seconds.
        num_running, num_waiting: requests in the batch and in the queue.
        kv_usage: share of the key-value pool in use, 0 to 1.
        num_prompt_tokens, num_cached_prompt_tokens, num_generated_tokens, num_drafts, num_draft_tokens,
            num_accepted_tokens, num_finished: see :class:`~eagle_kit.engine.engine.EngineTotals`.
        shapes: cycles in each shape.
        memory: of the engine's GPU; None on a CPU.
    """

    at: float
    num_running: int
    num_waiting: int
    kv_usage: float
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_generated_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_finished: int
    shapes: Counter[SpecShape]
    memory: GpuMemory | None

    @classmethod
    def of(cls, engine: "Engine") -> "Counts":
        """Read the counters of an engine, from any thread."""
        totals = engine.totals
        return cls(
            at=time.monotonic(),
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            kv_usage=engine.kv_usage,
            num_prompt_tokens=totals.num_prompt_tokens,
            num_cached_prompt_tokens=totals.num_cached_prompt_tokens,
            num_generated_tokens=totals.num_generated_tokens,
            num_drafts=totals.num_drafts,
            num_draft_tokens=totals.num_draft_tokens,
            num_accepted_tokens=sum(list(totals.spec.num_accepted_at)),
            num_finished=sum(dict(totals.num_finished).values()),
            shapes=Counter(dict(totals.shapes)),
            memory=gpu_memory(engine.runner.device),
        )

    @property
    def is_idle(self) -> bool:
        """True if the engine has no request."""
        return self.num_running == self.num_waiting == 0


def has_news(before: Counts, now: Counts) -> bool:
    """Return True if there was traffic between two times, or if the last line said that there was some."""
    has_work = not (before.is_idle and now.is_idle)
    has_tokens = now.num_generated_tokens > before.num_generated_tokens
    return has_work or has_tokens or now.num_finished > before.num_finished


def stats_line(before: Counts, now: Counts) -> str:
    """Return the line about the time between ``before`` and ``now``, without its end."""
    return ", ".join(_parts(before, now))


def _parts(before: Counts, now: Counts) -> Iterator[str]:
    """Iterate over the parts of a line. What did not occur in the time has none."""
    # Throughput and requests.
    seconds = max(now.at - before.at, 1e-9)
    num_prompt_tokens = now.num_prompt_tokens - before.num_prompt_tokens
    num_generated = now.num_generated_tokens - before.num_generated_tokens
    yield f"Avg prompt throughput: {num_prompt_tokens / seconds:.1f} tokens/s"
    yield f"Avg generation throughput: {num_generated / seconds:.1f} tokens/s"
    yield f"Running: {now.num_running} reqs"
    yield f"Waiting: {now.num_waiting} reqs"

    # The pool and its cache.
    yield f"KV cache usage: {100 * now.kv_usage:.1f}%"
    if num_prompt_tokens > 0:
        num_cached = now.num_cached_prompt_tokens - before.num_cached_prompt_tokens
        yield f"Prefix cache hit rate: {100 * num_cached / num_prompt_tokens:.1f}%"

    # Speculation.
    num_drafts = now.num_drafts - before.num_drafts
    num_draft_tokens = now.num_draft_tokens - before.num_draft_tokens
    if num_drafts > 0 and num_draft_tokens > 0:
        num_accepted = now.num_accepted_tokens - before.num_accepted_tokens
        yield f"Mean acceptance length: {1 + num_accepted / num_drafts:.2f}"
        yield f"Avg draft acceptance rate: {100 * num_accepted / num_draft_tokens:.1f}%"
    cycles = now.shapes - before.shapes
    if cycles:
        most = cycles.most_common(NUM_SHAPES)
        shares = [f"{shape} {100 * count / cycles.total():.0f}%" for shape, count in most]
        yield f"Shapes: {' | '.join(shares)}"

    # Memory.
    if now.memory is not None:
        used = now.memory.total - now.memory.free
        yield f"GPU memory: {used / 1e9:.1f} of {now.memory.total / 1e9:.1f} GB"


async def log_stats(served: "AsyncEngine", interval_s: float) -> None:
    """Write a line every ``interval_s`` seconds until cancelled. While the engine is idle there is none."""
    logger = logging.getLogger(LOGGER_NAME)
    before = await asyncio.to_thread(Counts.of, served.engine)
    while served.failure is None:
        await asyncio.sleep(interval_s)
        now = await asyncio.to_thread(Counts.of, served.engine)
        if has_news(before, now):
            logger.info("%s", stats_line(before, now))
        before = now
