"""Muon beside AdamW, the average of weights, and noise: each against its definition."""

import copy
import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rank_processes import run_ranks
from tiny import tiny_head, tiny_target
from tiny_mixtures import v3
from torch.testing import assert_close

from eagle_kit.config.drafts.base import HeadConfig
from eagle_kit.config.drafts.blocks import DSparkHeadConfig
from eagle_kit.config.train import TrainConfig
from eagle_kit.config.training import FeatureNoise, TrainingConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts import registry
from eagle_kit.drafts.dspark.head import DSparkHead
from eagle_kit.drafts.mtp.head import MTPConfig, MTPHead
from eagle_kit.models.config import TargetConfig
from eagle_kit.objective.batch import MicroBatch
from eagle_kit.objective.noise import add_noise
from eagle_kit.objective.ttt_module import TTTModule
from eagle_kit.train.optim.choose import make_strategy
from eagle_kit.train.optim.ema import Ema
from eagle_kit.train.optim.optimizer import MuonAdamW, make_optimizer, set_learning_rate
from eagle_kit.train.optim.strategy import Replicated
from eagle_kit.train.run.checkpoint import Checkpoint, TrainState, load_checkpoint, save_checkpoint

MUON = TrainingConfig(
    optimizer="muon",
    learning_rate=0.02,
    weight_decay=0.1,
    muon_learning_rate_ratio=3.0,
    muon_momentum=0.8,
    betas=(0.8, 0.9),
    eps=0.1,
)


def make_head():
    return tiny_head(tiny_target())


def config_of(head: HeadConfig) -> TrainConfig:
    return TrainConfig(target="t", output_dir="o", data={"source": "a"}, head=head)


def alone(head, training) -> Replicated:
    """What one process trains ``head`` with."""
    target = tiny_target()
    module = TTTModule(head, target.embed_tokens.weight, target.head_weight, training)
    return Replicated(
        module, training, SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
    )


