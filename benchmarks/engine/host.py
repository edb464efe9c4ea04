"""``python benchmarks engine --host``: the host's time a step and a prompt, with a target whose cycles take
the device little time.

Engine, scheduler, slots, page pool, graphs, results and text are those that serve, one step behind. Before
each step the device comes to rest, so that the host's own work is timed: a larger target's cycle has to last
as long for the device not to rest. Times are also given as multiples of 1,000 calls of an empty operator in
the same process, which differ less between machines.

Legend: B requests, S steps.
"""

import statistics
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.case import Case, Machine
from benchmarks.models import make_models
from benchmarks.options import Options
from benchmarks.runner import Benchmark, conduct
from benchmarks.verdict import Rows, Verdict, at_most
from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import ShapeTable, SpecShape
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.request import Request
from eagle_kit.engine.text_stream import TextStream
from eagle_kit.models.config import TargetConfig

VOCAB = 512
SMALL = TargetConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 128,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
)
PROMPT = 64
STEPS = 200
WARM_UPS = 20
LLAMA_8B = 5e-4, 256.0
"""The scheduler's costs, of reading a token's keys and of the weights, of Llama-3.1-8B on a GPU: with those
of so small a model, the scheduler would skip requests in some cycles."""
TINY = 8
"""Largest batch of a trial."""
MARKS = {64: 500.0, 256: 1500.0}
"""Most microseconds of a step, by batch."""
PROMPTS = 20
"""Prompts of which the least time counts."""
PROMPT_LENGTHS = (30, 128, 512)
DEPTH = 4
"""Layers by which the deeper of two targets exceeds the other: what a layer takes is their difference."""


class Load(NamedTuple):
    """``batch`` requests with ``params`` that decode in a ``shape``, and how many are ``waiting``."""

    batch: int
    shape: str
    waiting: int = 0
    params: SamplingParams = SamplingParams()
    note: str = ""

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.shape}{', ' * bool(self.note)}{self.note}"


def loads() -> list[Load]:
    """The cases: plain and drafted batches, and the kinds of requests that cost more."""
    found = [Load(batch, shape) for shape in ("none", "3,1,4") for batch in (1, 8, 64, 256)]
    stops = SamplingParams(stop=("a text that never comes",))
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=1)
    for batch in (64, 256):
        found += [
            Load(batch, "3,1,4", waiting=8, note="8 waiting"),
            Load(batch, "3,1,4", params=stops, note="stop texts"),
            Load(batch, "3,1,4", params=sampled, note="sampled"),
        ]
    return found


def main(options: Options) -> int:
    """Measure -> exit code, 1 when a case failed.

    Raises:
        UserError: there is no CUDA device.
    """
    machine = Machine.here(options.seed)
    if not machine.on_gpu:
        raise UserError(
            "The host's time a step is measured around CUDA graphs, and there is no CUDA device.",
            "Run it on a machine with a GPU; python benchmarks serve measures the host's work on a CPU.",
        )
    made = [
        Case("host", str(load), partial(measure, load), {"batch": load.batch, "shape": load.shape})
        for load in loads()
        if load.batch <= (TINY if options.tiny else load.batch)
    ]
    for tokens in PROMPT_LENGTHS:
        facts = {"tokens": tokens}
        made.append(Case("prompt", f"{tokens} tokens", partial(measure_prompt, tokens), facts))
        eager = partial(measure_prompt, tokens, is_eager=True)
        made.append(Case("prompt", f"{tokens} tokens, eager", eager, facts))
    return conduct(Benchmark("host", made, {"model": "one layer"}, host_targets), machine, options)


