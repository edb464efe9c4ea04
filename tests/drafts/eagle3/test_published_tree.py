"""EAGLE-3's tree as its authors' code grows it, written again without a cache or masks, against the engine's.

The code is ``Model.topK_genrate`` of SafeAILab/EAGLE, with ``total_token=60``, ``depth=7`` and ``top_k=10``.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tiny import tiny_head, tiny_target
from tiny_engine import PROMPTS, make_engine, record_proposals, serve

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.engine.request import Request
from tests.drafts.eagle3.test_head import Published

TOTAL_TOKEN = 60
DEPTH = 7
TOP_K = 10


class Node(NamedTuple):
    """A candidate: the tokens from the root to it, the root left out, and the log-probability of the path."""

    path: tuple[int, ...]
    score: float


class Draft:
    """The published forward behind a text, over each path anew."""

    def __init__(self, published: Published, target, token_map, aux, text) -> None:
        self.published = published
        self.target = target
        self.token_map = token_map
        self.fused = published.fuse(aux.double())
        self.text = text
        self.states: dict[tuple[int, ...], torch.Tensor] = {}

    def best_children(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        """The TOP_K most likely tokens behind a path, and their log-probabilities, best first."""
        # A row of the text has the target's state; a node has the draft's state of its parent.
        fed_back = [self.states[path[:i]] for i in range(len(path))]
        hidden = torch.cat((self.fused, *fed_back))
        tokens = torch.cat((self.text, torch.tensor(path, dtype=torch.int64)))
        x, residual = self.published.layer_input(hidden, self.target.embed(tokens).double())
        q, k, v = self.published.qkv(x, torch.arange(len(x)))
        causal = torch.full((len(x), len(x)), float("-inf"), dtype=torch.float64).triu(1)
        scores = q @ k.transpose(1, 2) / self.published.c["head_dim"] ** 0.5 + causal
        state = self.published.finish(residual, scores.softmax(-1), v)[-1:]
        self.states[path] = state
        best = self.published.logits(state)[0].log_softmax(-1).topk(TOP_K)
        return list(zip(self.token_map[best.indices].tolist(), best.values.tolist(), strict=True))

    def tree(self) -> set[tuple[int, ...]]:
        """Paths of the nodes that are verified."""
        # Before the first of DEPTH forwards there are the TOP_K best children of the root.
        beam = [Node((token,), score) for token, score in self.best_children(())]
        candidates = list(beam)

        # A forward runs TOP_K nodes. The best TOP_K of their children are run next.
        for _ in range(DEPTH):
            children = []
            for node in beam:
                for token, score in self.best_children(node.path):
                    children.append(Node((*node.path, token), node.score + score))
            candidates += children
            beam = sorted(children, key=lambda node: -node.score)[:TOP_K]

        # `total_tokens` is TOTAL_TOKEN - 1: the best of all candidates, beside the root.
        best = sorted(candidates, key=lambda node: -node.score)[: TOTAL_TOKEN - 1]
        return {node.path for node in best}


@torch.no_grad()
@pytest.mark.parametrize("shape", ["8,10,60"])
def test_the_proposed_tree_is_that_of_the_published_code(tmp_path: Path, shape: str) -> None:
    target = tiny_target()
    head = tiny_head(target)
    head.lm_head.weight.mul_(8.0)  # so confident that trees are deep
    save_draft(head, tmp_path / "draft", metadata={})
    published = Published(tmp_path / "draft")

    # What the engine proposes for a request.
    engine = make_engine((target, head), page_size=4, shape=shape)
    engine.use_shape(SpecShape.parse(shape))
    proposals = record_proposals(engine)
    request = Request(0, list(PROMPTS[1]), SamplingParams(max_tokens=3, ignore_eos=True))
    serve(engine, [request])
    assert len(proposals) >= 2

    # The same by the published code, behind every text that was known then.
    text = torch.tensor(request.prompt_ids + request.token_ids)
    out = target(text, torch.arange(len(text)), target.causal(), head.capture)
    depths = set()
    for length, draft in proposals:
        aux = out.aux_hidden_states[:length]
        expected = Draft(published, target, head.token_map, aux, text[1 : length + 1]).tree()
        found = paths_of(draft.tree)
        assert draft.tree.tokens.shape == (1, TOTAL_TOKEN) and len(found) == TOTAL_TOKEN - 1
        assert found == expected
        depths |= {len(path) for path in found}
    assert max(depths) == DEPTH + 1, "no tree was as deep as the published one may be"


def paths_of(tree) -> set[tuple[int, ...]]:
    """Path of every node but the root of a window of one request."""
    tokens = tree.tokens[0].tolist()
    paths = [()]
    for node, parent in enumerate(tree.parents[0].tolist()[1:], 1):
        paths.append((*paths[parent], tokens[node]))
    return set(paths[1:])
