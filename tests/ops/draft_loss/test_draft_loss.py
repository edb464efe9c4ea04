"""Every loss of a draft head against autograd through its formula on whole logits, in fp64."""

import pytest
import torch
from torch.nn import functional as F

from eagle_kit.ops.draft_loss import NEEDS_MASS, linear_draft_loss
from eagle_kit.ops.soft_cross_entropy import Teacher, attach_gradient

ROWS, VD, V, SIZE, POSITIONS, ETA = 101, 257, 401, 23, 57, 2.5
LOSSES = ("ce", "kl", "reverse-kl", "tv", "lk-alpha", "lk-hybrid")
MIXES = (
    {"ce": 0.1, "tv": 0.9},
    {"ce": 0.4, "kl": 0.3},
    {"reverse-kl": 0.7, "lk-alpha": 0.2},
    dict(zip(LOSSES, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), strict=True)),
)


def formula(loss: str, z: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Loss of every row by its paper's formula: ``z [M, Vd]``, the target's distribution ``full [M, V]`` over
    all tokens, of which the draft vocabulary is the first Vd."""
    q = F.pad(z.softmax(-1), (0, full.shape[-1] - z.shape[-1]))
    p = full[:, : z.shape[-1]] / full[:, : z.shape[-1]].sum(-1, keepdim=True)
    accepted = torch.minimum(full, q).sum(-1)
    if loss == "ce":
        return -(p * z.log_softmax(-1)).sum(-1)
    kl = F.kl_div(z.log_softmax(-1), p, reduction="none").sum(-1)
    if loss == "kl":
        return kl
    if loss == "reverse-kl":
        return F.kl_div(p.log(), z.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    if loss == "tv":
        return 0.5 * (full - q).abs().sum(-1)
    if loss == "lk-alpha":
        return -accepted.log()
    share = torch.exp(-ETA * accepted.detach())
    return share * kl + (1 - share) * (1 - accepted)


def formula_of(loss: str | dict[str, float], z: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """:func:`formula` of a loss or of the sum of several."""
    mix = {loss: 1.0} if isinstance(loss, str) else loss
    return sum(weight * formula(name, z, full) for name, weight in mix.items())


def inputs(seed: int = 0, scale: float = 0.5):
    generator = torch.Generator().manual_seed(seed)
    h = (torch.randn(ROWS, SIZE, generator=generator) * scale).requires_grad_()
    w = torch.randn(VD, SIZE, generator=generator).requires_grad_()
    full = torch.randn(POSITIONS, V, generator=generator).mul(3).double().softmax(-1)
    index = torch.randint(0, POSITIONS, (ROWS,), generator=generator)
    return h, w, full, index, torch.rand(ROWS, generator=generator)


def teacher(full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mass = full[:, :VD].sum(-1)
    return (full[:, :VD] / mass[:, None]).float(), mass.float()


@pytest.mark.parametrize("loss", [*LOSSES, *MIXES], ids=str)
@pytest.mark.parametrize(("chunk", "group"), [(128, None), (7, 20)])
def test_loss_and_gradients_equal_autograd(loss, chunk, group):
    h, w, full, index, weights = inputs()
    probs, mass = teacher(full)
    assert 0.05 < mass.min() < 0.6 < mass.max()  # so that a wrong normalisation shows
    z = h.double() @ w.double().t()
    row_losses = formula_of(loss, z, full[index])
    expected = torch.autograd.grad((row_losses * weights).sum() * 2, (h, w))
    out = linear_draft_loss(
        h, w, Teacher(probs, index, weights, mass), loss=loss, eta=ETA, chunk_rows=chunk, group_rows=group
    )
    torch.testing.assert_close(out.row_losses.double(), row_losses.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.loss.double(), (row_losses * weights).sum(), rtol=1e-5, atol=1e-5)
    assert torch.equal(out.best, z.argmax(-1))
    for ours, theirs in zip(torch.autograd.grad(out.loss * 2, (h, w)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_blocks_that_share_one_gradient_of_the_weight_have_that_of_all_rows(loss):
    h, w, full, index, weights = inputs()
    probs, mass = teacher(full)
    whole = linear_draft_loss(h, w, Teacher(probs, index, weights, mass), loss=loss)
    wanted = torch.autograd.grad(whole.loss * 2, (h, w))
    gathered, total = torch.zeros_like(w), torch.zeros(())
    for rows in torch.arange(ROWS).split(40):
        part = linear_draft_loss(
            h[rows], w, Teacher(probs, index[rows], weights[rows], mass), loss=loss, weight_grad=gathered
        )
        assert torch.autograd.grad(part.loss, w, retain_graph=True, allow_unused=True) == (None,)
        total = total + part.loss
    total = total + attach_gradient(w, gathered)
    torch.testing.assert_close(total, whole.loss)
    for ours, theirs in zip(torch.autograd.grad(total * 2, (h, w)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["ce", "kl", {"kl": 0.5, "ce": 0.5}, {"ce": 0.1, "tv": 0.9}], ids=str)
def test_weights_that_follow_the_confidence_have_the_gradient_of_constants(loss):
    """Factors are made of the draft's probability of the teacher's best token; gradients are those of rows
    with the weights that come out, whatever the chunks."""
    h, w, full, index, weights = inputs()
    probs, mass = teacher(full)
    z = h.double() @ w.double().t()
    said = z.softmax(-1)[torch.arange(ROWS), probs.argmax(-1)[index]].detach()
    scaled = weights * (0.2 + said.flip(0) ** 2)  # a row's factor depends on another row
    row_losses = formula_of(loss, z, full[index])
    expected = torch.autograd.grad((row_losses * scaled).sum() * 2, (h, w))
    out = linear_draft_loss(
        h,
        w,
        Teacher(probs, index, weights, mass, lambda confidence: 0.2 + confidence.flip(0) ** 2),
        loss=loss,
        eta=ETA,
        chunk_rows=7,
    )
    torch.testing.assert_close(out.row_weights.double(), scaled, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.loss.double(), (row_losses * scaled).sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.row_losses.double(), row_losses.detach(), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(out.loss * 2, (h, w)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_draft_that_says_everything_needs_no_mass(loss):
    h, w, full, index, weights = inputs(1)
    probs, _ = teacher(full)
    alone = linear_draft_loss(h, w, Teacher(probs, index, weights), loss=loss)
    whole = linear_draft_loss(h, w, Teacher(probs, index, weights, torch.ones(POSITIONS)), loss=loss)
    torch.testing.assert_close(alone.row_losses, whole.row_losses)


@pytest.mark.parametrize("loss", ["lk-hybird", {"ce": 0.5, "huber": 0.5}])
def test_an_unknown_loss_is_refused(loss):
    h, w, full, index, weights = inputs(1)
    probs, _ = teacher(full)
    with pytest.raises(ValueError, match="unknown losses (lk-hybird|huber); known are ce, kl"):
        linear_draft_loss(h, w, Teacher(probs, index, weights), loss=loss)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "ce"])
def test_a_perfect_draft_loses_nothing_but_what_it_cannot_say(loss):
    """With q = p the divergences are 0, and the acceptance rate is the mass of the draft vocabulary."""
    logits = torch.randn(9, VD, generator=torch.Generator().manual_seed(2))
    mass = torch.linspace(0.3, 1.0, 9)
    out = linear_draft_loss(
        logits,
        torch.eye(VD),
        Teacher(logits.softmax(-1), torch.arange(9), torch.ones(9), mass),
        loss=loss,
        eta=ETA,
    )
    best = {"tv": 1 - mass, "lk-alpha": -mass.log(), "lk-hybrid": (1 - torch.exp(-ETA * mass)) * (1 - mass)}
    torch.testing.assert_close(out.row_losses, best.get(loss, torch.zeros(9)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_logits_far_apart_and_teachers_of_probability_zero_stay_finite(loss):
    h = torch.tensor([[200.0, -200.0, 0.0], [-200.0, 200.0, 0.0]], requires_grad=True)
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    out = linear_draft_loss(h, torch.eye(3), Teacher(probs, torch.arange(2), torch.ones(2)), loss=loss)
    out.loss.backward()
    assert out.row_losses.isfinite().all() and h.grad.isfinite().all()
    assert out.row_losses[0] > 0.9 and abs(float(out.row_losses[1])) < 1e-6


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_descent_raises_the_acceptance_rate(loss):
    """Free logits, one step at a time: every loss ends nearer to the target than it started."""
    _, _, full, _, _ = inputs(3)
    probs, mass = teacher(full)
    z = torch.zeros(POSITIONS, VD, requires_grad=True)
    distribution = probs * mass[:, None]
    before = torch.minimum(z.softmax(-1), distribution).sum(-1).mean()
    optimizer = torch.optim.Adam([z], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        out = linear_draft_loss(
            z, torch.eye(VD), Teacher(probs, torch.arange(POSITIONS), torch.ones(POSITIONS), mass), loss=loss
        )
        out.loss.backward()
        optimizer.step()
    after = torch.minimum(z.softmax(-1), distribution).sum(-1).mean()
    assert after > before + 0.5 * (mass.mean() - before)


@pytest.mark.parametrize("loss", LOSSES)
def test_autocast_runs_the_matmuls_in_bfloat16_and_keeps_fp32_gradients(loss):
    h, w, full, index, weights = inputs(4)
    probs, mass = teacher(full)
    exact = torch.autograd.grad(
        linear_draft_loss(h, w, Teacher(probs, index, weights, mass), loss=loss).loss, (h, w)
    )
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_draft_loss(h, w, Teacher(probs, index, weights, mass), loss=loss)
    for ours, theirs in zip(torch.autograd.grad(out.loss, (h, w)), exact, strict=True):
        assert ours.dtype == torch.float32 and not torch.equal(ours, theirs)
        assert torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), 0) > 0.995


@pytest.mark.parametrize("loss", LOSSES)
def test_under_autocast_losses_are_fp32_sums_over_the_rounded_logits(loss):
    """Its dot products over the vocabulary are no matmuls that autocast may round."""
    h, w, full, index, weights = inputs(4)
    probs, mass = teacher(full)
    z = torch.nn.functional.linear(h.detach().bfloat16(), w.detach().bfloat16()).float()
    exact = linear_draft_loss(z, torch.eye(z.shape[1]), Teacher(probs, index, weights, mass), loss=loss)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_draft_loss(h, w, Teacher(probs, index, weights, mass), loss=loss)
    torch.testing.assert_close(out.row_losses, exact.row_losses, rtol=1e-5, atol=1e-5)


def test_only_losses_in_the_acceptance_rate_read_the_mass():
    h, w, full, index, weights = inputs(5)
    probs, mass = teacher(full)
    for loss in LOSSES:
        values = [
            linear_draft_loss(h, w, Teacher(probs, index, weights, m), loss=loss).loss
            for m in (mass, 0.5 * mass)
        ]
        assert (values[0] != values[1]) == (loss in NEEDS_MASS)


@pytest.mark.parametrize("loss", ["ce", {"ce": 0.1, "tv": 1.8}], ids=str)
def test_weights_side_by_side_are_one_and_a_frozen_one_costs_no_gradient(loss):
    """A frozen output layer and a correction that learns, as of DSpark; and each row's acceptance rate."""
    h, w, full, index, weights = inputs()
    probs, mass = teacher(full)
    given = Teacher(probs, index, weights, mass)
    whole = linear_draft_loss(h, w, given, loss=loss, chunk_rows=7, group_rows=20)
    expected = torch.autograd.grad(whole.loss, (h, w))
    frozen, learned = w[:, :16].detach(), w[:, 16:].detach().requires_grad_()
    parts = linear_draft_loss(
        h, (frozen, learned), given, loss=loss, chunk_rows=7, group_rows=20, returns_acceptance=True
    )
    assert whole.acceptance is None and frozen.grad is None
    torch.testing.assert_close(parts.loss, whole.loss)
    ours = torch.autograd.grad(parts.loss, (h, learned), retain_graph=True)
    torch.testing.assert_close(ours, (expected[0], expected[1][:, 16:]), rtol=1e-4, atol=1e-5)
    rate = 1.0 - formula("tv", (h @ w.t()).double(), full[index])
    torch.testing.assert_close(parts.acceptance.double(), rate.detach(), rtol=1e-4, atol=1e-5)
    grown = torch.zeros_like(learned)
    linear_draft_loss(h, (frozen, learned), given, loss=loss, weight_grad=(None, grown))
    torch.testing.assert_close(grown, ours[1], rtol=1e-4, atol=1e-5)
