"""Heads whose layer has a sliding window: the engine drafts what a simulation does, and configs keep it."""

import copy
from dataclasses import replace

import pytest
import torch
from tiny import tiny_head, tiny_target
from tiny_trained import trained_models

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.drafts.registry import kind_of
from eagle_kit.engine.llm import LLM
from eagle_kit.models.draft_chain import ChainRows
from eagle_kit.train.run.simulate import match_table

WINDOW = 4
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=3)
PROMPTS = [[token % 11 for token in range(n)] for n in (30, 7)]


@pytest.fixture(scope="module")
def models():
    target, head = trained_models()
    windowed = copy.deepcopy(head)
    windowed.config = replace(head.config, sliding_window=WINDOW)
    return target, windowed, head


def generate(target, head, shape, prompts=PROMPTS):
    draft = None if head is None else HeadDraftModel(head, target)
    llm = LLM(target, draft, shape=shape, max_batch_size=2, max_context=128, page_size=4)
    return llm.generate(prompts, PARAMS)


@pytest.mark.parametrize("shape", ["3,1,4", "3,3,9"])
def test_text_stays(models, shape):
    target, windowed, _ = models
    wanted = [response.token_ids for response in generate(target, None, "none")]
    assert [response.token_ids for response in generate(target, windowed, shape)] == wanted


def test_a_chain_accepts_what_the_simulation_says(models):
    target, windowed, whole = models
    response = generate(target, windowed, "3,1,4", PROMPTS[:1])[0]
    tables = [
        match_table(target, head, torch.tensor([*PROMPTS[0], *response.token_ids]), len(PROMPTS[0]), 3)
        for head in (windowed, whole)
    ]
    assert not tables[0].equal(tables[1]), "the window changes what is drafted"
    row, cycles, table = 0, 0, tables[0]
    while row < len(table) - 4:
        row += int(table[row].long().cumprod(0).sum()) + 1
        cycles += 1
    assert response.stats.accept_length > 1.3
    assert abs(cycles - response.stats.num_verifies) <= 4  # the last tokens of the response have no row


def chain_by_hand(head, features, embeds, root, steps):
    """Inputs of the output layer of a chain behind ``root``, a step after the other: a query sees keys from
    as many positions as the window has, its own included."""
    window = head.config.sliding_window or 10**6
    seen = []

    def attend(layer, q, k, v):
        seen.append((now, k, v))
        at, keys, values = (torch.cat(part) for part in zip(*seen, strict=True))
        keys, values = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * head.config.attention_scale
        hidden = (at > now[:, None]) | (at <= now[:, None] - window)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)

    # The text up to the root in one go, then a token at a time.
    now = torch.arange(root + 1)
    outs = [head(features[: root + 1], embeds[1 : root + 2], now, attend)[-1:]]
    for step in range(1, steps):
        now = torch.tensor([root + step])
        outs.append(head(outs[-1], embeds[root + 1 + step][None], now, attend))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [None, WINDOW, 9])
@torch.no_grad()
def test_chains_of_a_known_text_see_the_keys_in_the_window(window):
    head = tiny_head(tiny_target(), sliding_window=window)
    generator = torch.Generator().manual_seed(0)
    features, embeds = (torch.randn(count, 48, generator=generator) for count in (20, 24))
    rows = torch.tensor([0, 2, 9, 19])
    given = ChainRows(
        features,
        lambda rows, step: rows + 1 + step,
        lambda rows, step: embeds[rows + 1 + step],
        lambda token: embeds[:1],
        rows,
        torch.zeros(20, dtype=torch.int64),
    )
    chains = torch.stack(head.chain(given, 4), 1)
    for root, chain in zip(rows.tolist(), chains, strict=True):
        by_hand = chain_by_hand(head, features, embeds, root, 4)
        torch.testing.assert_close(chain, by_hand, rtol=1e-4, atol=1e-4)


def test_configs_keep_the_window(models):
    _, windowed, whole = models
    kind = kind_of(windowed.config)
    written = kind.write_config(windowed.config)
    assert written["sliding_window"] == WINDOW and written["layer_types"] == ["sliding_attention"]
    assert "sliding_window" not in kind.write_config(whole.config)
