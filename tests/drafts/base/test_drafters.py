"""What every kind of drafter says of itself and of its states: confidences, default and largest shapes,
candidates that a smaller batch left out."""

import pytest
import torch
from tiny import tiny_dflash, tiny_dspark, tiny_head, tiny_p_eagle, tiny_target
from tiny_engine import make_engine, resolved

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.autoregressive import DraftState
from eagle_kit.drafts.base.draft_model import HeadDraftModel, StandaloneDraftModel
from eagle_kit.drafts.base.drafter import CandidateSpec
from eagle_kit.drafts.base.one_pass import DepthCandidates
from eagle_kit.drafts.base.sampled import SampledDraftState, draft_distribution
from eagle_kit.drafts.choose_drafter import drafter_class
from eagle_kit.drafts.dspark.roll_out import DraftLogits
from eagle_kit.drafts.mtp.head import MTPConfig, MTPHead
from eagle_kit.ops.sampling import make_sampling_batch

HEADS = {
    "eagle3": lambda target: tiny_head(target, draft_vocab_size=9),
    "p-eagle": lambda target: tiny_p_eagle(target, draft_vocab_size=9),
    "dflash": tiny_dflash,
    "dspark": tiny_dspark,
    "dspark, own output": lambda target: tiny_dspark(target, draft_vocab_size=9),
    "modules": lambda target: MTPHead(MTPConfig(target.config, 3)),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=11)


@pytest.fixture(scope="module")
def models(target):
    """A draft model of each name."""
    heads = {name: make(target).eval().requires_grad_(False) for name, make in HEADS.items()}
    drafts = {name: HeadDraftModel(head, target) for name, head in heads.items()}
    return drafts | {"whole model": StandaloneDraftModel(tiny_target(vocab_size=11, num_layers=2, seed=5))}


def drafter_of(models, name, **options):
    return make_engine((models[name].target, models[name].head), batch=3, **options).runner.drafter


def rows_of(drafter, depths: int, b: int = 3) -> torch.Tensor:
    size = (b * depths, drafter.model.feature_size)
    return torch.randn(size, generator=torch.Generator().manual_seed(3))


def test_a_grown_draft_is_as_sure_as_its_first_token_is_likely(models):
    drafter, sampled = (drafter_of(models, "eagle3", sampled_drafts=each) for each in (False, True))
    probs = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).softmax(-1)
    best = probs.topk(3)
    features = torch.zeros(4, 48)
    state = DraftState(best.indices, best.values.log(), features)
    torch.testing.assert_close(drafter.confidence(state), best.values[:, 0])
    chain = DraftState(best.indices[:, :1], best.values[:, :1].log(), features)
    assert drafter.confidence(chain) is None, "a chain ranks nothing"
    found = sampled.confidence(SampledDraftState(probs.log() + 2.0, features))
    torch.testing.assert_close(found, best.values[:, 0])


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("name", ["p-eagle", "dflash"])
@torch.no_grad()
def test_a_ready_draft_is_as_sure_as_its_first_token_is_likely(models, name, is_sampled):
    drafter = drafter_of(models, name, sampled_drafts=is_sampled)
    rows = rows_of(drafter, 4)
    roots = torch.tensor([1, 2, 3])
    found = drafter.confidence(drafter.make_state(rows, CandidateSpec(4, 2, True), roots))
    first = drafter.model.logits(rows.view(3, 4, -1)[:, 0])
    torch.testing.assert_close(found, first.softmax(-1).amax(-1))
    empty = drafter.confidence(drafter.empty_state(3, CandidateSpec(4, 2, True)))
    assert empty.shape == found.shape


@pytest.mark.parametrize("is_sampled", [False, True])
@torch.no_grad()
def test_a_head_that_tells_its_confidence_gives_that_of_every_depth(models, is_sampled):
    """The product over the greedy chain of what it says of each of its tokens behind the one before."""
    drafter = drafter_of(models, "dspark", sampled_drafts=is_sampled)
    rows = rows_of(drafter, 4)
    roots = torch.tensor([1, 2, 3])
    found = drafter.confidence(drafter.make_state(rows, CandidateSpec(4, 2, True), roots))
    logits = DraftLogits(drafter.model, rows.view(3, 4, -1))
    before = roots
    product = torch.ones(3)
    expected = []
    for depth in range(4):
        told = drafter.model.head.confidence_logits(rows.view(3, 4, -1)[:, depth], before)
        product = product * told.sigmoid()
        expected.append(product)
        before = logits.after(depth, before[:, None])[:, 0].argmax(-1)
    torch.testing.assert_close(found, torch.stack(expected, 1))
    assert drafter.empty_state(3, CandidateSpec(4, 2, True))[-1].shape == (3, 4)
    assert drafter.empty_state(3, CandidateSpec(4, 2))[-1].numel() in (0, 3), "nobody asks"


