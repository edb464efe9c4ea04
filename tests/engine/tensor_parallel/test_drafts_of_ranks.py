"""Drafts beside a target that ranks share: whole on every rank, and responses are those of one process."""

from functools import partial

import pytest
from tiny import randomise, tiny_dflash, tiny_dspark, tiny_p_eagle
from tiny_mtp import save_target

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.eagle1.head import Eagle1Config, Eagle1Head
from eagle_kit.models.loading.loader import load_target
from tests.engine.tensor_parallel.test_tensor_parallel import (
    MIXED,
    PROMPTS,
    compare,
    folder,
    responses,
    save_tokenizer,
)

__all__ = ["folder"]  # the fixture


def check(folder, shapes, head=None, **options):
    totals = compare(folder, 2, partial(responses, params=MIXED, shapes=shapes), head, **options)
    assert totals.spec.num_emitted_tokens > totals.spec.num_verifies


def eagle1_head():
    config = Eagle1Config(48, 6, 2, 8, 100, 12, 1e-5, 1e4, None, max_position_embeddings=512)
    return randomise(Eagle1Head(config), 3, 0.2)


@pytest.mark.parametrize(
    "algorithm",
    ["EAGLE", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("STANDALONE", "NGRAM"))],
)
def test_other_drafts_are_whole_on_every_rank(folder, algorithm):
    """A head without an output layer of its own, a whole model, and the text itself."""
    drafts = {"EAGLE": eagle1_head(), "STANDALONE": folder, "NGRAM": None}
    check(folder, ("3,1,4",), drafts[algorithm], algorithm=algorithm)


READY = {
    "DFLASH": lambda target: tiny_dflash(target, aux_layer_ids=(0, 1, 2, 3)),
    "DSPARK": lambda target: tiny_dspark(target, aux_layer_ids=(0, 1, 2, 3)),
    "P-EAGLE": lambda target: tiny_p_eagle(target, draft_vocab_size=9),
}


@pytest.mark.nightly
@pytest.mark.parametrize("sampled_drafts", [False, True])
@pytest.mark.parametrize("name", READY)
def test_drafts_that_are_ready_in_one_pass_are_those_of_all_ranks(folder, name, sampled_drafts):
    head, shapes = READY[name](load_target(folder)), ("4,1,5",) if sampled_drafts else ("4,1,5", "4,3,8")
    check(folder, shapes, head, sampled_drafts=sampled_drafts)


def test_the_module_of_a_deepseek_drafts_on_every_rank(tmp_path):
    save_target(tmp_path, vocab_size=12, num_hidden_layers=2)
    save_tokenizer(tmp_path)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    work = partial(responses, params=params, shapes=("2,1,3",), prompts=PROMPTS[:2])
    totals = compare(tmp_path, 2, work, algorithm="NEXTN")
    assert totals.spec.num_emitted_tokens > totals.spec.num_verifies


@pytest.mark.nightly
@pytest.mark.parametrize("data_parallel_attention", [False, True])
@pytest.mark.parametrize(("modules", "shapes"), [(1, ("3,1,4", "4,4,12")), (3, ("3,1,4", "3,4,14"))])
def test_modules_of_a_deepseek_draft_on_every_rank(modules, shapes, data_parallel_attention, tmp_path):
    """One proposes step by step, three in one pass, beside latents of all requests or of a rank's own."""
    save_target(tmp_path, modules=modules, vocab_size=12)
    save_tokenizer(tmp_path)
    check(tmp_path, shapes, algorithm="NEXTN", data_parallel_attention=data_parallel_attention)
