"""Logits of a draft's candidates in the memory plan, against the tensors that draft-extend makes."""

import copy

import pytest
import torch
from live_bytes import LiveBytes
from tiny import tiny_dflash, tiny_dspark, tiny_p_eagle, tiny_target
from tiny_engine import make_engine, resolved

from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.drafter import CandidateSpec
from eagle_kit.engine.memory.engine_memory import LOGITS_COPIES, plan_memory

HEADS = {"p-eagle": (tiny_p_eagle, 1200), "dflash": (tiny_dflash, 1271), "dspark": (tiny_dspark, 1271)}


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=1271)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (CandidateSpec(5, 8, True), torch.float32),
        (CandidateSpec(5, 8), torch.float32),
        (CandidateSpec(4, 1), torch.float32),
        (CandidateSpec(4, 1), torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", HEADS)
def test_draft_logits_are_planned_as_they_are_made(target, name, spec, dtype):
    make, size = HEADS[name]
    head = make(target, draft_vocab_size=size) if name == "p-eagle" else make(target)
    models = copy.deepcopy((target, head.eval()))
    drafter = make_engine([model.to(dtype) for model in models], batch=3).runner.drafter
    rows = torch.randn(3 * spec.steps, drafter.model.feature_size, dtype=dtype)
    with torch.no_grad(), LiveBytes() as live:
        drafter.make_state(rows, spec, torch.tensor([1, 2, 3]))
    planned = drafter.logits_bytes(drafter.model, 3, spec)
    spare = 1.35 if dtype == torch.float32 else 1.6  # of a correction in half precision less is held at once
    assert planned / spare < live.peak < 1.1 * planned


def test_the_plan_has_the_larger_of_the_targets_and_the_drafts(target):
    draft = make_engine((target, tiny_dspark(target).eval())).runner.drafter.model
    for batch, is_drafts in ((1, False), (64, True)):
        config = resolved(batch, 64, shape=SpecShape(5, 1, 6), lag=0, kv_tokens=9000)
        plan = plan_memory(target, draft, config, chooses_shapes=True)
        of_target = LOGITS_COPIES * config.most_rows * 1271 * 4
        assert plan.logits == (batch * 1271 * 4 * (6 + 3 * 8) if is_drafts else of_target)
