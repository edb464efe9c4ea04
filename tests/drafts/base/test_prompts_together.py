"""Prompts that one forward computes are drafted for as each would be alone."""

import pytest
from tiny import randomise, tiny_head, tiny_p_eagle, tiny_target
from tiny_engine import resolved

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.draft_model import HeadDraftModel, StandaloneDraftModel
from eagle_kit.drafts.eagle1.head import Eagle1Config, Eagle1Head
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.request import Request

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [7], [8]]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def eagle1(target) -> HeadDraftModel:
    config = target.config
    names = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
    sizes = {name: getattr(config, name) for name in names}
    rope = {"rope_theta": config.rope_theta, "rope_scaling": config.rope_scaling}
    head = Eagle1Head(Eagle1Config(rms_norm_eps=config.rms_norm_eps, **rope, **sizes))
    return HeadDraftModel(randomise(head, 3, 0.2).eval().requires_grad_(False), target)


DRAFTS = {
    "eagle-3": lambda target: HeadDraftModel(tiny_head(target), target),
    "eagle-1": eagle1,
    "p-eagle": lambda target: HeadDraftModel(tiny_p_eagle(target), target),
    "small model": lambda target: StandaloneDraftModel(tiny_target(num_layers=2, seed=5)),
}


def first_drafts(target, draft, prompts) -> list[list[int]]:
    """Draft tokens of the first cycle of each prompt, all of which are computed in one forward."""
    engine = Engine(target, draft, resolved(len(prompts), 64, kv_tokens=1000, page_size=4))
    engine.use_shape(SpecShape(4, 1, 5))
    drafts = []
    propose = engine.runner.drafter.propose

    def recorded(*args):
        drafts.append(propose(*args))
        return drafts[-1]

    engine.runner.drafter.propose = recorded
    requests = [Request(i, list(prompt), SamplingParams(max_tokens=12)) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add_request(request)
    engine.step()
    assert all(len(request.token_ids) == 1 for request in requests), "the prompts are computed together"
    engine.step()
    return drafts[0].tree.tokens[:, 1:].tolist()


@pytest.mark.parametrize("name", DRAFTS)
def test_prompts_of_one_token_behind_others_are_drafted_for_as_alone(target, name):
    """A draft whose entries begin at the first token has a row more of each prompt than the target."""
    draft = DRAFTS[name](target)
    together = first_drafts(target, draft, PROMPTS)
    assert together == [first_drafts(target, draft, [prompt])[0] for prompt in PROMPTS]
    assert len(set(map(tuple, together))) == len(PROMPTS), "drafts that are alike show nothing"