def give_gradients(head, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in head.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def restore(folder, strategy, optimizer_state) -> None:
    """Restore an optimiser from a checkpoint without an average of the weights."""
    Checkpoint(folder, strategy.head, optimizer_state, TrainState(), None).restore(strategy, None)


def test_muon_moves_inner_matrices_and_adamw_the_output_layer_and_norms() -> None:
    """Against torch's two optimisers, each over its own parameters."""
    head, other = make_head(), make_head()
    inner = [p for n, p in other.named_parameters() if p.ndim == 2 and n != "lm_head.weight"]
    norms = [p for p in other.parameters() if p.ndim == 1]
    assert len(inner) >= 5 and len(norms) == 4
    muon = torch.optim.Muon(inner, lr=0.06, weight_decay=0.1, momentum=0.8, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": [other.lm_head.weight], "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        lr=0.02,
        betas=(0.8, 0.9),
        eps=0.1,
        fused=True,
    )
    optimizer = make_optimizer(head, MUON)
    for step in range(4):
        set_learning_rate(optimizer, 0.02)
        for mine in (head, other):
            give_gradients(mine, step)
        for each in (optimizer, muon, adamw):
            each.step()
    for (name, ours), theirs in zip(head.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


class Shared(NamedTuple):
    """What one of several processes has after its steps.

    Attributes:
        weights: of the head.
        state: the whole state of the optimiser after two steps.
        num_momenta: matrices whose momentum this process kept.
    """

    weights: dict[str, torch.Tensor]
    state: dict[str, Any]
    num_momenta: int


def take_shared_steps(ranks: Any) -> Shared:
    """Take four steps in one of several processes, the last two with an optimiser that was loaded again."""
    process = (ranks.rank, ranks.size)
    head = make_head()
    optimizer = make_optimizer(head, MUON, process)
    for step in range(4):
        give_gradients(head, step)
        set_learning_rate(optimizer, 0.02)
        optimizer.step()
        if step == 1:
            state = optimizer.whole_state_dict()
            momenta = [p for p in head.parameters() if "momentum_buffer" in optimizer.state.get(p, {})]
            optimizer = make_optimizer(head, MUON, process)
            optimizer.load_state_dict(copy.deepcopy(state))
    weights = {name: p.detach().clone() for name, p in head.named_parameters()}
    return Shared(weights, state, len(momenta))


@pytest.mark.parametrize("count", [2, 6])
def test_processes_share_muon_s_matrices_and_have_what_one_alone_has(count: int) -> None:
    # One process alone.
    head = make_head()
    optimizer = make_optimizer(head, MUON)
    for step in range(4):
        give_gradients(head, step)
        set_learning_rate(optimizer, 0.02)
        optimizer.step()
        if step == 1:
            state = copy.deepcopy(optimizer.state_dict())

    # Every one of several has its weights and, when it is gathered, its state.
    shared: list[Shared] = run_ranks(count, take_shared_steps)
    for each in shared:
        assert all(torch.equal(each.weights[name], p) for name, p in head.named_parameters())
        assert each.state["param_groups"] == state["param_groups"]
        assert each.state["state"].keys() == state["state"].keys()
        for number, moments in state["state"].items():
            theirs = each.state["state"][number]
            assert moments.keys() == theirs.keys()
            assert all(torch.equal(value, theirs[name]) for name, value in moments.items())

    # Together they keep each momentum once.
    num_matrices = sum("momentum_buffer" in moments for moments in state["state"].values())
    shares = [each.num_momenta for each in shared]
    assert sum(shares) == num_matrices and max(shares) < num_matrices


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e9])
def test_a_gradient_is_clipped_to_its_largest_norm_or_not_at_all(clip_norm: float | None) -> None:
    """Told by plain steps along the gradient; the norm that is returned is that of before."""
    head = make_head()
    strategy = alone(head, TrainingConfig())
    strategy.optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    before = [p.detach().clone() for p in head.parameters()]
    give_gradients(head, 0)
    gradients = [p.grad.clone() for p in head.parameters()]
    norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
    assert strategy.update(0.25, clip_norm) == pytest.approx(norm, rel=1e-5) and norm > 1
    factor = 0.25
    if clip_norm == 0.5:
        factor *= 0.5 / norm
    for old, parameter, gradient in zip(before, head.parameters(), gradients, strict=True):
        assert_close(parameter, old - factor * gradient, rtol=1e-4, atol=1e-6)
        assert not parameter.grad.any(), "the next step begins with none"


def test_a_step_whose_gradient_is_not_finite_is_not_taken() -> None:
    head = make_head()
    strategy = alone(head, TrainingConfig())
    before = [p.detach().clone() for p in head.parameters()]
    give_gradients(head, 0)
    next(head.parameters()).grad[0] = torch.inf
    assert not np.isfinite(strategy.update(0.1, 0.5))
    assert all(torch.equal(a, b) for a, b in zip(before, head.parameters(), strict=True))
    assert not strategy.optimizer.state and not any(p.grad.any() for p in head.parameters())


def test_muon_leaves_embeddings_of_a_head_and_stacks_of_experts_to_adamw() -> None:
    target = tiny_target().config
    settings = DSparkHeadConfig(num_layers=1, block_size=3, markov_rank=8)
    dspark = DSparkHead(registry.training_kind(config_of(settings)).new_config(settings, target))
    mixture = TargetConfig.from_dict({**v3().to_dict(), "architectures": ["DeepseekV3ForCausalLM"]})

    # Every trained tensor has one optimiser.
    for head in (dspark, MTPHead(MTPConfig(mixture, 1))):
        head.bind(tiny_target().lm_head)
        names = {id(p): name for name, p in head.named_parameters()}
        optimizer = make_optimizer(head, MUON)
        inner = [names[id(p)] for p in optimizer.param_groups[0]["params"]]
        others = [names[id(p)] for group in optimizer.param_groups[1:] for p in group["params"]]
        trained = [name for name, p in head.named_parameters() if p.requires_grad]
        assert sorted([*inner, *others]) == sorted(trained)
        assert all(head.get_parameter(name).ndim == 2 for name in inner) and len(inner) > 4
        tables = [name for name, each in head.named_modules() if isinstance(each, torch.nn.Embedding)]
        stacks = [name for name in trained if head.get_parameter(name).ndim == 3]
        assert tables or stacks
        assert {f"{name}.weight" for name in tables} | set(stacks) <= set(others)


