"""Heads with parts that few have: an embedding of their own, another width, final states, norms, windows. The
engine's texts stay plain decoding's, and a chain accepts what the simulation says."""

from functools import partial

import pytest
import torch
from tiny import randomise, tiny_head, tiny_p_eagle, tiny_target
from tiny_engine import PROMPTS, decode, resolved

from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.drafts.eagle1.head import Eagle1Config, Eagle1Head
from eagle_kit.engine.memory.engine_memory import plan_memory
from eagle_kit.models.loading.loader import load_target
from eagle_kit.train.run.simulate import match_table, walk
from tests.engine.tensor_parallel.test_drafts_of_ranks import check
from tests.engine.tensor_parallel.test_tensor_parallel import folder

__all__ = ["folder"]  # the fixture

NARROW = {
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 56,
    "own_embedding": True,
}
WINDOW = {"sliding_window": 8, "sliding_layers": (0, 2)}


def eagle1(target, **changes) -> Eagle1Head:
    vocab = target.config.vocab_size
    config = Eagle1Config(48, 6, 2, 8, 96, vocab, 1e-5, 1e4, None, max_position_embeddings=512, **changes)
    return randomise(Eagle1Head(config), 3, 0.2)


def of_vocabulary(make, **changes):
    """A head that proposes all but two tokens."""
    return lambda target: make(target, draft_vocab_size=target.config.vocab_size - 2, **changes)


HEADS = {
    "narrower": of_vocabulary(tiny_head, **NARROW),
    "final states": of_vocabulary(tiny_head, aux_layer_ids=()),
    "all norms, half rotated": of_vocabulary(tiny_head, norm_before_fc=True, qk_norm=True, rotary_dim=4),
    "p-eagle, narrower, in windows": of_vocabulary(tiny_p_eagle, qk_norm=True, **NARROW, **WINDOW),
    "eagle1, own embedding": partial(eagle1, own_embedding=True, rotary_dim=4),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=11)


def made(target, name: str):
    return HEADS[name](target).eval().requires_grad_(False)


def tokens(requests) -> list[list[int]]:
    return [request.token_ids for request in requests]


@pytest.mark.parametrize("name", HEADS)
def test_texts_are_those_of_plain_decoding(target, name):
    plain = tokens(decode((target, None), "none"))
    models = target, made(target, name)
    for shape in ("4,1,5", "4,3,12"):
        assert tokens(decode(models, shape)) == plain


@pytest.mark.parametrize("name", HEADS)
def test_a_chain_accepts_what_the_simulation_says(target, name):
    head = made(target, name)
    (request,) = decode((target, head), "3,1,4", prompts=PROMPTS[:1], ignore_eos=True)
    ids = torch.tensor([*PROMPTS[0], *request.token_ids])
    said = walk(match_table(target, head, ids, len(PROMPTS[0]), 3))
    assert abs(said.num_verifies - request.stats.spec.num_verifies) <= 2  # the last tokens have no row


def test_an_embedding_of_its_own_is_in_the_plan(target):
    heads = [tiny_head(target, draft_vocab_size=9, own_embedding=own) for own in (False, True)]
    plans = [plan_memory(target, HeadDraftModel(head, target), resolved(1, 256)) for head in heads]
    assert plans[1].weights - plans[0].weights == 11 * 48 * 4


@pytest.mark.parametrize("name", ["narrower", "final states"])
def test_ranks_draft_the_same(folder, name):
    check(folder, ("4,1,5",), made(load_target(folder), name))
