"""Acceptance predicted from one recording of a draft that is ready when a cycle proposes, against decoding in
each shape: exact where a shape's draft is a part of the recorded one, whose nodes lie in one order."""

import pytest
from sweep import sweep
from tiny import tiny_dflash, tiny_dspark, tiny_p_eagle, tiny_target
from tiny_engine import PROMPTS, resolved, serve
from tiny_mtp import save_target

from eagle_kit.autotune.shapes import all_shapes
from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.engine.calibrate.policies import can_tune, runnable
from eagle_kit.engine.calibrate.record_drafts import record_drafts
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.load_draft import load_draft_model
from eagle_kit.engine.request import Request
from eagle_kit.models.loading.loader import load_target

STEPS = {"p-eagle": 6, "dflash": 5, "dflash, causal": 5, "dspark": 6, "modules": 3}
WIDE = SpecShape(6, 8, 64)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A target of 11 tokens and a draft of each name."""
    target, folder = tiny_target(vocab_size=11), tmp_path_factory.mktemp("modules")
    save_target(folder, modules=3, vocab_size=11)
    of_modules = load_target(folder)
    heads = {
        "p-eagle": tiny_p_eagle(target, draft_vocab_size=9),
        "dflash": tiny_dflash(target),
        "dflash, causal": tiny_dflash(target, sliding_window=400, sliding_layers=(0, 1, 2)),
        "dspark": tiny_dspark(target),
    }
    made = {name: (target, load_draft_model(head.eval(), target)) for name, head in heads.items()}
    return made | {"modules": (of_modules, load_draft_model(folder, of_modules, algorithm="NEXTN"))}


@pytest.fixture(scope="module", params=STEPS)
def recorded(request, pairs):
    target, draft = pairs[request.param]
    options = resolved(3, 256, lag=1)
    return request.param, record_drafts(target, draft, options, requests(), shape=WIDE)


def requests(max_tokens=24):
    return [Request(i, list(p), SamplingParams(max_tokens=max_tokens)) for i, p in enumerate(PROMPTS)]


def decoded(pair, shape) -> SpecStats:
    engine, mine, stats = Engine(*pair, resolved(3, 256, kv_tokens=1500)), requests(), SpecStats()
    engine.use_shape(shape)
    serve(engine, mine)
    for request in mine:
        stats.add(request.stats.spec)
    return stats


@pytest.mark.parametrize("size", sweep(["chain", 20, 64], fast=["chain", 20]))
def test_chains_and_trees_of_the_recorded_size_are_predicted_to_the_verify(pairs, recorded, size):
    name, recording = recorded
    steps = STEPS[name]
    assert (recording.steps, recording.topk) == (steps, 8)
    shape = SpecShape(steps, 1, steps + 1) if size == "chain" else SpecShape(steps, 8, size)
    stats, predicted = decoded(pairs[name], shape), recording.acceptance(shape)
    assert predicted.length == stats.accept_length > 1.02
    assert [share for share in predicted.reach if share] == stats.acceptance_per_position


SMALLER = "1,1,2", "2,1,3", "2,8,16", "3,2,6", "2,3,9", "3,4,12"


@pytest.mark.parametrize("text", sweep(SMALLER, fast=["2,1,3", "3,2,6"]))
def test_smaller_shapes_are_predicted(pairs, recorded, text):
    """To the verify where a candidate depends on none that is left out. The rows of a block see each other,
    so a shorter block has other candidates; a DSpark head keeps those likely behind all that it keeps."""
    name, recording = recorded
    is_exact = name in ("p-eagle", "dflash, causal", "modules")
    shape = SpecShape.parse(text)
    predicted, measured = recording.acceptance(shape).length, decoded(pairs[name], shape).accept_length
    assert measured > 1.01
    assert predicted == measured if is_exact else predicted == pytest.approx(measured, rel=0.12)


def test_they_choose_among_all_shapes_that_they_can_fill(pairs, recorded):
    name, recording = recorded
    target, draft = pairs[name]
    engine = Engine(target, draft, resolved(3, 256, kv_tokens=1500))
    assert can_tune(engine)
    shapes = runnable(engine, all_shapes())
    assert {shape.steps for shape in shapes} == set(range(1, STEPS[name] + 1 + (name == "p-eagle")))
    table = recording.table([shape for shape in shapes if shape.steps <= recording.steps])
    for shape in table.shapes:
        assert table.shares[shape].sum() == pytest.approx(1)
        assert (table.reach[shape][:, 1:] <= table.reach[shape][:, :-1] + 1e-9).all()


def test_static_and_sampled_drafts_are_not_recorded(pairs):
    target, draft = pairs["p-eagle"]
    sampled = EngineConfig(max_batch_size=1, max_context=64, sampled_drafts=True).resolve(on_gpu=False)
    with pytest.raises(UserError, match="not recorded"):
        record_drafts(target, draft, sampled, requests())