@pytest.mark.parametrize("sharding", ["fsdp2", "zero2", "zero3"])
@pytest.mark.parametrize("setting", [{"optimizer": "muon"}, {"ema_decay": 0.9}])
def test_what_needs_whole_weights_is_refused_where_they_are_sharded(sharding: str, setting: dict) -> None:
    with pytest.raises(UserError, match=f"training.{next(iter(setting))} is .* needs whole weights"):
        make_strategy(sharding, None, TrainingConfig(**setting), None)


def test_the_default_is_torch_s_adamw_with_decay_on_matrices() -> None:
    head, other = make_head(), make_head()
    groups = [
        {"params": [p for p in other.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in other.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True)
    optimizer = make_optimizer(head, TrainingConfig(learning_rate=0.01, weight_decay=0.1))
    for step in range(3):
        for mine in (head, other):
            give_gradients(mine, step)
        optimizer.step()
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("training", [MUON, TrainingConfig()])
def test_a_saved_optimiser_goes_on_to_the_bit(training, tmp_path) -> None:
    head = make_head()
    optimizer = make_optimizer(head, training)
    for step in range(2):
        give_gradients(head, step)
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    copied = copy.deepcopy(head)
    strategy = alone(copied, training)
    again = strategy.optimizer
    restore(tmp_path, strategy, torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for step in range(2, 4):
        for model, each in ((head, optimizer), (copied, again)):
            give_gradients(model, step)
            set_learning_rate(each, 0.01)
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), copied.parameters(), strict=True))


def test_the_state_of_another_optimiser_is_refused_by_name(tmp_path) -> None:
    for saved, wanted in itertools.permutations(("adamw", "muon")):
        state = make_optimizer(make_head(), TrainingConfig(optimizer=saved)).state_dict()
        strategy = alone(make_head(), TrainingConfig(optimizer=wanted))
        with pytest.raises(UserError, match=f"is of {saved}; training.optimizer is {wanted}") as caught:
            restore(tmp_path, strategy, state)
        assert f"training.optimizer={saved}" in caught.value.remedy


def test_a_checkpoint_with_an_average_goes_on_from_the_raw_weights(tmp_path) -> None:
    training = TrainingConfig(ema_decay=0.5)
    strategy = alone(make_head(), training)
    ema = Ema(strategy.head, 0.5)
    for step in range(3):
        give_gradients(strategy.head, step)
        strategy.update(0.01, None)
        ema.update(step)
    raw = {name: p.detach().clone() for name, p in strategy.head.named_parameters()}
    with ema.applied():
        average = {name: p.detach().clone() for name, p in strategy.head.named_parameters()}
        state = strategy.optimizer_state()
        save_checkpoint(tmp_path / "step-3", strategy.head, state, TrainState(step=3), {}, ema)

    found = load_checkpoint(tmp_path / "step-3", torch.device("cpu"))
    assert found.state.step == 3
    assert all(torch.equal(p, average[name]) for name, p in found.head.named_parameters())
    again = alone(found.head, training)
    resumed = Ema(found.head, 0.5)
    found.restore(again, resumed)
    assert all(torch.equal(p, raw[name]) for name, p in found.head.named_parameters())
    with resumed.applied():
        assert all(torch.equal(p, average[name]) for name, p in found.head.named_parameters())


