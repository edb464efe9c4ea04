"""Mixtures of experts: Mixtral and Qwen3-MoE against transformers, the gates' rules by hand, the
implementations of the experts against each other."""

from functools import partial

import pytest
import torch
from tiny_mixtures import MIXTURES, randomised, run
from torch._subclasses.fake_tensor import FakeTensorMode
from versions import needs

from eagle_kit.models.blocks.moe import Gate, MoE
from eagle_kit.models.layer_configs import MoEConfig
from eagle_kit.models.loading.loader import load_target
from eagle_kit.ops.experts import experts, pack_experts, reference

T, E, K, H, INNER = 23, 7, 3, 32, 24


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_equal_those_of_transformers(name, tmp_path):
    theirs = randomised(MIXTURES[name])
    theirs.save_pretrained(tmp_path)
    ours = load_target(tmp_path)
    for length in (1, 37, 201):
        ids = torch.randint(0, 271, (length,), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            want = theirs(ids[None]).logits[0]
            got = ours.logits(run(ours, ids).hidden)
        assert want.abs().max() > 1
        assert (got - want).abs().max() < 2e-5 * want.abs().max()


@pytest.fixture
def work():
    """Rows, their experts and weights, and the networks; expert 4 gets no row, expert 6 one."""
    torch.manual_seed(3)
    ids = torch.stack([torch.randperm(4)[:K] for _ in range(T)])
    ids[5, 1], ids[7, 0] = 6, 5
    return torch.randn(T, H), ids, torch.rand(T, K), torch.randn(E, 2 * INNER, H), torch.randn(E, H, INNER)


def by_hand(x, ids, weights, gate_up, down):
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for expert, weight in zip(ids[t].tolist(), weights[t], strict=True):
            gate, up = (gate_up[expert] @ x[t]).chunk(2)
            out[t] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("form", [reference.by_expert, reference.grouped, reference.dense, experts])
def test_every_form_of_the_experts_computes_the_weighted_sum(form, work):
    want = by_hand(*work)
    assert (form(*work) - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    "form", [reference.by_expert, partial(reference.grouped, are_all=False), reference.dense]
)
def test_experts_of_other_processes_add_nothing(form, work):
    x, ids, weights, gate_up, down = work
    mine = x, ids.clamp(max=3), weights, gate_up[:3], down[:3]  # 3, as there are so many, is another's
    want = by_hand(x, ids, weights * (ids < 3), gate_up, down)
    assert (form(*mine) - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("form", [reference.by_expert, reference.grouped, reference.dense])
def test_experts_in_bf16_round_only_at_the_ends(form, work):
    x, ids, weights, gate_up, down = work
    half = [tensor.bfloat16() for tensor in (x, gate_up, down)]
    out = form(half[0], ids, weights, *half[1:])
    assert out.dtype == torch.bfloat16
    want = by_hand(half[0].float(), ids, weights, half[1].float(), half[2].float())
    assert (out.float() - want).abs().max() < 0.02 * want.abs().max()


@needs("torch", "2.13", "last bits of fp32 matmuls of a CPU depend on the number of rows before it")
def test_a_row_does_not_depend_on_its_company(work):
    x, ids, weights, gate_up, down = work
    whole = experts(*work)
    for t in (0, 5, 7):
        alone = experts(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], gate_up, down)
        assert torch.equal(alone[0], whole[t])


@torch.no_grad()
def test_a_row_does_not_depend_on_its_company_when_packed(work):
    x, ids, weights, gate_up, down = work
    packed = pack_experts(gate_up, down)
    whole = experts(*work, packed)
    assert (whole - by_hand(*work)).abs().max() < 1e-5 * whole.abs().max()
    for rows in (slice(5, 6), slice(7, 8), slice(4, 8)):
        part = experts(x[rows], ids[rows], weights[rows], gate_up, down, packed)
        assert torch.equal(part, whole[rows])


def test_experts_are_differentiable_on_a_cpu(work):
    x, ids, weights, gate_up, down = work
    x = x.double().requires_grad_()
    rest = (ids, weights.double(), gate_up.double(), down.double())
    out = experts(x.float(), ids, weights, gate_up, down)
    ours = torch.autograd.grad(out.sum(), x)[0]
    want = torch.autograd.grad(by_hand(x, *rest).sum(), x)[0]
    assert (ours - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_mixture_reads_nothing_on_the_host(scoring):
    config = MoEConfig(8, 2, 16, 16, scoring=scoring, has_bias=True, num_groups=4, num_topk_groups=2)
    with FakeTensorMode():
        mixture = MoE(32, config)
        assert mixture(torch.randn(5, 32)).shape == (5, 32)


def gate(**rules) -> Gate:
    return Gate(4, MoEConfig(8, 2, 16, **rules))


LOGITS = torch.tensor([[3.0, 0.0, 2.5, 2.4, 1.0, 1.0, -1.0, 2.9]])


def test_a_gate_without_groups_takes_the_most_likely():
    ids, weights = gate().choose(LOGITS)
    assert ids.tolist() == [[0, 7]]
    assert torch.equal(weights, LOGITS.softmax(-1)[:, [0, 7]])
    ids, weights = gate(normalises=True, scale=2.5).choose(LOGITS)
    assert weights.sum() == pytest.approx(2.5)


def test_a_group_counts_by_its_best_expert_or_with_a_bias_by_its_best_two():
    one = {"num_groups": 4, "num_topk_groups": 1}
    assert gate(**one).choose(LOGITS)[0].tolist() == [[0, 1]]
    assert sorted(gate(**one, has_bias=True, scoring="sigmoid").choose(LOGITS)[0][0].tolist()) == [2, 3]


def test_a_bias_chooses_and_does_not_weigh():
    biased = gate(has_bias=True, scoring="sigmoid")
    with torch.no_grad():
        biased.e_score_correction_bias[6] = 5.0
    ids, weights = biased.choose(LOGITS)
    assert ids.tolist() == [[6, 0]]
    assert torch.equal(weights, LOGITS.sigmoid()[:, [6, 0]])


def test_groups_of_one_expert_count_by_it():
    biased = gate(has_bias=True, scoring="sigmoid", num_groups=8, num_topk_groups=3)
    assert biased.choose(LOGITS)[0].tolist() == [[0, 7]]


def test_weights_of_scores_that_all_underflow_are_finite():
    _, weights = gate(scoring="sigmoid", normalises=True).choose(torch.full((1, 8), -200.0))
    assert weights.isfinite().all()


def test_a_gate_in_bf16_chooses_by_sums_in_fp32():
    """Logits 64 and 64.0625 of two experts, of which bf16 knows one."""
    half = gate().bfloat16()
    with torch.no_grad():
        half.weight.zero_()
        half.weight[3, 0] = 1.0
        half.weight[5, :2] = torch.tensor([1.0, 2.0**-10])
    ids, weights = half(torch.tensor([[64.0, 64.0, 0.0, 0.0]], dtype=torch.bfloat16))
    assert ids.tolist() == [[5, 3]] and weights.dtype == torch.float32
    assert weights[0, 0] > weights[0, 1]


def test_experts_outside_the_kept_groups_are_never_chosen():
    """Two experts from one group of two, although biases make every score negative."""
    biased = gate(has_bias=True, scoring="sigmoid", num_groups=4, num_topk_groups=1)
    with torch.no_grad():
        biased.e_score_correction_bias.fill_(-9.0)
    assert sorted(biased.choose(LOGITS)[0][0].tolist()) == [2, 3]
