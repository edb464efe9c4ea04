"""Heads whose layer has a sliding window: training, the engine and a simulation agree, and configs keep it."""

import pytest
import torch
from tiny import tiny_head, tiny_target

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.kinds.registry import kind_of
from eagle_kit.serve.llm import LLM
from eagle_kit.speculation.propose.draft_model import HeadDraftModel
from eagle_kit.train.run.simulate import match_table

WINDOW = 12
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def models():
    target = tiny_target()
    return target, tiny_head(target, sliding_window=WINDOW), tiny_head(target)


def accepted(target, head, shape):
    """Accepted tokens of every cycle of a reply, and the reply."""
    llm = LLM(target, HeadDraftModel(head, target), shape=shape, max_batch_size=2, max_context=128, page_size=4)
    prompts = [torch.arange(3, 3 + n).tolist() for n in (30, 7)]
    return llm.generate(prompts, PARAMS)


@pytest.mark.parametrize("shape", ["3,1,4", "3,3,9"])
def test_text_stays_and_drafts_are_those_of_the_window(models, shape):
    target, windowed, whole = models
    plain = LLM(target, shape="none", max_batch_size=2, max_context=128, page_size=4)
    prompts = [torch.arange(3, 3 + n).tolist() for n in (30, 7)]
    wanted = [reply.token_ids for reply in plain.generate(prompts, PARAMS)]
    mine, theirs = accepted(target, windowed, shape), accepted(target, whole, shape)
    assert [r.token_ids for r in mine] == [r.token_ids for r in theirs] == wanted
    assert sum(r.stats.num_verifies for r in mine) != sum(r.stats.num_verifies for r in theirs)


def test_a_chain_accepts_what_the_simulation_says(models):
    target, head, _ = models
    prompt = torch.arange(3, 33)
    llm = LLM(target, HeadDraftModel(head, target), shape="3,1,4", max_batch_size=1, max_context=128)
    reply = llm.generate([prompt.tolist()], PARAMS)[0]
    table = match_table(target, head, torch.tensor([*prompt.tolist(), *reply.token_ids]), 30, 3)
    row, cycles = 0, 0
    while row < len(table) - 4:
        row += int(table[row].long().cumprod(0).sum()) + 1
        cycles += 1
    assert abs(cycles - reply.stats.num_verifies) <= 3  # the last tokens are cut


def test_configs_keep_the_window(models):
    _, head, whole = models
    kind = kind_of(head.config)
    written = kind.write_config(head.config)
    assert written["sliding_window"] == WINDOW and written["layer_types"] == ["sliding_attention"]
    assert "sliding_window" not in kind.write_config(whole.config)
