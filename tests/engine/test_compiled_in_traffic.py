"""After a warm-up Triton compiles nothing, whatever requests ask for.

The engine runs on fake tensors, and every launch is noted by the key under which Triton keeps what it has
compiled, for a GPU of capability 9.0.
"""

from contextlib import contextmanager
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from launch_keys import LaunchKeys
from restless import Restless
from tiny import tiny_head, tiny_hybrid, tiny_target
from tiny_engine import resolved
from tiny_mixtures import DEEPSEEK, MIXTURES, untrained
from torch._subclasses.fake_tensor import FakeTensorMode
from traced_engine import TracedEngine, any_bits

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import ShapeTable, SpecShape
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.engine.graphs.warm_up import warm_up
from eagle_kit.engine.request import Request
from eagle_kit.ops.backend import use
from eagle_kit.ops.rows import gather_rows
from eagle_kit.ops.small_linear import small_linear

KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.2},
    {"temperature": 1.0, "logit_bias": {3: 2.0}, "frequency_penalty": 0.1},
    {"logprobs": 0},
    {"temperature": 1.0, "logprobs": 5, "min_p": 0.1},
    {"grammar": Grammar("regex", ".*")},
    {"temperature": 1.0, "grammar": Grammar("regex", ".*"), "logprobs": 3},
]
LENGTHS = (1, 2, 3, 6, 9, 16, 17, 33, 90)
TARGETS = {
    "llama": tiny_target,
    "hybrid": tiny_hybrid,
    "latents": lambda: untrained(DEEPSEEK["v3: YaRN"]),
    "experts": lambda: untrained(MIXTURES["qwen3-moe"]),
}


@contextmanager
def traced(target, has_draft=True, **options):
    """An engine on fake tensors, with Triton's kernels, and the keys of their launches."""
    head = tiny_head(target).bfloat16() if has_draft else None
    target = target.bfloat16()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), use("triton"), fake, LaunchKeys() as keys, pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle_kit.engine.tensor_parallel.agreement.allowed_bits", any_bits)
        yield make_engine(target, head, **options), keys


def make_engine(target, head, **options):
    sizes = {"kv_tokens": 4000, "graph_mode": "cycle", "lag": 1, "prefill_tokens": 64, **options}
    config = resolved(20, 128, batch_sizes=(1, 20), **sizes)
    engine = TracedEngine(target, None if head is None else HeadDraftModel(head, target), config)
    engine.runner.linear_backends.timer = lambda form, size, device: {"torch": 2.0, "triton": 1.0}[form]
    return engine


def traffic(engine):
    """Prompts of many lengths, alone, a few and many together, of every kind and of all kinds."""
    top, names, repeated = engine.target.config.vocab_size, iter(range(1 << 30)), [7] * 40

    def add(length, kind, shared=0):
        number = next(names)
        ids = repeated[: min(shared, length - 1)]
        ids = ids + [(31 * number + 7 * i) % top for i in range(length - len(ids))]
        engine.add_request(Request(number, ids, SamplingParams(max_tokens=9, ignore_eos=True, **kind)))

    def finish():
        while engine.has_work:
            engine.step()

    for i, length in enumerate(LENGTHS):
        add(length, KINDS[i % len(KINDS)])
        finish()
    for count in (3, 20):
        for i in range(count):
            add(LENGTHS[(7 * i + count) % len(LENGTHS)], KINDS[(i * count) % len(KINDS)], 16 * (i % 3))
            if i % 5 == 4:
                engine.step()
        finish()
    engine.drain()


def new_in_traffic(engine, keys):
    """What traffic adds after a warm-up: kernels with their keys, and integers that keys depend on."""
    assert warm_up(engine).num_graphs == engine.num_graphs
    known, numbers = set(keys.keys), set(keys.integers)
    traffic(engine)
    assert engine.totals.num_generated_tokens > 200 and len(known) > 20
    return sorted(keys.keys - known), sorted(keys.integers - numbers)


def test_traffic_compiles_nothing_while_shapes_change():
    """The draft also catches up with what it has missed."""
    with traced(tiny_target(num_layers=2)) as (engine, keys):
        engine.use_shape(Restless(0, [SpecShape(2, 2, 4)], most_plain=6))
        assert new_in_traffic(engine, keys) == ([], [])
    assert any("window_attention" in name for name, _ in keys.keys)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", ["none", "2,1,3 2:3,2,6"])
@pytest.mark.parametrize("target", TARGETS)
def test_traffic_compiles_nothing(target, shape):
    with traced(TARGETS[target](), has_draft=shape != "none") as (engine, keys):
        engine.use_shape(ShapeTable.parse(shape))
        assert new_in_traffic(engine, keys) == ([], [])


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"sampled_drafts": True}, {"algorithm": "NGRAM"}], ids=str)
def test_traffic_compiles_nothing_with_other_drafts(options):
    with traced(tiny_target(), has_draft="algorithm" not in options, **options) as (engine, keys):
        engine.use_shape(SpecShape.parse("3,1,4"))
        assert new_in_traffic(engine, keys) == ([], [])


def test_keys_are_those_of_triton():
    """Integers count as 1, as multiples of 16 or as others, unless the kernel forbids it; so do pointers."""

    def keys_of(operation, *inputs):
        with LaunchKeys() as keys:
            operation(*inputs)
        return frozenset(keys.keys)

    def keys_of_linear(x):
        return keys_of(partial(small_linear, backend="triton"), x, weight)

    with use("triton"), FakeTensorMode(allow_non_fake_inputs=True):
        rows, weight = torch.arange(4), torch.zeros(32, 64, dtype=torch.bfloat16)
        tables = [torch.zeros(4, width, dtype=torch.int64) for width in (1, 3, 5, 16, 32)]
        by_width = [keys_of(gather_rows, [table], rows) for table in tables]
        by_rows = {keys_of_linear(weight[:count]) for count in (1, 3, 5, 16)}
        flat = weight.flatten()
        by_offset = {keys_of_linear(flat[at : at + 64][None]) for at in (0, 1, 8, 16)}
    assert by_width[1] == by_width[2] and by_width[3] == by_width[4] and len(set(by_width)) == 3
    assert len(by_rows) == 1 and len(by_offset) == 2
