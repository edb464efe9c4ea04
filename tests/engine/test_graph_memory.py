"""Memory of CUDA graphs in the plan, by estimate."""

from dataclasses import replace

import pytest
import torch
from tiny import tiny_head, tiny_target

from benchmarks.engine.launches import MODEL
from benchmarks.models import preset_named
from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.engine.memory import engine_memory as memory
from eagle_kit.engine.memory import graph_memory
from eagle_kit.engine.memory.engine_memory import MemoryPlan, Place, plan_memory
from eagle_kit.engine.memory.graph_memory import graphs_of
from eagle_kit.engine.padded_prompts import prompt_shapes
from tests.benchmarks.test_launches import LLAMA, SMALL, TOTALS, small


@pytest.fixture
def models():
    target = tiny_target()
    return target, HeadDraftModel(tiny_head(target), target)


def resolved(**options):
    sizes = {"max_batch_size": 32, "max_context": 128, "shape": "3,2,6", **options}
    return EngineConfig(**sizes).resolve(on_gpu=True, max_positions=10**6)


PROMPTS = 2 * len(prompt_shapes(resolved()))
"""Graphs of prompt steps: of the target and of the draft in each shape."""


def launches(config, draft, shape):
    return sum(graph_memory._launches(config, draft, SpecShape.parse(shape)))


@pytest.mark.parametrize("shape", LLAMA)
def test_launches_are_estimated_within_a_fifth(shape, models):
    draft = models[1] if shape != "none" else None
    assert TOTALS[shape] <= launches(preset_named(MODEL)[0], draft, shape) <= 1.2 * TOTALS[shape]


@pytest.mark.parametrize("kind", SMALL)
def test_launches_of_other_layers_are_estimated(kind):
    counted = sum(SMALL[kind]["none"])
    assert counted <= launches(small(kind), None, "none") <= 1.6 * counted


def test_graphs_grow_with_kinds_sizes_and_shapes(models):
    target, draft = models
    config = resolved()
    found = {
        extent: graphs_of(target.config, draft, config, extent, chooses_shapes=False)
        for extent in ("all", "usual", "none")
    }
    assert config.batch_sizes == (1, 2, 4, 8, 16, 24, 32)
    assert [each.number for each in found.values()] == [7 * 9 + PROMPTS, 7 * 4 + PROMPTS, 0]
    assert found["all"].bytes > found["usual"].bytes > 7 * 4 * 100 * graph_memory.BYTES_OF_LAUNCH
    chosen = graphs_of(target.config, draft, config, "usual", chooses_shapes=True)
    assert chosen.number == 7 * 4 * (graph_memory.MAX_CANDIDATES + 1) + PROMPTS


def test_ranks_of_data_parallel_attention_have_graphs_for_uneven_batches(models):
    """8 requests of which a rank of 8 has two are padded to two each, 16 rows to gather."""
    target, draft = models
    config = resolved(tensor_parallel=8, data_parallel_attention=True)
    sizes = {size: config.shard_batch_sizes(size) for size in config.batch_sizes}
    assert sizes == {
        1: (1,),
        2: (1, 2),
        4: (1, 2, 4),
        8: (1, 2, 4),
        16: (2, 4),
        24: (3, 4),
        32: (4,),
    }
    found, even = (
        graphs_of(target.config, draft, each, "all", chooses_shapes=False) for each in (config, resolved())
    )
    assert (found.number, even.number) == (14 * 8 + 7, 7 * 8 + 7 + PROMPTS), "proposals know nothing of ranks"
    of_prompts = graph_memory.graphs_of_prompts(target.config, draft, resolved(), None)
    of_cycles = even.bytes - of_prompts.bytes
    assert 1.7 * of_cycles < found.bytes < 2 * of_cycles


def test_drafts_that_are_sampled_are_kept_by_halves_of_cycles(models):
    """Probabilities of all drafts are outputs of two graphs and inputs of two."""
    target, draft = models
    plain, sampled = (
        graphs_of(target.config, draft, config, "all", chooses_shapes=False).bytes
        for config in (resolved(shape="3,1,4"), resolved(shape="3,1,4", sampled_drafts=True))
    )
    sizes, one = resolved().batch_sizes, launches(target.config, draft, "3,1,4")
    verified = launches(target.config, None, "none")
    more = len(sizes) * (one - verified) * graph_memory.BYTES_OF_LAUNCH + sum(sizes) * 4 * 8 * 4
    assert sampled - plain == more + 4 * sum(sizes) * 3 * target.config.vocab_size * 4


@pytest.fixture
def planned(models):
    """A function from free bytes and options to the plan of a GPU."""
    target, draft = models

    def plan(free, **options):
        place = Place(torch.device("cuda", 0), free)
        return plan_memory(target, draft, resolved(**options), place=place)

    return plan


def test_the_plan_counts_graphs(planned):
    plan = planned(1 << 40)
    assert not plan.graphs_left_out and plan.graphs == plan.graphs_of_all
    assert plan.graph_memory >= plan.graphs.bytes, "more is left over"
    assert f"{63 + PROMPTS} graphs by estimate {plan.graphs.bytes / 1e9:.2f}" in str(plan)
    off = planned(1 << 40, graph_mode="off")
    assert off.graphs.bytes == 0 and "graphs" not in str(off) and off.activations < plan.activations
    assert off.graph_memory is None


