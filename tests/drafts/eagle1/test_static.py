"""EAGLE-1's fixed topology: its nodes, what it keeps, sampled siblings of the right distribution."""

import pytest
import torch
from siblings import check_distinct_siblings
from tiny import tiny_head, tiny_target
from tiny_engine import PROMPTS, decode, make_engine, serve

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.eagle1.static_tree import EAGLE1_CHOICES, Topology
from eagle_kit.engine.request import Request

SHAPE = "5,4,26"


@pytest.fixture(scope="module")
def models():
    target = tiny_target(vocab_size=11)
    return target, tiny_head(target, draft_vocab_size=9)


def test_the_published_tree_has_its_nodes():
    topology = Topology.parse(EAGLE1_CHOICES)
    assert str(topology.shape) == SHAPE
    assert [len(topology.children(node)) for node in range(5)] == [4, 3, 2, 2, 1]
    assert [len(level) for level in topology.inner] == [1, 4, 4, 1, 1]
    assert all(parent < node for node, parent in enumerate(topology.parents) if node)


def test_a_static_tree_keeps_more_than_its_first_chain(models):
    drafted = decode(models, SHAPE, batch=3, page_size=4, options={"tree": "static"})
    chain = decode(models, "5,1,6", batch=3)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in chain]
    verifies = [sum(r.stats.spec.num_verifies for r in requests) for requests in (drafted, chain)]
    assert verifies[0] < verifies[1]


def test_the_first_chain_of_the_tree_is_the_greedy_chain(models):
    """Rank 0 of rank 0 ... is what a chain proposes."""
    seen = {}
    for shape, options in ((SHAPE, {"tree": "static"}), ("5,1,6", {})):
        engine = make_engine(models, **options)
        engine.use_shape(SpecShape.parse(shape))
        propose, drafts = engine.runner.drafter.propose, []

        def recorded(*args, propose=propose, drafts=drafts):
            drafts.append(propose(*args))
            return drafts[-1]

        engine.runner.drafter.propose = recorded
        serve(engine, [Request(0, list(PROMPTS[1]), SamplingParams(max_tokens=2))])
        seen[shape] = drafts[0].tree
    tree, chain = seen[SHAPE], seen["5,1,6"]
    node, path = 0, []
    topology = Topology.parse(EAGLE1_CHOICES)
    while topology.children(node):
        node = topology.children(node)[0]
        path.append(int(tree.tokens[0, node]))
    assert path == chain.tokens[0, 1:].tolist()
    check_distinct_siblings(tree.tokens, tree.parents)


@pytest.mark.parametrize("count", [2_000, pytest.param(6_000, marks=pytest.mark.nightly)])
def test_sampled_siblings_keep_the_distribution(models, count):
    def pairs(**options):
        sizes = {"batch": 500, "max_context": 24, "kv_tokens": 30_000, "page_size": 4}
        engine = make_engine(models, **sizes, mixed_prefill_tokens=512, **options)
        engine.use_shape(SpecShape.parse(SHAPE if options.get("tree") else None))
        params = SamplingParams(max_tokens=3, temperature=1.1)
        requests = [Request(i, [1, 2, 3], params) for i in range(count)]
        serve(engine, requests)
        codes = torch.tensor([r.token_ids[1] * 11 + r.token_ids[2] for r in requests])
        return torch.bincount(codes, minlength=121).double()

    plain, sampled = pairs(), pairs(tree="static", sampled_drafts=True, seed=9)
    seen = plain + sampled > 20
    freedom = int(seen.sum()) - 1
    assert ((plain - sampled) ** 2 / (plain + sampled))[seen].sum() < freedom + 4 * (2 * freedom) ** 0.5


def test_another_shape_is_refused(models):
    with pytest.raises(UserError, match="static tree"):
        make_engine(models, tree="static").use_shape(SpecShape(5, 4, 16))
