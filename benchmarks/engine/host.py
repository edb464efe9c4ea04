"""``python benchmarks engine --host``: the host's time a step, with a target whose cycles cost nothing.

Engine, scheduler, slots, page pool, results and text are those that serve; of a cycle only the inputs are
written, as a graph's would be, and tokens that were made before come back. So what is timed is what a GPU
could wait for. Prompts are computed, before anything is timed, by a tiny model.

Legend: B requests, S steps.
"""

import statistics
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
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
from eagle_kit.config.engine import EngineConfig, GraphMode
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import ShapeTable, SpecShape
from eagle_kit.models.config import TargetConfig
from eagle_kit.serve.cycle import Emitted
from eagle_kit.serve.engine import Engine
from eagle_kit.serve.graph import EagerGraph, GraphCall, GraphRunner
from eagle_kit.serve.request import Request
from eagle_kit.serve.text_stream import TextStream

VOCAB = 512
NULL = TargetConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
)
PROMPT, STEPS, WARM_UPS = 64, 200, 20
LLAMA_8B = 5e-4, 256.0
"""The scheduler's costs, of reading a token's keys and of the weights, of Llama-3.1-8B on a GPU: with those
of so small a model, requests would sit cycles out."""
TINY = 8
"""Largest batch of a trial."""
MARKS = {64: 500.0, 256: 1500.0}
"""Most microseconds of a step, by batch."""


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
    """Measure -> exit code, 1 when a case failed."""
    machine = Machine.here(options.seed)._replace(device=torch.device("cpu"), dtype=torch.float32)
    made = [
        Case("host", str(load), partial(measure, load), {"batch": load.batch, "shape": load.shape})
        for load in loads()
        if load.batch <= (TINY if options.tiny else load.batch)
    ]
    return conduct(Benchmark("host", made, {"model": "null"}, host_targets), machine, options)


def measure(load: Load, machine: Machine, steps: int = STEPS) -> dict[str, Any]:
    """Microseconds of a step, and of the text that is made of its tokens beside it; torch's operations of a
    step, and tensors among them that come from the host: the most of any step."""
    with serving(load, machine.seed) as engine:
        step, text = [], []
        for _ in range(WARM_UPS + steps):
            start = time.perf_counter()
            news = engine.step()
            middle = time.perf_counter()
            assert len(news) == load.batch, "a step is a cycle of all requests"
            for request in news:
                request.read()
            step.append(1e6 * (middle - start))
            text.append(1e6 * (time.perf_counter() - middle))
        counted = operations(engine, 2 * engine.config.page_size)
    step, text = step[WARM_UPS:], text[WARM_UPS:]
    figures = {
        "step us, least": min(step),
        "median": statistics.median(step),
        "text us, least": min(text),
        "torch operations": max(map(Counter.total, counted)),
        "from the host": max(each[FROM_HOST] for each in counted),
    }
    return {"figures": figures}


def host_targets(rows: Rows, counts: bool) -> list[Verdict]:
    """The marks of batches of 64 and 256."""
    found = [(row["figures"]["step us, least"], row) for row in rows if row["status"] == "ok"]
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
def serving(load: Load, seed: int = 0) -> Iterator[Engine]:
    """An engine as on a GPU, one step behind its cycles, whose requests have begun and do not end."""
    target, draft = make_models(NULL, VOCAB // 4, torch.device("cpu"), torch.float32, seed)
    shape = SpecShape.parse(load.shape)
    tokens = PROMPT + (WARM_UPS + STEPS + 100) * (shape.steps + 1)
    config = EngineConfig(
        max_batch_size=load.batch,
        max_context=tokens,
        kv_tokens=load.batch * (tokens + 160),
        graph_mode="off",
        shape=ShapeTable.parse(shape),
    ).resolve(on_gpu=True, max_positions=NULL.max_position_embeddings)
    engine = Engine(target, draft if shape.steps else None, config)
    engine.use_shape(shape)
    engine.scheduler.reading_cost, engine.scheduler.weights_cost = LLAMA_8B
    tokenizer, generator = words(), torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, VOCAB, (load.batch + load.waiting, PROMPT), generator=generator).tolist()
    requests = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(**{**vars(load.params), "max_tokens": tokens})
        stream, priority = TextStream(tokenizer, params.stop), -int(i >= load.batch)
        requests.append(Request(i, prompt, params, priority, stream))
        engine.add_request(requests[-1])
    served = requests[: load.batch]
    engine.runner.graphs = NullGraphs(seed)  # type: ignore[assignment]
    while any(not request.token_ids for request in served):
        engine.step()
    yield engine
    assert all(request.finish_reason is None and request.slot >= 0 for request in served), "a reply ended"


def words() -> Tokenizer:
    """A tokenizer of ``VOCAB`` words; ids only, so that a text is as long as a real one's."""
    tokenizer = Tokenizer(models.WordLevel({f"Ġw{i}": i for i in range(VOCAB)}, unk_token="Ġw0"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class NullGraphs:
    """:class:`~eagle_kit.serve.graph.CycleGraphs` whose replays compute nothing: request i of a batch always
    emits 1 + i mod (S + 1) tokens."""

    mode: GraphMode = "cycle"
    has_fixed_shapes = True
    num_warm_ups = num_graphs = 0

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._kinds: dict[tuple[str, Hashable], Emitted] = {}
        self._replays = GraphRunner("cycle", EagerGraph)

    def run(self, call: GraphCall) -> Emitted:
        """Write the inputs -> the tokens of every such call."""
        kind = call.name, call.key
        if kind not in self._kinds:
            assert isinstance(call.body, partial)
            batch, most = len(call.inputs.rows), call.body.keywords["settings"].shape.steps + 1
            tokens = torch.randint(1, VOCAB, (batch, most), generator=self._generator)
            counts = 1 + torch.arange(batch) % most
            self._kinds[kind] = Emitted(tokens, counts, None, torch.ones(batch, dtype=torch.bool))
        emitted = self._kinds[kind]
        return self._replays.run(call._replace(body=lambda inputs: emitted, idle=lambda: call.inputs))


FROM_HOST = "aten.lift_fresh.default"


class _Counting(TorchDispatchMode):
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
        with _Counting() as counting:
            engine.step()
        found.append(counting.counts)
    return found
