"""Windows of different sizes in one forward: the same text, from fewer rows of the target."""

import math

import pytest
import torch
from tiny_engine import PROMPTS, decode, make_engine, resolved, serve

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.tree_build import Tree
from eagle_kit.models.targets.target import TargetOutput
from eagle_kit.serve.engine import Engine
from eagle_kit.serve.packed import Packing, packed_rows
from eagle_kit.serve.request import Request
from eagle_kit.tuning.acceptance import AcceptanceTable
from eagle_kit.tuning.policy import ShapePolicy


class Fixed(ShapePolicy):
    """One shape, of which each request's first drafts are verified, as many as its number says."""

    def __init__(self, shape, drafts):
        super().__init__(lambda *_: 1.0, AcceptanceTable.even([shape]), {1: [shape]})
        self.only, self.given, self.eases = shape, drafts, []

    def new_request(self):
        self.eases.append(super().new_request())
        return self.eases[-1]

    def choose(self, eases, context):
        numbers = [next(i for i, each in enumerate(self.eases) if each is ease) for ease in eases]
        self.num_drafts = [self.given[i % len(self.given)] for i in numbers]
        return self.only


def serve_packed(models, shape, drafts, batch=4, **params):
    """Serve four prompts -> the engine, the requests, and the rows of the target's forwards over windows."""
    engine, rows, is_cycle = make_engine(models, batch), [], False
    engine.use_shape(Fixed(SpecShape.parse(shape), drafts))
    decode, read = engine.runner.decode, engine.target.forward

    def decode_watched(*args):
        nonlocal is_cycle
        is_cycle = True
        try:
            return decode(*args)
        finally:
            is_cycle = False

    def read_watched(ids, *rest):
        if is_cycle:
            rows.append(len(ids))
        return read(ids, *rest)

    engine.runner.decode, engine.target.forward = decode_watched, read_watched
    params = SamplingParams(max_tokens=40, **params)
    requests = [Request(i, list(PROMPTS[i]), params) for i in range(4)]
    try:
        serve(engine, requests)
    finally:
        del engine.target.forward
    return engine, requests, rows


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    ("shape", "drafts"),
    [
        ("4,1,5", [4, 0, 1, 2]),
        ("3,2,6", [5, 0, 2, 1]),
        ("5,4,16", [3, 15, 0, 7]),
        ("4,1,5", [0]),
        ("4,1,5", [4]),
    ],
)
def test_packed_windows_change_no_text_and_take_fewer_rows(models, shape, drafts, params):
    plain = [request.token_ids for request in decode(models, max_tokens=40, **params)][:4]
    engine, requests, rows = serve_packed(models, shape, drafts, **params)
    assert [request.token_ids for request in requests] == plain
    nodes = SpecShape.parse(shape).tokens
    expected = packed_rows(4, nodes, (4 * drafts)[:4])
    assert max(rows) == (expected or 4 * nodes) and (expected is None) == (drafts == [4])
    for i, request in enumerate(requests):
        accepted = request.stats.num_accepted_at
        assert len([n for n in accepted if n]) <= drafts[i % len(drafts)]
    assert (engine.totals.spec.num_accepted_at[:1] or [0])[0] > 0 or drafts == [0], "nothing was accepted"
    assert (engine.totals.num_draft_tokens == 0) == (drafts == [0])


def test_n_gram_windows_take_the_rows_of_what_was_found(models):
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    plain = [request.token_ids for request in decode(models, max_tokens=30, ignore_eos=True)][:3]
    engine = Engine(models[0], None, resolved(3, 256, kv_tokens=1200, algorithm="NGRAM"))
    engine.use_shape(SpecShape.parse("8,4,12"))
    run, cycles = engine.runner.decode, []
    engine.runner.decode = lambda *args: (cycles.append(run(*args)), cycles[-1])[1]
    requests = [Request(i, list(prompt), params) for i, prompt in enumerate(PROMPTS[:3])]
    serve(engine, requests)
    assert [request.token_ids for request in requests] == plain
    for each in cycles:
        assert each.num_rows == packed_rows(len(each.requests), 12, each.num_drafts)
    assert len({each.num_rows for each in cycles}) > 2 and engine.totals.spec.num_accepted_at[0] > 0


@pytest.mark.parametrize("num_drafts", [[2, 0, 3], [0, 0, 0], [3, 3, 3], [1, 1, 1]])
def test_every_kept_node_has_a_row_and_others_are_copies_of_their_root(num_drafts):
    kept = sum(num_drafts) + 3
    for num_rows in range(kept, 13):
        packing = Packing.of(torch.tensor(num_drafts), 4, num_rows)
        assert len(packing.rows) == num_rows == len(set(packing.rows.tolist()))
        nodes = torch.arange(12)
        assert packing.is_kept.sum() == kept
        found = nodes[packing.rows][packing.places].view(3, 4)
        wanted = torch.where(packing.is_kept, nodes.view(3, 4), nodes.view(3, 4)[:, :1])
        assert torch.equal(found, wanted)
        whole = packing.whole(TargetOutput(packing.rows[:, None].float(), packing.rows[:, None].float() + 1))
        assert torch.equal(whole.hidden.view(3, 4), wanted.float())
        assert torch.equal(whole.aux.view(3, 4), wanted.float() + 1)
        parents = torch.tensor([0, 0, 1, 2]).expand(3, 4)
        cut = packing.cut(Tree(parents, parents, parents, parents)).parents
        assert torch.equal(cut == torch.arange(4), ~packing.is_kept | (torch.arange(4) == 0))


@pytest.mark.parametrize("batch", [1, 3, 8, 32])
@pytest.mark.parametrize("nodes", [2, 3, 5, 16])
def test_rows_are_enough_and_of_few_numbers(batch, nodes):
    numbers = set()
    for total in range(batch * (nodes - 1) + 1):
        drafts = [total // batch + (i < total % batch) for i in range(batch)]
        rows = packed_rows(batch, nodes, drafts)
        numbers.add(rows)
        most = batch * nodes
        assert total + batch <= (rows or most) <= most
        assert (rows or most) - total - batch <= math.ceil(batch * (nodes - 1) / 4)
    assert len(numbers) <= 5
