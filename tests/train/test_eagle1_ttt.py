"""Training of EAGLE-1 heads against the published step in fp64: every loss and every gradient."""

import pytest
import torch
from published_eagle1 import PublishedEagle1, published_losses
from tiny import packed_row, randomise, tiny_target

from eagle_kit.checkpoints.eagle1 import to_published
from eagle_kit.config.train import FeatureNoise, HeadConfig, RegressionConfig
from eagle_kit.models.eagle1 import Eagle1Head
from eagle_kit.models.published import published_names
from eagle_kit.train.batch import Forward
from eagle_kit.train.new_head import _eagle1_config
from eagle_kit.train.noise import add_noise
from eagle_kit.train.regression import regression_loss
from eagle_kit.train.teacher import TargetFeatures, capture_features
from eagle_kit.train.ttt import plan_row, ttt_forward_backward


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


RECIPES = {
    "eagle": (1, (1.0, 0.1, 0.0, 10), False, True),
    "no bias, three steps": (3, (1.0, 0.1, 0.0, 10), False, False),
    "hass": (3, (1.0, 0.1, 1.0, 10), True, True),
    "only the best tokens": (2, (0.0, 0.0, 1.0, 3), True, True),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_and_every_gradient_equal_the_published_step(recipe):
    steps, weights, detach, bias = RECIPES[recipe]
    target = tiny_target()
    config = _eagle1_config(HeadConfig(kind="eagle1", fc_bias=bias, intermediate_size=97), target.config)
    head = randomise(Eagle1Head(config), 3, 0.15).bind(target.lm_head)
    ids, reply, doc_start = packed_row()
    plan = plan_row(reply, doc_start, steps)
    features = capture_features(target, ids, doc_start, head.capture, plan.needed)
    read = features._replace(hidden=features.hidden + 0.3 * noise(61, 48, seed=7))
    step_weights = [0.7**k for k in range(steps)]
    result = ttt_forward_backward(
        head,
        target.embed_tokens.weight,
        ids,
        features,
        target.head_weight,
        plan,
        [torch.full((n,), w) for n, w in zip(plan.counts, step_weights, strict=True)],
        inputs=read,
        regression=RegressionConfig(
            **dict(zip(("feature_weight", "token_weight", "topk_weight", "topk"), weights, strict=True))
        ),
        detach_steps=detach,
    )

    oracle = PublishedEagle1(to_published(head, torch.float64), config.num_heads, config.num_kv_heads)
    embeds, output = target.embed(ids).double(), target.head_weight.double()
    per_step = [(torch.zeros((), dtype=torch.float64), 0)] * steps
    for start, stop in ((0, 17), (17, 44), (44, 61)):
        part = slice(start, stop)
        mine = published_losses(
            oracle, features.hidden[part].double(), read.hidden[part].double(), embeds[part], output,
            reply[part], steps, weights, detach,
        )  # fmt: skip
        per_step = [(a + c, b + d) for (a, b), (c, d) in zip(per_step, mine, strict=True)]
    assert result.matches.tolist() == [hits for _, hits in per_step]
    assert result.learned.tolist() == plan.counts and min(plan.counts) > 5
    sums = torch.stack([total.detach() for total, _ in per_step])
    torch.testing.assert_close(result.losses, sums, rtol=1e-5, atol=1e-4)
    loss = sum(w * total for w, (total, _) in zip(step_weights, per_step, strict=True))
    loss.backward()
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, parameter in head.named_parameters():
        parts = [part if part.startswith("fc.") else f"layers.0.{part}" for part in published_names(name)]
        want = torch.cat([oracle.w(part).grad for part in parts]).float()
        assert want.abs().max() > 1e-3, name
        torch.testing.assert_close(
            parameter.grad, want, rtol=1e-3, atol=2e-4 * max(1.0, float(want.abs().max())),
            msg=lambda m, n=name: f"{n}: {m}",
        )  # fmt: skip
    assert not target.head_weight.requires_grad and target.head_weight.grad is None


@pytest.mark.parametrize("weights", [(1.0, 0.1, 0.0, 10), (0.5, 0.3, 2.0, 4), (0.0, 0.0, 1.0, 500)])
def test_the_loss_equals_autograd_on_its_formula_in_fp64(weights):
    feature, token, best, k = weights
    rows, positions, size, vocab = 401, 37, 48, 1271
    states, output = 2.0 * noise(rows, size), noise(vocab, size, seed=1) * 0.3
    hidden, c = 2.0 * noise(positions, size, seed=2), noise(rows, seed=3).abs()
    index = torch.arange(rows) % positions
    probs = (hidden @ output.T).softmax(-1)

    mine = states.clone().requires_grad_()
    config = RegressionConfig(feature_weight=feature, token_weight=token, topk_weight=best, topk=k)
    result = regression_loss(mine, output, hidden, probs.clone(), index, c, config)
    result.loss.backward()

    theirs = states.double().requires_grad_()
    p, log_q = probs.double()[index], (theirs @ output.double().T).log_softmax(-1)
    d = theirs - hidden.double()[index]
    distance = torch.where(d.abs() < 1, d.square() / 2, d.abs() - 0.5).mean(-1)
    keep = p >= p.topk(min(k, vocab)).values[:, -1:]
    row_losses = feature * distance - token * (p * log_q).sum(-1) - best * (p * log_q * keep).sum(-1)
    (row_losses * c).sum().backward()
    torch.testing.assert_close(result.row_losses.double(), row_losses.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(result.best, log_q.argmax(-1))


def forward_of(numbers: list[int], lengths: list[int], doc_start: list[int]) -> Forward:
    ids = torch.zeros(sum(lengths), dtype=torch.int64)
    starts = torch.tensor(doc_start)
    return Forward(numbers, lengths, ids, starts, plan_row(torch.full_like(ids, -1), starts, 1))


def test_noise_depends_on_seed_step_and_row_alone():
    both = forward_of([4, 9], [5, 7], [0] * 5 + [5] * 7)
    alone = forward_of([9], [7], [0] * 7)
    zeros = TargetFeatures(torch.zeros(12, 0), torch.zeros(12, 6), torch.zeros(12))
    uniform = FeatureNoise(scale=0.25)
    drawn = add_noise(zeros, uniform, both, seed=1, step=2).hidden
    again = add_noise(
        zeros._replace(aux=torch.zeros(7, 0), hidden=torch.zeros(7, 6)), uniform, alone, seed=1, step=2
    )
    assert torch.equal(drawn[5:], again.hidden) and not zeros.hidden.any()
    for seed, step in ((1, 3), (2, 2)):
        assert not torch.equal(drawn, add_noise(zeros, uniform, both, seed=seed, step=step).hidden)
    assert not torch.equal(drawn[:5], drawn[5:10])


def test_noise_has_the_published_law():
    """``(rand - 0.5) * 0.2 * 512 / T`` of a conversation of T tokens."""
    lengths = [700, 300]
    forward = forward_of([0], [1000], [0] * 700 + [700] * 300)
    zeros = TargetFeatures(torch.zeros(1000, 0), torch.zeros(1000, 64), torch.zeros(1000))
    drawn = add_noise(zeros, FeatureNoise(scale=0.1, per_tokens=512), forward, seed=0, step=0).hidden
    for part, length in zip(drawn.split(lengths), lengths, strict=True):
        bound = 0.1 * 512 / length
        assert 0.999 * bound < part.abs().max() <= bound
        assert float(part.std()) == pytest.approx(bound / 3**0.5, rel=0.01)
        assert abs(float(part.mean())) < 0.01 * bound
    gaussian = FeatureNoise(kind="gaussian", scale=0.2)
    drawn = add_noise(zeros, gaussian, forward, seed=0, step=0).hidden
    assert float(drawn.std()) == pytest.approx(0.2, rel=0.01) and drawn.abs().max() > 0.6
    aux = zeros._replace(aux=torch.zeros(1000, 6))
    noisy = add_noise(aux, gaussian, forward, seed=0, step=0)
    assert noisy.aux.any() and not noisy.hidden.any(), "EAGLE-3 heads read the captured states"