def test_muon_s_state_of_another_head_is_refused(tmp_path) -> None:
    strategy = alone(make_head(), MUON)
    assert isinstance(strategy.optimizer, MuonAdamW)
    give = make_head()
    other = make_optimizer(give, MUON)
    give_gradients(give, 0)
    other.step()
    state = other.state_dict()
    first = state["param_groups"][0]["params"][0]
    state["state"][first]["momentum_buffer"] = torch.zeros(3, 3)
    with pytest.raises(UserError, match="another head"):
        restore(tmp_path, strategy, state)


def test_the_average_is_the_recurrence_and_changes_places_with_the_weights() -> None:
    head = make_head()
    ema = Ema(head, 0.6)
    expected = {name: p.detach().double().clone() for name, p in head.named_parameters()}
    for step in range(12):
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
        ema.update(step)
        decay = min(0.6, (1 + step) / (10 + step))
        for name, p in head.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * p.detach().double()
    raw = {name: p.detach().clone() for name, p in head.named_parameters()}
    with ema.applied():
        for name, p in head.named_parameters():
            assert_close(p.double(), expected[name], rtol=1e-5, atol=1e-6)
            assert torch.equal(ema.raw()[name], raw[name])
    assert all(torch.equal(p, raw[name]) for name, p in head.named_parameters())
    with pytest.raises(ValueError, match="another head"):
        ema.restore({name: tensor[:1] for name, tensor in raw.items()})


AUX = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1, 1, 80, 80, 80])


def forward(numbers, lengths, doc_start=None):
    """Packed rows of ``lengths`` tokens, without tokens or plan."""
    if doc_start is None:
        doc_start = torch.zeros(sum(lengths), dtype=torch.int64)
    return MicroBatch(
        numbers, lengths, ids=None, doc_start=doc_start, plan=None, group=None, group_counts=[0]
    )


@pytest.mark.parametrize(
    "noise",
    [
        FeatureNoise(kind="uniform", amount=0.1),
        FeatureNoise(kind="gaussian", amount=0.1, unit="rms"),
        FeatureNoise(kind="dropout", amount=0.3),
    ],
)
def test_noise_depends_on_seed_step_and_row_alone(noise) -> None:
    def noisy(numbers, lengths, aux=AUX, seed=3, step=7):
        return add_noise(aux, forward(numbers, lengths), noise, 2, seed, step)

    torch.manual_seed(1)
    together = noisy([4, 9], [20, 30])
    torch.manual_seed(2)
    apart = torch.cat((noisy([4], [20], AUX[:20]), noisy([9], [30], AUX[20:])))
    assert torch.equal(together, apart) and not torch.equal(together, AUX)
    for other in (noisy([4, 8], [20, 30]), noisy([4, 9], [20, 30], step=8), noisy([4, 9], [20, 30], seed=4)):
        assert not torch.equal(other[20:], together[20:])
    assert noisy([4, 9], [20, 30], AUX.bfloat16()).dtype == torch.bfloat16


def test_noise_has_the_size_it_is_asked_for() -> None:
    aux = torch.ones(4000, 6) * torch.tensor([1.0, 1, 1, 80, 80, 80])

    def change(**noise):
        return add_noise(aux, forward([1], [4000]), FeatureNoise(**noise), 2, 0, 0) - aux

    uniform = change(kind="uniform", amount=0.1)
    assert 0.099 < uniform.abs().max() <= 0.1001 and abs(uniform.mean()) < 1e-3
    gaussian = change(kind="gaussian", amount=0.1, unit="rms").std(0)
    assert_close(gaussian, torch.tensor([0.1, 0.1, 0.1, 8, 8, 8]), rtol=0.05, atol=0)
    dropped = change(kind="dropout", amount=0.25) + aux
    assert abs((dropped == 0).float().mean() - 0.25) < 0.01
    assert_close(dropped.mean(0), aux[0], rtol=0.03, atol=0)