def measure(load: Load, machine: Machine, steps: int = STEPS) -> dict[str, Any]:
    """Microseconds of a step, and of the text that is made of its tokens beside it; tokens that a request
    gets in a step; torch's operations of a step, and tensors among them that come from the host: the most of
    any step."""
    step = []
    text = []
    with serving(load, machine) as engine:
        for _ in range(WARM_UPS + steps):
            torch.cuda.synchronize(machine.device)
            start = time.perf_counter()
            updated = engine.step()
            middle = time.perf_counter()
            assert len(updated) == load.batch, "a step is a cycle of all requests"
            for request in updated:
                request.decode_text()
            step.append(1e6 * (middle - start))
            text.append(1e6 * (time.perf_counter() - middle))
        num_tokens = sum(len(request.token_ids) for request in engine.scheduler.running)
        num_steps = sum(engine.totals.shapes.values())
        counted = operations(engine, 2 * engine.config.page_size)
    step = step[WARM_UPS:]
    text = text[WARM_UPS:]
    figures = {
        "step us, least": min(step),
        "median": statistics.median(step),
        IN_CALLS: min(step) / empty_calls_us(),
        "text us, least": min(text),
        "tokens a request": num_tokens / load.batch / num_steps,
        "torch operations": max(map(Counter.total, counted)),
        "from the host": max(each[FROM_HOST] for each in counted),
    }
    return {"figures": figures}


