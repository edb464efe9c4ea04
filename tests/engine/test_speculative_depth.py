"""Requests that limit the depth of their drafts, among others that do not."""

import pytest
import torch
from tiny import tiny_head, tiny_target

from eagle_kit import LLM, SamplingParams
from eagle_kit.core.shape import NO_SPECULATION
from eagle_kit.ops.tree_build import Tree
from eagle_kit.verify.proposal import Deterministic, DraftOutput, SampledChain

PROMPTS = [[(7 * i + 3 * j) % 90 + 1 for j in range(9)] for i in range(4)]
LIMITS = (0, 1, 2, None)
KINDS = {
    "chain": {"shape": "4,1,5"},
    "tree": {"shape": "4,3,14"},
    "recorded": {"shape": "4,3,14", "graph_mode": "cycle"},
    "a cycle ahead": {"shape": "4,1,5", "lag": 1},
    "sampled chain": {"shape": "4,1,5", "sampled_drafts": True},
    "block": {"shape": "4,1,5", "sampled_drafts": True, "verifier": "block"},
    "n-grams": {"algorithm": "NGRAM", "shape": "4,1,5"},
}


def make(**options):
    target = tiny_target()
    draft = None if options.get("algorithm") == "NGRAM" else tiny_head(target)
    return LLM(target, draft, max_context=64, **{"max_batch_size": 4, "page_size": 4, **options})


def params_of(temperature):
    common = {"max_tokens": 16, "ignore_eos": True, "temperature": temperature}
    return [SamplingParams(**common, seed=i, speculative_depth=limit) for i, limit in enumerate(LIMITS)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_no_deeper_draft_is_accepted_and_the_text_is_that_of_plain_decoding(kind, temperature):
    llm = make(**KINDS[kind])
    outputs = llm.generate(PROMPTS, params_of(temperature))
    for limit, output in zip(LIMITS, outputs, strict=True):
        assert len(output.token_ids) == 16
        if limit == 0:
            assert output.stats.num_verifies == 0 and set(output.shapes) == {NO_SPECULATION}
        elif limit is not None:
            assert len(output.stats.num_accepted_at) <= limit
    promises_text = temperature == 0.0 or "sampled_drafts" not in KINDS[kind]
    if promises_text:
        plain = make(**KINDS[kind]).generate(PROMPTS, params_of(temperature), shape="none")
        assert [each.token_ids for each in outputs] == [each.token_ids for each in plain]


def test_a_draft_that_is_always_right_is_accepted_to_the_limit():
    llm = make(algorithm="NGRAM", shape="4,1,5")
    prompt = [5, 6, 7] * 10
    (text,) = llm.generate([prompt], max_tokens=24, ignore_eos=True)
    repeated = prompt + text.token_ids
    for limit in (1, 2, 3):
        (output,) = llm.generate([prompt], max_tokens=24, ignore_eos=True, speculative_depth=limit)
        assert output.token_ids == text.token_ids
        accepted = output.stats.num_accepted_at
        assert len(accepted) == limit and accepted[-1] > 0, (repeated, accepted)


def test_requests_without_speculation_alone_get_plain_cycles():
    target = tiny_target()
    llm = LLM(target, tiny_head(target), max_context=64, max_batch_size=4, shape="auto")
    params = SamplingParams(max_tokens=24, ignore_eos=True, speculative_depth=0)
    outputs = llm.generate(PROMPTS, params)
    assert all(set(output.shapes) == {NO_SPECULATION} for output in outputs)
    assert set(llm.engine().totals.shapes) == {NO_SPECULATION}


def test_nothing_changes_for_a_batch_that_asks_for_no_limit():
    llm = make(shape="4,1,5")
    windows = []
    run = llm.engine().runner._run_as_graph

    def note(name, *args):
        windows.append(name)
        return run(name, *args)

    llm.engine().runner._run_as_graph = note
    llm.generate(PROMPTS, max_tokens=6, ignore_eos=True)
    assert set(windows) == {"cycle"}
    llm.generate(PROMPTS, max_tokens=6, ignore_eos=True, speculative_depth=2)
    assert set(windows) == {"cycle", "propose", "verify"}


def test_nodes_that_are_too_deep_have_no_parent_and_no_distribution():
    zero = torch.zeros(2, 4, dtype=torch.int64)
    depths = torch.tensor([[0, 1, 2, 3]] * 2)
    parents = torch.tensor([[0, 0, 1, 2]] * 2)
    q = torch.full((2, 3, 5), 0.2)
    limits = torch.tensor([1, 64])
    window = DraftOutput(Tree(zero, parents, depths, zero), SampledChain(q)).limit_depth(limits)
    assert window.tree.parents.tolist() == [[0, 0, 2, 3], [0, 0, 1, 2]]
    assert window.proposal.q.sum(-1).gt(0).tolist() == [[True, False, False], [True, True, True]]
    assert isinstance(
        DraftOutput(Tree(zero, parents, depths, zero), Deterministic()).limit_depth(limits).proposal,
        Deterministic,
    )


def test_sampled_drafts_with_a_limit_have_the_targets_distribution():
    """The second token of many responses against the one that plain decoding has for the same prompt."""
    target = tiny_target()
    llm = LLM(
        target, tiny_head(target), max_context=64, max_batch_size=64, shape="3,1,4", sampled_drafts=True
    )
    count = 3000
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0, seed=0, top_k=4, n=count)
    limited = SamplingParams(**{**vars(params), "speculative_depth": 1})
    tokens = []
    for each, shape in ((params, "none"), (limited, "3,1,4")):
        (output,) = llm.generate([PROMPTS[0]], each, shape=shape)
        pairs = [tuple(other.token_ids[1:3]) for other in output.outputs]
        tokens.append(pairs)
    kinds = sorted(set(tokens[0]) | set(tokens[1]))
    # Two-sample chi-square over pairs of tokens, kinds with few draws together.
    counts = [[sample.count(kind) for kind in kinds] for sample in tokens]
    few = [sum(pair) < 20 for pair in zip(*counts, strict=True)]
    merged = [
        [c for c, is_few in zip(row, few, strict=True) if not is_few]
        + [sum(c for c, is_few in zip(row, few, strict=True) if is_few)]
        for row in counts
    ]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in zip(*merged, strict=True) if a + b)
    freedom = len(merged[0]) - 1
    assert freedom >= 5 and statistic < freedom + 5 * (2 * freedom) ** 0.5