def test_candidates_that_were_left_out_are_the_last_of_any_tree(models):
    drafter = drafter_of(models, "p-eagle")
    tokens = torch.arange(1, 5).view(2, 2, 1)
    made = DepthCandidates(tokens, torch.full((2, 2, 1, 1), -3.0), torch.zeros(2, 0))
    wide = drafter.pad_candidates(made, drafter.empty_state(2, CandidateSpec(4, 3)))
    assert [part.shape for part in wide] == [(2, 4, 3), (2, 4, 1, 3), (2, 0)]
    assert torch.equal(wide.tokens[:, :2, :1], tokens) and (wide.scores[:, :2, :, 0] == -3.0).all()
    left_out = torch.ones(4, 3, dtype=torch.bool)
    left_out[:2, 0] = False
    assert (wide.scores[:, :, 0][:, left_out] == -torch.inf).all()


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("eagle3", {}, "5,4,8"),
        ("eagle3", {"tree": "static"}, "5,4,26"),
        ("whole model", {}, "3,1,4"),
        ("p-eagle", {}, "5,1,6"),
        ("dflash", {}, "5,1,6"),
        ("dspark", {"sampled_drafts": True}, "6,1,7"),
        ("modules", {}, "3,1,4"),
    ],
)
def test_the_shape_that_nobody_asked_for(models, name, options, shape):
    kind = drafter_class(models[name], resolved(1, 64, **options))
    found = kind.default_shape(models[name], "llama")
    kind.check_shape(models[name], found)
    assert str(found) == shape


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_long_block_drafts_what_a_window_has_room_for(target, name):
    make = {"dflash": tiny_dflash, "dspark": tiny_dspark}[name]
    model = HeadDraftModel(make(target, block_size=60), target)
    kind = drafter_class(model, resolved(1, 64))
    kind.check_shape(model, SpecShape(31, 1, 32))
    with pytest.raises(UserError, match="at most 31"):
        kind.check_shape(model, SpecShape(32, 1, 33))


def test_as_many_candidates_as_the_draft_has_tokens(models):
    kind = drafter_class(models["eagle3"], resolved(1, 64))
    kind.check_shape(models["eagle3"], SpecShape(2, 9, 20))
    with pytest.raises(UserError, match="more candidates than the draft's 9 tokens"):
        kind.check_shape(models["eagle3"], SpecShape(2, 10, 20))


@pytest.mark.parametrize("options", [{"tree": "static"}, {"sampled_drafts": True}], ids=str)
def test_several_modules_draft_neither_static_trees_nor_samples(models, options):
    with pytest.raises(UserError, match="has 3 modules"):
        drafter_class(models["modules"], resolved(1, 64, **options))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_p": 0.01}, 1),
        ({"min_p": 1.0}, 1),
        ({}, 9),
        ({"presence_penalty": 1.0, "logit_bias": {3: 9.0}}, 9),
    ],
    ids=str,
)
def test_sampled_drafts_have_the_filters_of_their_request(models, params, kept):
    """Over the target's tokens; penalties and bias are left to the target."""
    drafter = drafter_of(models, "eagle3", sampled_drafts=True)
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(2))
    asked = SamplingParams(temperature=0.5, **params)
    batch = make_sampling_batch([asked], [[1]], [0], 11, torch.device("cpu"))
    found = draft_distribution(drafter, logits, batch)
    best = logits[0].argsort(descending=True)[:kept]
    expected = torch.zeros(11)
    expected[drafter.model.to_target(best)] = (logits[0, best] / 0.5).softmax(-1)
    torch.testing.assert_close(found[0], expected)


@torch.no_grad()
def test_a_token_map_cuts_the_correction_of_a_block_too(target):
    hot = torch.tensor([4, 2, 9, 0, 7])
    head = tiny_dspark(target).eval()
    whole = HeadDraftModel(head, target)
    cut = HeadDraftModel(head, target, hot)
    rows = torch.randn(2, 3, 48)
    before = torch.tensor([[1, 5], [8, 0]])
    all_logits, logits = (DraftLogits(model, rows).after(1, before) for model in (whole, cut))
    torch.testing.assert_close(logits, all_logits[..., hot])
    own = tiny_head(target, draft_vocab_size=9)
    with pytest.raises(UserError, match="the head brings its own"):
        HeadDraftModel(own, target, hot)