def test_graphs_take_their_share_where_the_pool_could_use_all_of_it(planned):
    whole = planned(1 << 40)
    long = planned(1 << 40, max_context=10**6)
    fixed = long.scratch + long.logits + long.activations

    def with_room(room, **options):
        return planned(int((fixed + room) / memory.FREE_SHARE["cuda"]) + 2, max_context=10**6, **options)

    # Seven times their bytes have room for all graphs, and less for fewer and fewer.
    roomy = with_room(7 * whole.graphs.bytes)
    assert roomy.graphs.number == 63 + PROMPTS and not roomy.graphs_left_out
    numbers = []
    for room in (6, 4, 2, 1):
        plan = with_room(room * whole.graphs.bytes)
        assert plan.graphs.bytes <= plan.graph_memory <= memory.GRAPH_SHARE * room * whole.graphs.bytes + 2
        assert plan.pool >= (1 - memory.GRAPH_SHARE) * room * whole.graphs.bytes - plan.bytes_per_token
        numbers.append(plan.graphs.number)
        assert "there are none for" in str(plan) and "24" in str(plan)
    assert numbers == sorted(numbers, reverse=True) and 0 < numbers[-1] < numbers[0] < 63 + PROMPTS
    assert "there are none for" not in str(roomy)


def test_memory_of_graphs_that_is_given_comes_before_the_pool(planned):
    whole = planned(1 << 40, max_context=10**6)
    free = int((whole.scratch + whole.logits + whole.activations + 2 * whole.graphs.bytes) / 0.85)
    for given in (whole.graphs.bytes, whole.graphs.bytes // 4):
        plan = planned(free, max_context=10**6, graph_memory=given)
        assert plan.graph_memory == given
        assert plan.graphs.bytes <= given
        assert plan.pool == pytest.approx(2 * whole.graphs.bytes - given, abs=2 * plan.bytes_per_token)
    with pytest.raises(UserError) as error:
        planned(free, max_context=10**6, graph_memory=free)
    assert "graph_memory" in error.value.remedy
    with pytest.raises(UserError, match="on a CPU"):
        EngineConfig(graph_memory="1G").resolve(on_gpu=False)


def test_a_pool_of_a_given_size_comes_before_graphs(planned):
    whole = planned(1 << 40, kv_tokens=1000)
    needed = whole.scratch + whole.logits + whole.activations + whole.pool
    every = planned(needed + whole.graphs.bytes, kv_tokens=1000)
    assert every.graphs.number == 63 + PROMPTS and every.graph_memory == whole.graphs.bytes
    fewer = planned(needed + whole.graphs.bytes - 1, kv_tokens=1000)
    assert 55 + PROMPTS < fewer.graphs.number < 63 + PROMPTS and fewer.graph_memory == whole.graphs.bytes - 1
    none = planned(needed, kv_tokens=1000)
    assert none.graphs.number == 0 and "1, 2 .. 32 (7 sizes)" in str(none)
    with pytest.raises(UserError, match="Lower kv_tokens"):
        planned(needed - 1, kv_tokens=1000)


def test_ranks_agree_on_what_the_poorest_has():
    plan = MemoryPlan(500, 8, 2, 1000, 10, 10, 10, 9000, state_snapshots=7, graph_memory=90)
    others = [
        replace(plan, kv_tokens=400, state_snapshots=9),
        replace(plan, kv_tokens=600, state_snapshots=3, graph_memory=70),
        replace(plan, graph_memory=100),
    ]
    agreed = plan.smallest([plan, *others])
    assert (agreed.kv_tokens, agreed.state_snapshots, agreed.graph_memory) == (400, 3, 70)
    without = replace(plan, state_snapshots=None)
    assert without.smallest([without, without]).state_snapshots is None
    sizes = {"kv_tokens": 400, "kv_memory": None, "state_snapshots": 3, "graph_memory": 70}
    assert agreed.sizes == sizes


def test_the_log_of_n_grams_has_its_place_on_the_host(models):
    target, _ = models
    place = Place(torch.device("cpu"), 10**9)
    sizes = {"algorithm": "NGRAM", "ngram": {"capacity": 1000}, "max_batch_size": 2, "max_context": 64}
    config = EngineConfig(**sizes, shape="3,2,6").resolve(on_gpu=False)
    plan = plan_memory(target, None, config, place=place)
    plain = plan_memory(target, None, config.replace(algorithm="NONE"), place=place)
    assert (plan.ngram_log, plain.ngram_log) == (config.ngram.max_bytes, 0)
    assert plain.free - plan.free == plan.ngram_log
    assert "n-gram log" in str(plan) and "n-gram log" not in str(plain)

    # Logits, tokens and a host without room.
    wide = config.replace(max_batch_size=32)
    logits = [plan_memory(target, None, each, place=place).logits for each in (config, wide)]
    assert [each // (2 * 4 * target.config.vocab_size) for each in logits] == [64, 32 * 6], "rows of windows"
    assert plan.kv_tokens == 2 * (64 + config.num_lookahead_tokens(63) + config.page_size), (
        "a batch of whole contexts"
    )
    with pytest.raises(UserError, match="free") as error:
        plan_memory(target, None, config, place=Place(place.device, 10**5))
    assert "n-gram capacity" in error.value.remedy