def measure_prompt(
    tokens: int, machine: Machine, repeats: int = PROMPTS, *, is_eager: bool = False
) -> dict[str, Any]:
    """Microseconds of a prompt of ``tokens`` alone, by a target of one layer and its head; the same as a
    multiple of 1,000 empty calls; what a further layer takes of both; torch's operations of a prompt, and
    blocks of memory that they allocate. A prompt is a replay of graphs, or eager."""
    depths = (1, 1 + DEPTH)
    engines = [_prompt_engine(machine, tokens, depth) for depth in depths]
    if is_eager:
        for engine in engines:
            engine.runner.prompt_shapes = []
    generator = torch.Generator().manual_seed(machine.seed)

    # The two targets in turns, since the machine's speed may change.
    times: list[list[float]] = [[], []]
    for number in range(WARM_UPS // 10 + repeats):
        for engine, found in zip(engines, times, strict=True):
            start_prompt(engine, number, tokens, generator)
            torch.cuda.synchronize(machine.device)
            start = time.perf_counter()
            engine.step()
            found.append(1e6 * (time.perf_counter() - start))
            _end_prompts(engine)
    alone, deep = (min(found[-repeats:]) for found in times)
    a_layer = (deep - alone) / DEPTH
    calls_us = empty_calls_us()

    # Counts of one prompt more.
    start_prompt(engines[0], 0, tokens, generator)
    num_allocations = allocations(engines[0].step)
    _end_prompts(engines[0])
    start_prompt(engines[0], 0, tokens, generator)
    (counted,) = operations(engines[0], 1)
    _end_prompts(engines[0])
    figures = {
        "prompt us, least": alone,
        "median": statistics.median(times[0][-repeats:]),
        IN_CALLS: alone / calls_us,
        "a layer us": a_layer,
        f"a layer {IN_CALLS}": a_layer / calls_us,
        "torch operations": counted.total(),
        "allocations": num_allocations,
    }
    return {"figures": figures}


def start_prompt(engine: Engine, number: int, tokens: int, generator: torch.Generator) -> None:
    """Add a request of ``tokens`` random tokens, which the next step of an engine that is at rest reads."""
    prompt = torch.randint(1, VOCAB, (tokens,), generator=generator).tolist()
    engine.add_request(Request(number, prompt, SamplingParams(max_tokens=1)))


def _end_prompts(engine: Engine) -> None:
    """Run an engine until it is at rest."""
    while engine.scheduler.running or engine.num_waiting:
        engine.step()
    engine.drain()


def _prompt_engine(machine: Machine, tokens: int, num_layers: int) -> Engine:
    """An engine that caches no prefixes, of a target with ``num_layers``."""
    model = replace(SMALL, num_layers=num_layers)
    target, draft = make_models(model, VOCAB // 4, machine.device, machine.dtype, machine.seed)
    shape = SpecShape.parse("3,1,4")
    config = EngineConfig(
        max_batch_size=1,
        max_context=tokens + 64,
        kv_tokens=2 * (tokens + 64),
        prefix_cache=False,
        shape=ShapeTable.parse(shape),
    ).resolve(on_gpu=True, max_positions=SMALL.max_position_embeddings)
    engine = Engine(target, draft, config)
    engine.use_shape(shape)
    return engine


def host_targets(rows: Rows, counts: bool) -> list[Verdict]:
    """The marks of batches of 64 and 256."""
    steps = [row for row in rows if row["status"] == "ok" and "batch" in row]
    found = [(row["figures"]["step us, least"], row) for row in steps]
    return [
        at_most(
            f"host: <= {mark / 1000} ms a step of {batch} requests, the least of many",
            mark,
            [(least, row["case"]) for least, row in found if row["batch"] == batch],
            counts=counts,
        )
        for batch, mark in MARKS.items()
    ]


@contextmanager
def serving(load: Load, machine: Machine) -> Iterator[Engine]:
    """An engine on a GPU, one step behind its cycles, whose requests have begun and do not end."""
    target, draft = make_models(SMALL, VOCAB // 4, machine.device, machine.dtype, machine.seed)
    shape = SpecShape.parse(load.shape)
    tokens = PROMPT + (WARM_UPS + STEPS + 100) * (shape.steps + 1)
    config = EngineConfig(
        max_batch_size=load.batch,
        max_context=tokens,
        kv_tokens=load.batch * (tokens + 160),
        batch_sizes=(load.batch,),
        shape=ShapeTable.parse(shape),
    ).resolve(on_gpu=True, max_positions=SMALL.max_position_embeddings)
    engine = Engine(target, draft if shape.steps else None, config)
    engine.use_shape(shape)
    engine.scheduler.reading_cost, engine.scheduler.weights_cost = LLAMA_8B

    # Requests that have begun.
    tokenizer = words()
    generator = torch.Generator().manual_seed(machine.seed)
    prompts = torch.randint(1, VOCAB, (load.batch + load.waiting, PROMPT), generator=generator).tolist()
    requests = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(**{**vars(load.params), "max_tokens": tokens})
        stream = TextStream(tokenizer, params.stop)
        priority = -int(i >= load.batch)
        requests.append(Request(i, prompt, params, priority, stream))
        engine.add_request(requests[-1])
    served = requests[: load.batch]
    while any(not request.token_ids for request in served):
        engine.step()

    yield engine
    is_running = [request.finish_reason is None and request.sequence.slot >= 0 for request in served]
    assert all(is_running), "a response ended"


def words() -> Tokenizer:
    """A tokenizer of ``VOCAB`` words; ids only, so that a text is as long as a real one's."""
    tokenizer = Tokenizer(models.WordLevel({f"Ġw{i}": i for i in range(VOCAB)}, unk_token="Ġw0"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


FROM_HOST = "aten.lift_fresh.default"
IN_CALLS = "in 1,000 empty calls"
_library = torch.library.Library("eagle_kit_benchmarks", "FRAGMENT")
_library.define("nothing(Tensor x) -> ()")
_library.impl("nothing", lambda x: None, "CPU")


def empty_calls_us() -> float:
    """Microseconds of 1,000 calls of an operator in Python that does nothing, the least of 20 times."""
    nothing = torch.ops.eagle_kit_benchmarks.nothing.default
    x = torch.zeros(1)
    with torch.inference_mode():
        return 1e6 * min(timeit.repeat(lambda: nothing(x), number=1000, repeat=20))


def allocations(run: Callable[[], Any]) -> int:
    """Blocks that torch's CUDA allocator hands out while ``run`` runs."""
    name = "allocation.all.allocated"
    before = torch.cuda.memory_stats()[name]
    run()
    found: int = torch.cuda.memory_stats()[name] - before
    return found


class Counting(TorchDispatchMode):
    """Mode that counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(engine: Engine, steps: int) -> list[Counter[str]]:
    """Torch's operations by name, of each of some steps; :data:`FROM_HOST` makes a tensor of numbers."""
    found = []
    for _ in range(steps):
        with Counting() as counting:
            engine.step()
        found.append(counting.counts)
    return found
