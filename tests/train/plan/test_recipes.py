"""Whole runs of every loss and recipe: they learn, resume to the bit and are refused where they must be."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.files.draft import load_draft

STUDIES = Path(__file__).parents[3] / "recipes" / "studies"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_draft(folder).state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_kl_trains_as_cross_entropy_does(make_run: Callable) -> None:
    run = make_run()
    assert run("--max-steps", "3") == 0
    assert run("--max-steps", "3", "training.loss=kl", f"output_dir={run.folder / 'kl'}") == 0
    assert same(weights(run.output / "step-3"), weights(run.folder / "kl" / "step-3"))
    for ce, kl in zip(run.metrics(), run.metrics("kl"), strict=True):
        assert 0 < kl["loss"] < ce["loss"]


RECIPES = {
    "muon, average, noise, curriculum": {
        "optimizer": "muon",
        "ema_decay": 0.9,
        "feature_noise": {"kind": "uniform", "amount": 0.2, "unit": "rms"},
        "ttt_curriculum": {"start": 1, "share": 0.03},
        "loss": "lk-hybrid",
        "schedule": "wsd",
    },
    "published": {
        "loss_rows": "published",
        "loss_normalisation": "published",
        "schedule": "linear",
        "warmup": "log",
        "min_learning_rate_ratio": 0.0,
    },
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_halves_equal_the_whole_to_the_bit(make_run: Callable, recipe: str) -> None:
    run = make_run(training=RECIPES[recipe], validation={"every": 5, "max_tokens": 6})
    halves = run.folder / "halves"
    assert run("--max-steps", "14") == 0
    assert run("--max-steps", "7", f"output_dir={halves}") == 0
    assert run("--resume", "--max-steps", "14", f"output_dir={halves}") == 0
    assert run.metrics("halves") == run.metrics()
    assert same(weights(halves / "step-14"), weights(run.output / "step-14"))
    if "ttt_curriculum" in RECIPES[recipe]:
        lengths = [len(row["loss_per_step"]) for row in run.metrics()]
        assert lengths[0] == 1 and lengths[-1] == 3 and lengths == sorted(lengths) and 2 in lengths
        raw = [torch.load(f / "step-14" / "trainer" / "weights.pt") for f in (halves, run.output)]
        assert same(*raw)


def test_what_is_saved_and_validated_is_the_average(make_run: Callable) -> None:
    run = make_run(
        training={"ema_decay": 0.5, "save_every": 1, "keep_last": 99},
        validation={"every": 6, "max_tokens": 6},
    )
    assert run("--max-steps", "6") == 0

    def raw(step: int) -> dict[str, torch.Tensor]:
        return torch.load(run.output / f"step-{step}" / "trainer" / "weights.pt")

    average = weights(run.output / "step-1")
    for step in range(2, 7):
        decay = min(0.5, step / (9 + step))
        now = raw(step)
        for name, tensor in now.items():
            average[name] = decay * average[name] + (1 - decay) * tensor
    saved, best = weights(run.output / "step-6"), weights(run.output / "best")
    for name, tensor in raw(6).items():
        torch.testing.assert_close(saved[name], average[name], rtol=1e-5, atol=1e-6)
        assert not torch.equal(saved[name], tensor) and torch.equal(best[name], saved[name])


def test_an_average_does_not_change_what_is_trained(make_run: Callable) -> None:
    run = make_run(validation={"every": 2, "max_tokens": 6})
    assert run("--max-steps", "5") == 0
    averaged = run.folder / "averaged"
    assert run("--max-steps", "5", "training.ema_decay=0.9", f"output_dir={averaged}") == 0
    assert run.metrics("averaged") == run.metrics()
    raw = torch.load(averaged / "step-5" / "trainer" / "weights.pt")
    plain = weights(run.output / "step-5")
    assert all(torch.equal(plain[name], tensor) for name, tensor in raw.items())


def test_damaged_weights_beside_the_average_are_refused(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(training={"ema_decay": 0.9})
    assert run("--max-steps", "2") == 0
    path = run.output / "step-2" / "trainer" / "weights.pt"
    for damaged in (path.read_bytes()[:100], b""):
        path.write_bytes(damaged)
        assert run("--resume") == 2
        assert f"Delete {run.output / 'step-2'}" in capsys.readouterr().err
    path.unlink()
    assert run("--resume") == 2


def test_a_run_of_before_these_settings_goes_on(copy_run: Callable) -> None:
    run = copy_run("two steps")
    path = run.output / "run.yaml"
    about = yaml.safe_load(path.read_text())
    for name in ("loss", "lk_eta", "loss_rows", "optimizer", "ema_decay", "schedule", "feature_noise"):
        del about["config"]["training"][name]
    path.write_text(yaml.safe_dump(about))
    assert run("--resume", "--max-steps", "3") == 0
    assert len(run.metrics()) == 3


def test_a_resumed_run_keeps_its_recipe(copy_run: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_run("two steps")
    for change in ("loss=tv", "optimizer=muon", "ema_decay=0.9", "loss_rows=published", "schedule=linear"):
        assert run("--resume", f"training.{change}") == 2
        assert f"training.{change.partition('=')[0]}" in capsys.readouterr().err


def test_published_normalisation_divides_by_all_tokens_of_a_conversation(make_run: Callable) -> None:
    """One conversation a row and a step: the loss is the sum over rows and steps, divided by its tokens."""
    run = make_run(
        training={"loss_normalisation": "published", "loss_rows": "published", "sequences_per_step": 1}
    )
    chats = [json.loads(line) for line in (run.folder / "chats.jsonl").read_text().splitlines()]
    long = [c for c in chats if len(c["messages"]) == 4]  # two of them do not fit into a row
    (run.folder / "chats.jsonl").write_text("".join(json.dumps(c) + "\n" for c in long))
    shutil.rmtree(run.folder / "cache", ignore_errors=True)
    assert run("--max-steps", "1", "data.max_length=250") == 0
    row = run.metrics()[0]
    counts = [row["supervised_tokens"]] * 3  # k rows more before a response, k less in it
    steps = zip((1, 0.8, 0.64), row["loss_per_step"], row["learned_per_step"], counts, strict=True)
    total = sum(w * loss * share * n for w, loss, share, n in steps)
    assert row["loss"] == pytest.approx(total / row["tokens"], rel=1e-4)


def test_the_published_recipe_is_a_config() -> None:
    config = load_config(TrainConfig, STUDIES / "smollm2-135m-eagle3-published.yaml")
    training = config.training
    assert (training.loss, training.loss_rows, training.loss_normalisation) == (
        "ce",
        "published",
        "published",
    )
    assert (training.schedule, training.warmup, training.min_learning_rate_ratio) == ("linear", "log", 0.0)
    assert training.weights == pytest.approx([0.8**k for k in range(7)])
    assert (training.learning_rate, training.betas, training.clip_norm) == (5e-5, (0.9, 0.95), 0.5)
    assert config.head.lm_head_init == "random" and not config.head.fc_norm


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.lk_eta=2.0", "lk_eta"),
        ("training.muon_momentum=0.9", "muon_momentum"),
        ("training.decay_ratio=0.5", "decay_ratio"),
        ("training.loss=mse", "loss"),
        ("training.ttt_curriculum.start=9", "ttt_length"),
        (
            "training={ttt_length: 2, step_weights: [0, 1], ttt_curriculum: {start: 1}}",
            "step_weights are zero",
        ),
        ("training.feature_noise={kind: dropout, amount: 1.0}", "dropout"),
        ("training.feature_noise={kind: uniform, amount: 0.1, units: rms}", "unit"),
        ("training.ema_decay=1.0", "ema_decay"),
        ("training={warmup_steps: 9, warmup_ratio: 0.1}", "warmup_ratio is 0.1, but warmup_steps is set too"),
        ("training={ttt_length: 2, step_weights: [1, 1], step_decay: 0.5}", "step_decay is 0.5"),
        ("validation={every: 0, patience: 3}", "patience is 3, but nothing is validated"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path: Path, override: str, named: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("target: t\noutput_dir: o\ndata: {source: chats.jsonl}\n")
    with pytest.raises(UserError, match=named):
        load_config(TrainConfig, path, [override])


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.warmup_steps=null", "training.warmup_ratio=0.1"],
        ["training.schedule=constant"],
        ["training.epochs=3"],
        ["validation.every=0"],
        ["training.ttt_length=2", "training.step_weights=[1, 1]"],
    ],
)
def test_a_file_with_everything_set_can_be_overridden(tmp_path: Path, overrides: list[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "target: t\noutput_dir: o\ndata: {source: chats.jsonl}\nvalidation: {every: 9, prompts: 5}\n"
        "training: {warmup_steps: 9, min_learning_rate_ratio: 0.03, epochs: 2, max_steps: 99, "
        "step_decay: 0.8}\n"
    )
    config = load_config(TrainConfig, path, overrides).model_dump()
    for override in overrides:
        name, _, text = override.partition("=")
        section, _, key = name.partition(".")
        value = config[section][key]
        assert (list(value) if isinstance(value, tuple) else value) == yaml.safe_load(text)


def test_noise_on_states_that_a_head_does_not_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("target: t\noutput_dir: o\ndata: {source: chats.jsonl}\nhead: {kind: mtp}\n")
    noise = "training.feature_noise={kind: uniform, amount: 0.1}"
    with pytest.raises(UserError, match="feature_noise has no meaning for a head of the kind mtp"):
        load_config(TrainConfig, path, [noise])
