"""A draft reads later what was decoded without it: plain cycles in between change neither text nor
acceptance."""

import pytest
import torch
from sweep import sweep
from tiny import tiny_dflash, tiny_dspark, tiny_head, tiny_p_eagle, tiny_target
from tiny_engine import decode, resolved
from tiny_mixtures import randomised, v2
from uncaptured import UncapturedGraphs

from eagle_kit.autotune.policy import ShapePolicy
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.drafts.base.draft_model import StandaloneDraftModel
from eagle_kit.drafts.base.drafter import Drafter
from eagle_kit.drafts.base.one_pass import OnePassDrafter
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.load_draft import load_draft_model
from eagle_kit.engine.request import Request
from eagle_kit.engine.runner import Runner
from eagle_kit.models.loading.loader import load_target

AT_ONCE = {
    **{"eagle3": 64, "whole model": 64, "whole model, latents": 64},
    **{"p-eagle": 32, "dflash": 32, "dflash, causal": 32, "dspark": 32},
}
"""By kind of head, tokens that a window has room for, beside a block of masks where there is one. Others are
stored before."""
PROMPTS = [[(3 * i + j) % 11 for j in range(5)] for i in range(3)]
NUM_PLAIN = 70
"""Plain cycles in a row: more than the 64 tokens that wait for a draft."""
LENGTHS = (150, 90, 100)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A target of 11 tokens and a draft of each name."""
    target = tiny_target(vocab_size=11)
    heads = {
        "eagle3": tiny_head(target, 9),
        "p-eagle": tiny_p_eagle(target, draft_vocab_size=9),
        "dflash": tiny_dflash(target),
        "dflash, causal": tiny_dflash(target, sliding_window=400, sliding_layers=(0, 1, 2)),
        "dspark": tiny_dspark(target),
    }
    folder = tmp_path_factory.mktemp("latents")
    randomised(v2(vocab_size=11)).save_pretrained(folder)
    whole = {"whole model": tiny_target(vocab_size=11, num_layers=2, seed=5)}
    whole["whole model, latents"] = load_target(folder)
    drafts = {name: load_draft_model(head.eval(), target) for name, head in heads.items()}
    drafts |= {name: StandaloneDraftModel(model) for name, model in whole.items()}
    return {name: (target, draft) for name, draft in drafts.items()}


@pytest.fixture(scope="module")
def plain(pairs):
    """Tokens of plain decoding."""
    target = pairs["eagle3"][0]
    return [
        decode((target, None), prompts=[prompt], max_tokens=n)[0].token_ids
        for prompt, n in zip(PROMPTS, LENGTHS, strict=True)
    ]


def watch(monkeypatch, noted):
    """List what is ``noted`` of every forward in which a draft reads what it has pending."""
    found = []

    def watched(name, read):
        def noting(runner, slots, length, columns):
            found.append(noted(runner, name, slots, length))
            read(runner, slots, length, columns)

        monkeypatch.setattr(Runner, name, noting)

    watched("_backfill_batch", Runner._backfill_batch)
    watched("_store_batch", Runner._store_batch)
    return found


@pytest.mark.parametrize(
    ("name", "shape", "lag", "sampled"),
    sweep(
        [
            (name, shape, lag, sampled)
            for name in AT_ONCE
            for shape, sampled in (("4,1,5", False), ("3,2,6", False), ("4,1,5", True))
            for lag in (0, 1)
        ],
        fast=[
            ("eagle3", "4,1,5", 1, False),
            ("whole model", "4,1,5", 0, False),
            ("p-eagle", "3,2,6", 0, False),
            ("dspark", "4,1,5", 1, True),
        ],
    ),
)
def test_plain_cycles_in_between_change_neither_text_nor_acceptance(
    pairs, plain, monkeypatch, name, shape, lag, sampled
):
    """More of them than the draft reads at once; greedy, or with sampled drafts of seeded requests."""
    params = {"temperature": 1.0, "seed": 5} if sampled else {}
    options = {"sampled_drafts": True} if sampled else {}

    def run():
        policy = ShapePolicy({1: [SpecShape.parse(shape), NO_SPECULATION]})
        engine = Engine(*pairs[name], resolved(3, 256, kv_tokens=1500, lag=lag, **options))
        engine.use_shape(policy)
        requests = [
            Request(i, prompt, SamplingParams(max_tokens=n, **params))
            for i, (prompt, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
        ]
        for request in requests:
            engine.add_request(request)
        turns = ["none"] * NUM_PLAIN + [shape] + ["none", shape, shape] * 100
        for policy.shape in map(SpecShape.parse, turns):
            if engine.has_work:
                engine.step()
        assert not engine.has_work
        return [(request.token_ids, request.stats.spec) for request in requests]

    reads = watch(monkeypatch, lambda runner, name, slots, length: (name, length))
    later = run()
    assert max(length for name, length in reads if name == "_backfill_batch") <= AT_ONCE[name]
    assert max(length for name, length in reads if name == "_store_batch") == 63
    for drafter in (Drafter, OnePassDrafter):
        monkeypatch.setattr(drafter, "supports_deferred_draft", False)
    assert later == run()
    assert max(stats.accept_length for _, stats in later) > 1.01
    if not sampled:
        assert [tokens for tokens, _ in later] == plain


@pytest.mark.parametrize("name", sweep(AT_ONCE, fast=["eagle3", "dflash"]))
def test_padding_that_has_missed_nothing_is_read_too(pairs, plain, monkeypatch, name):
    """In the sizes of graphs: three requests as four, and what is prepared before there is any."""

    def run(ways):
        engine = Engine(*pairs[name], resolved(4, 256, kv_tokens=2000, lag=1, batch_sizes=(1, 4)))
        engine.runner.graphs = UncapturedGraphs()
        policy = ShapePolicy({1: [SpecShape.parse("4,1,5"), NO_SPECULATION]})
        engine.use_shape(policy)
        assert engine.runner.warm_up_backfill() == ways
        requests = [
            Request(i, prompt, SamplingParams(max_tokens=n))
            for i, (prompt, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
        ]
        for request in requests:
            engine.add_request(request)
        for policy.shape in map(SpecShape.parse, ["none"] * NUM_PLAIN + ["4,1,5", "none"] * 100):
            if engine.has_work:
                engine.step()
        return [(request.token_ids, request.stats.spec) for request in requests]

    later = run(ways=2 * (AT_ONCE[name].bit_length() + 7))
    for drafter in (Drafter, OnePassDrafter):
        monkeypatch.setattr(drafter, "supports_deferred_draft", False)
    assert later == run(ways=0)
    assert [tokens for tokens, _ in later] == plain
    assert max(stats.accept_length for _, stats in later) > 1.01


@pytest.mark.parametrize("name", AT_ONCE)
def test_plain_cycles_compute_nothing_of_the_draft(pairs, monkeypatch, name):
    """A window of them is stored at once, and nothing is drafted behind it."""
    engine = Engine(*pairs[name], resolved(1, 256, kv_tokens=400))
    policy = ShapePolicy({1: [SpecShape.parse("4,1,5"), NO_SPECULATION]})
    engine.use_shape(policy)
    request, model, seen = Request(0, PROMPTS[0], SamplingParams(max_tokens=100)), engine.draft, []
    engine.add_request(request)
    engine.step()  # its prompt

    def noted(of, name):
        function = getattr(of, name)

        def noting(*args, **kwargs):
            seen.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(of, name, noting)

    for name in ("features", "lm_head_operands", "logits"):
        noted(model, name)
    for _ in range(64):
        engine.step()
        assert not seen and request.on_device.num_pending_draft_tokens
    engine.step()
    assert seen == ["features"] and request.on_device.num_pending_draft_tokens == 2
    policy.shape = SpecShape.parse("4,1,5")
    engine.step()
    assert seen.count("features") >= 2 and {"lm_head_operands", "logits"} & {*seen}
    assert not request.on_device.num_pending_draft_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_model_waits_in_a_dtype_of_its_own(dtype):
    """It reads no states of the target, which is in fp32."""
    target = tiny_target(vocab_size=11)
    draft = StandaloneDraftModel(tiny_target(vocab_size=11, num_layers=2, seed=5).to(dtype))
    engine = Engine(target, draft, resolved(1, 256, kv_tokens=400))
    policy = ShapePolicy({1: [SpecShape.parse("4,1,5"), NO_SPECULATION]})
    engine.use_shape(policy)
    engine.add_request(request := Request(0, PROMPTS[0], SamplingParams(max_tokens=80)))
    for policy.shape in map(SpecShape.parse, (*["none"] * 70, *["4,1,5"] * 10)):
        if engine.has_work:
            engine.step()
    assert request.stats.spec.num_verifies and request.finish_reason


@pytest.mark.parametrize("name", sweep(AT_ONCE, fast=["eagle3", "dflash"]))
def test_rows_of_a_reading_are_planned_for(pairs, monkeypatch, name):
    """Those of masks and blocks too: a batch that is far behind is read in parts."""
    engine = Engine(*pairs[name], resolved(3, 256, kv_tokens=1500, prefill_tokens=64))
    policy = ShapePolicy({1: [SpecShape.parse("4,1,5"), NO_SPECULATION]})
    engine.use_shape(policy)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(Request(i, prompt, SamplingParams(max_tokens=60)))

    def rows_of(runner, name, slots, length):
        return len(slots) * (length + (runner._num_appended if name == "_backfill_batch" else 0))

    rows = watch(monkeypatch, rows_of)
    for policy.shape in map(SpecShape.parse, (*["none"] * 30, *["4,1,5"] * 60)):
        if engine.has_work:
            engine.step()
    assert len(rows) > 1 and max(rows) <= 64
