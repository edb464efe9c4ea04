"""A study end to end on a tiny target: trained, broken off, gone on with, measured, compared."""

import json
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from tiny_run import make_config

from eagle_kit.config.drafts.shared_training import LOSSES
from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.training import FeatureNoise
from eagle_kit.core.process import INTERRUPTED
from eagle_kit.drafts.registry import training_kind
from eagle_kit.models.config import TargetConfig
from eagle_kit.train.__main__ import main as train
from eagle_kit.train.plan.costs import head_flops, make_workload
from recipes import study as study_command
from recipes.cli import main
from recipes.study_config import StudyConfig


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of two arms and two seeds, as a file."""
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = make_config(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"The {noun}"}) for noun in ("cat", "dog")))
    raw = {
        "base": config.name,
        "output_dir": str(tmp_path / "out"),
        "seeds": [0, 3],
        "common": {
            "training.max_steps": 3,
            "training.save_every": 1,
            "validation.every": 0,
            "data.preview": False,
        },
        "arms": {"first": {"about": "as it is"}, "other": {"set": {"training.learning_rate": 1.0e-5}}},
        "measure": {"tasks": [str(prompts)], "shapes": ["2,1,3", "2,2,4"], "limit": 2, "max_tokens": 12},
    }
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file


@pytest.mark.nightly
def test_a_study_is_trained_resumed_measured_and_compared(study, tmp_path, capsys):
    words = ["study", str(study), "--stop-after", "1s"]
    script = f"import sys; from recipes.cli import main; sys.exit(main({words!r}))"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 130
    assert main(["study", str(study), "--jobs", "2"]) == 0
    out = tmp_path / "out"
    result = json.loads((out / "study.json").read_text())
    assert [arm["arm"] for arm in result["arms"]] == ["first", "other"]
    (evaluation,) = out.glob("eval-*")
    evaluated = json.loads((evaluation / "summary.json").read_text())
    for arm in result["arms"]:
        assert arm["tokens_seen"][0] > 0 and arm["tokens_seen"] == result["arms"][0]["tokens_seen"]
        weights = load_file(out / "heads" / f"{arm['arm']}-s0" / "model.safetensors").values()
        assert arm["parameters"] == [sum(each.numel() for each in weights if each.is_floating_point())] * 2
        assert all(0.1 < peak < 8 for peak in arm["peak_memory_gb"])
        for row in arm["figures"]:
            heads = [f"{arm['arm']} s{seed}" for seed in (0, 3)]
            want = [
                next(
                    r["accept_length"]
                    for r in evaluated["rows"]
                    if (r["draft"], r["shape"], r["task"], r["category"])
                    == (head, row["shape"], row["task"], row["category"])
                )
                for head in heads
            ]
            assert row["accept_lengths"] == want
            assert row["mean"] == pytest.approx(sum(want) / 2)
    firsts = [row["mean"] for row in result["arms"][0]["figures"]]
    for row, first in zip(result["arms"][1]["figures"], firsts, strict=True):
        assert row["ratio"] == pytest.approx(row["mean"] / first)
    assert "| first: as it is |" in capsys.readouterr().out
    assert (out / "study.png").read_bytes()[:4] == b"\x89PNG"
    runs = [
        yaml.safe_load((out / "runs" / name / "run.yaml").read_text()) for name in ("first-s3", "other-s3")
    ]
    assert [float(run["config"]["training"]["learning_rate"]) for run in runs][1] == 1.0e-5
    assert all(run["config"]["seed"] == 3 for run in runs)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"training.lerning_rate": 1.0e-3}, "learning_rate"),
        ({"head.kind": "eagle9"}, "head.kind is 'eagle9'"),
        ({"head.kind": "eagle1", "head.draft_vocab_size": 9}, "head.draft_vocab_size has no meaning"),
    ],
)
def test_a_wrong_setting_of_an_arm_is_refused_before_any_run(study, tmp_path, capsys, settings, message):
    raw = yaml.safe_load(study.read_text())
    raw["arms"]["other"]["set"] = settings
    study.write_text(yaml.safe_dump(raw))
    assert main(["study", str(study)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_failing_run_is_named_with_its_reason(study, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")  # which the run refuses before it loads anything
    assert main(["study", str(study)]) == 2
    said = capsys.readouterr().err
    assert "first s0" in said and "--use_megatron_lm" in said


@pytest.mark.nightly
def test_a_run_whose_data_is_missing_is_named_with_its_reason(study, capsys):
    raw = yaml.safe_load(study.read_text())
    raw["arms"]["first"]["set"] = {"data.source": "nowhere.jsonl"}
    study.write_text(yaml.safe_dump(raw))
    assert main(["study", str(study)]) == 2
    said = capsys.readouterr().err
    assert "first s0" in said and "nowhere.jsonl" in said


def test_seeds_go_round_before_arms_repeat(study):
    runs = study_command.plan(load_config(StudyConfig, study), study.parent)
    assert [one.name for one in runs] == ["first s0", "other s0", "first s3", "other s3"]


@pytest.mark.nightly
def test_an_arm_chooses_its_rate_with_the_first_seed_by_validations(study, tmp_path, capsys):
    raw = yaml.safe_load(study.read_text())
    raw["arms"]["other"] = {"choose": {"training.learning_rate": [1.0e-9, 3.0e-3]}}
    study.write_text(yaml.safe_dump(raw))
    assert main(["study", str(study), "--dry-run"]) == 2
    assert "other chooses training.learning_rate by validations" in capsys.readouterr().err
    validation = {"every": 3, "shapes": ["2,1,3"], "prompts": 2, "max_tokens": 12}
    raw["common"] |= {f"validation.{name}": value for name, value in validation.items()}
    study.write_text(yaml.safe_dump(raw))
    config = load_config(StudyConfig, study)
    runs, out = study_command.plan(config, study.parent), tmp_path / "out"
    assert [one.name for one in runs] == ["first s0", "other 1e-09 s0", "other 0.003 s0", "first s3"]
    assert main(["study", str(study)]) == 0
    validated = {one.value: one.validated for one in runs if one.arm == "other"}
    best = max(validated, key=validated.__getitem__)
    assert {path.name for path in (out / "heads").iterdir()} == {
        *("first-s0", "first-s3", "other-1e-09-s0", "other-0.003-s0", f"other-{best}-s3"),
    }
    tried = ", ".join(f"{value} {length:.3f}" for value, length in validated.items())
    assert f"learning_rate {best} (validated: {tried})" in capsys.readouterr().out
    (evaluation,) = out.glob("eval-*")
    drafts = {row["draft"] for row in json.loads((evaluation / "summary.json").read_text())["rows"]}
    assert {name for name in drafts if name and name.startswith("other")} == {
        f"other {best} s{seed}" for seed in (0, 3)
    }

    for (value, length), one in zip(((1.0e-9, 1.2), (3.0e-3, 1.3)), runs[1:3], strict=True):
        rows = [{"step": step, "accept_length": {"2,1,3": found}} for step, found in ((1, length), (3, 1.0))]
        (one.folder / "validation.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
        assert one.value == value
    assert study_command.choose(config, runs)["other"] == {
        "setting": "training.learning_rate",
        "accept_lengths": [(1.0e-9, 1.2), (3.0e-3, 1.3)],
        "best": 3.0e-3,
    }
    shutil.rmtree(runs[1].folder)
    assert main(["study", str(study)]) == 2
    assert "has no validation by which other could be chosen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        ({"training.learning_rate": [1]}, "two or more different"),
        ({"training.learning_rate": [1, None]}, "two or more different"),
        ({"data.source": ["a/b", "c"]}, "which name folders"),
        ({"training.learning_rate": [1, 2], "training.epochs": [1, 2]}, "name one setting"),
        ({"seed": [1, 2]}, "name seeds under seeds"),
        ({"training.max_steps": [1, 2]}, "training.max_steps is set and chosen"),
    ],
)
def test_a_choice_is_of_one_setting_that_is_not_given_elsewhere(study, capsys, choose, message):
    raw = yaml.safe_load(study.read_text())
    raw["arms"]["other"] = {"choose": choose, "set": {"training.max_steps": 3}}
    study.write_text(yaml.safe_dump(raw))
    assert main(["study", str(study), "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_runs_that_would_share_a_folder_are_refused(study, capsys):
    raw = yaml.safe_load(study.read_text())
    raw["common"]["validation.every"] = 3
    raw["arms"] = {"a": {"choose": {"training.epochs": [1, 2]}}, "a-1": {}}
    study.write_text(yaml.safe_dump(raw))
    assert main(["study", str(study), "--dry-run"]) == 2
    assert "The runs of the arms a and a-1 would share" in capsys.readouterr().err


def train_here(one: study_command.StudyRun) -> None:
    """Train a run of a study in this process, and export its head."""
    job = one.job()
    try:
        assert train(job.words[3:]) == 0
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    job.finish()


def test_heads_of_other_settings_are_not_measured(study, tmp_path, capsys):
    raw = yaml.safe_load(study.read_text()) | {"seeds": [0]}
    study.write_text(yaml.safe_dump(raw))
    for one in study_command.plan(load_config(StudyConfig, study), study.parent):
        train_here(one)
        one.check()
        assert one.is_done
    raw["arms"]["other"]["set"] = {"training.learning_rate": 1.0e-4}
    study.write_text(yaml.safe_dump(raw))
    assert main(["study", str(study)]) == 2
    assert "training.learning_rate (1e-05 -> 0.0001)" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out" / "runs")  # the heads know too
    assert main(["study", str(study), "--dry-run"]) == 2
    assert "other-s0 was trained with other settings: training.learning_rate" in capsys.readouterr().err


def put_head(one: study_command.StudyRun, validated: float | None = None, steps: int = 3) -> None:
    """Put a head where a run that has ended leaves it, with the validations of its run."""
    one.head.mkdir(parents=True)
    (one.head / "config.json").write_text("{}")
    about = {"tokens_seen": 100 + one.seed, "seconds": 60.0, "peak_memory_gb": 1.0, "config": {}}
    (one.head / "eagle_kit.json").write_text(json.dumps(about))
    tensors = {"weight": torch.zeros(3, 5), "d2t": torch.zeros(9, dtype=torch.int64)}
    save_file(tensors, one.head / "model.safetensors")
    if validated is not None:
        one.folder.mkdir(parents=True)
        found = [(1, validated), (steps, 1.0)]
        rows = [{"step": step, "accept_length": {"2,1,3": length, "2,2,4": 9.0}} for step, length in found]
        (one.folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("identical", "code"), [(True, 0), (False, 1)])
def test_heads_that_are_there_are_chosen_among_measured_and_compared(
    study, tmp_path, capsys, monkeypatch, identical, code
):
    """The evaluation is made up, and gives the second value of the choice the longer responses."""
    pytest.importorskip("matplotlib")
    raw = yaml.safe_load(study.read_text())
    raw["arms"]["other"] = {"choose": {"training.learning_rate": [1.0e-3, 3.0e-3]}, "about": "tuned"}
    raw["common"] |= {"validation.every": 3, "validation.shapes": ["2,1,3", "2,2,4"]}
    raw["measure"] |= {"batch_size": 4, "max_context": 96, "seed": 5}
    raw["common"] |= {"tracking.wandb": "offline", "tracking.group": "arms"}
    study.write_text(yaml.safe_dump(raw))
    config = load_config(StudyConfig, study)
    for one in study_command.plan(config, study.parent):
        if one.value is None:
            put_head(one)
        else:
            put_head(one, validated=1.0 + 100 * one.value)
    choices = {"other": {"best": 3.0e-3}}
    put_head(study_command.plan(config, study.parent, choices)[-1], validated=1.2)
    # The evaluation.
    asked = []

    def run_eval(target, drafts, config, *, out):
        asked.append((target, drafts, config, out))
        rows = []
        for name, shape, task in product([None, *drafts], ("2,1,3", "2,2,4"), ("all", "prompts")):
            row = {"draft": name, "shape": shape, "task": task, "category": "all"}
            rows.append(row | {"accept_length": 2.0 + len(drafts)})
        settings = {"shapes": list(config.shapes), "tasks": {}, "limit": 2, "max_tokens": 12, "seed": 5}
        about = {"date": "", "command": "", "machine": {}, "versions": {}, "greedy_identical": identical}
        return {**about, "settings": settings, "rows": rows}

    logged = []
    monkeypatch.setattr("eagle_kit.eval.runner.run_eval", run_eval)
    monkeypatch.setattr("eagle_kit.eval.tracking.log_figures", lambda *given: logged.append(given))
    assert main(["study", str(study)]) == code

    # The trackers of the trainings have the evaluation.
    ((project, options, _, figures),) = logged
    assert (project, options["mode"], options["group"]) == ("eagle-kit", "offline", "arms")
    assert options["name"] == "out evaluation"
    assert figures["all/all/plain/2,1,3/accept_length"] == 6.0

    # What was measured.
    ((target, drafts, measured, out),) = asked
    assert target == str(tmp_path / "target") and out.parent == tmp_path / "out"
    assert list(drafts) == ["first s0", "other 0.003 s0", "first s3", "other 0.003 s3"]
    assert drafts["other 0.003 s3"] == tmp_path / "out" / "heads" / "other-0.003-s3"
    assert (measured.engine.max_batch_size, measured.engine.max_context, measured.plots) == (4, 96, False)
    assert measured.shapes == ("2,1,3", "2,2,4")
    assert (measured.limit, measured.max_tokens, measured.seeds) == (2, 12, (5,))

    # The comparison.
    arms = json.loads((tmp_path / "out" / "study.json").read_text())["arms"]
    assert [arm["tokens_seen"] for arm in arms] == [[100, 103]] * 2
    assert [arm["parameters"] for arm in arms] == [[15, 15]] * 2, "a vocabulary map is no parameter"
    assert arms[0]["about"] == "as it is"
    assert arms[1]["about"] == "tuned; learning_rate 0.003 (validated: 0.001 1.100, 0.003 1.300)"
    assert "| other: tuned; learning_rate 0.003" in capsys.readouterr().out


@pytest.fixture
def prepared(study, tmp_path):
    """The same study, one run of it, on responses that a command has to make first."""
    raw = yaml.safe_load(study.read_text())
    responses = tmp_path / "made" / "responses.jsonl"
    command = (
        f"data regenerate --source {tmp_path / 'chats.jsonl'} --target {tmp_path / 'target'} --max-tokens 24"
    )
    raw |= {"seeds": [0], "arms": {"first": {}}, "prepare": {str(responses): command}}
    raw["common"] |= {"data.source": str(responses), "data.eval_conversations": 2, "training.max_steps": 1}
    study.write_text(yaml.safe_dump(raw))
    return study, responses


@pytest.mark.nightly
def test_data_is_made_first_and_once_and_gone_on_with(prepared, tmp_path, capsys):
    study, responses = prepared
    assert main(["study", str(study), "--dry-run"]) == 0
    assert f"{responses}: to be made, eagle-kit data regenerate" in capsys.readouterr().out
    assert not responses.exists()
    assert main(["study", str(study)]) == 0
    run = yaml.safe_load((tmp_path / "out" / "runs" / "first-s0" / "run.yaml").read_text())
    assert run["config"]["data"]["source"] == str(responses)
    whole = responses.read_text()
    assert len(whole.splitlines()) > 10
    capsys.readouterr()

    preparation = study_command.Preparation(responses, _command(study, responses))
    assert preparation.is_done
    preparation.mark.touch()  # as after kill -9
    responses.write_text("".join(whole.splitlines(keepends=True)[:7]))
    assert main(["study", str(study)]) == 0
    assert responses.read_text() == whole and preparation.is_done


def test_shards_are_made_together_and_what_reads_them_afterwards(prepared, tmp_path, monkeypatch):
    study, responses = prepared
    raw = yaml.safe_load(study.read_text())
    command, states = raw["prepare"][str(responses)], str(tmp_path / "made" / "states")
    shards = {str(tmp_path / "made" / f"{i}.jsonl"): f"{command} --shard {i}/2" for i in range(2)}
    raw["prepare"] = {**shards, states: f"data capture {study.parent / raw['base']}"}
    study.write_text(yaml.safe_dump(raw))
    made = []

    def stop_behind_the_states(jobs, at_once, what):
        made.append([job.name for job in jobs])
        if states in made[-1]:
            raise KeyboardInterrupt

    monkeypatch.setattr(study_command, "run_jobs", stop_behind_the_states)
    assert main(["study", str(study), "--jobs", "2"]) == INTERRUPTED
    assert made == [list(shards), [states]]


def test_a_file_that_was_brought_along_is_taken_as_it_is(prepared, capsys):
    study, responses = prepared
    responses.parent.mkdir()
    responses.write_text("mine")
    assert main(["study", str(study), "--dry-run"]) == 0
    assert f"{responses}: taken as it is" in capsys.readouterr().out and responses.read_text() == "mine"


@pytest.mark.parametrize(
    "command",
    [
        "data regenrate --source a",
        "data preview a.yaml",
        "data regenerate --source 'a",
        "data regenerate --source a --out b",
        "data regenerate --sauce a",
        "eagle-kit data regenerate --source a",
    ],
)
def test_what_is_no_command_is_refused_before_anything_is_made(prepared, tmp_path, capsys, command):
    study, responses = prepared
    raw = yaml.safe_load(study.read_text()) | {"prepare": {str(responses): command}}
    study.write_text(yaml.safe_dump(raw))
    assert main(["study", str(study), "--dry-run"]) == 2
    assert f"{responses} cannot be prepared by" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not responses.parent.exists()


def test_a_task_that_is_not_there_is_refused_before_any_run(study, tmp_path, capsys):
    raw = yaml.safe_load(study.read_text())
    raw["measure"]["tasks"] = ["nope"]
    study.write_text(yaml.safe_dump(raw))
    assert main(["study", str(study), "--dry-run"]) == 2
    assert "nope" in capsys.readouterr().err and not (tmp_path / "out").exists()


def _command(study, responses):
    return yaml.safe_load(study.read_text())["prepare"][str(responses)]


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("data capture nowhere.yaml", "nowhere.yaml"),
        ("data capture {base} head.aux_layer_idz=[1]", "aux_layer_idz"),
        ("data regenerate --source a.jsonl --target b --decontaminate human_evall", "human_evall"),
    ],
)
def test_a_command_that_would_fail_after_hours_is_refused_before_anything_is_made(
    prepared, tmp_path, capsys, command, cause
):
    study, responses = prepared
    raw = yaml.safe_load(study.read_text())
    raw["prepare"] |= {str(tmp_path / "later"): command.format(base=study.parent / raw["base"])}
    study.write_text(yaml.safe_dump(raw))
    assert main(["study", str(study)]) == 2
    assert cause in capsys.readouterr().err and not responses.parent.exists()


@pytest.mark.nightly
def test_data_that_cannot_be_made_is_named_with_its_reason(prepared, tmp_path, capsys):
    study, responses = prepared
    raw = yaml.safe_load(study.read_text())
    raw["prepare"] = {
        str(responses): f"data regenerate --source nowhere.jsonl --target {tmp_path / 'target'}"
    }
    study.write_text(yaml.safe_dump(raw))
    assert main(["study", str(study)]) == 2
    said = capsys.readouterr().err
    assert str(responses) in said and "nowhere.jsonl" in said
    assert not (tmp_path / "out" / "runs").exists()


STUDIES = Path(__file__).parents[2] / "recipes" / "studies"


def test_every_loss_noise_average_and_curriculum_is_an_arm_of_a_shipped_study(monkeypatch, tmp_path):
    """So that none of them is a default, or left out of it, by opinion."""
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path))
    found = []
    for name in ("smollm2-135m.yaml", "smollm2-135m-losses.yaml", "smollm2-135m-curricula.yaml"):
        study = load_config(StudyConfig, STUDIES / name)
        assert len(study.seeds) >= 2
        runs = study_command.plan(study, STUDIES)
        found += [run.resolved for run in runs]
    training = [config.training for config in found]
    single = {next(iter(one.losses)) for one in training if len(one.losses) == 1}
    assert single == set(LOSSES) - {"kl"}, "kl has the gradient of ce"
    assert any(len(one.losses) > 1 for one in training)
    kinds = {one.feature_noise.kind for one in training if one.feature_noise}
    assert kinds == set(get_args(FeatureNoise.model_fields["kind"].annotation))
    for name in ("dpace_alpha", "ema_decay", "ttt_curriculum"):
        assert {getattr(one, name) is None for one in training} == {True, False}, name
    assert {one.optimizer for one in training} == {"adamw", "muon"}
    phases = {tuple(source.phase for source in config.data.mix) for config in found}
    assert {(), ((0.0, 1.0), (0.0, 1.0)), ((0.0, 0.6), (0.6, 1.0))} <= phases


def target_of(**sizes) -> TargetConfig:
    """A target of these sizes, as far as a head's arithmetic depends on it."""
    same = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e5, "rope_scaling": None}
    return TargetConfig(**same, max_position_embeddings=8192, tie_word_embeddings=True, **sizes)


SMOLLM2 = target_of(
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
)
DEEPSEEK = target_of(
    hidden_size=256,
    num_layers=8,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=768,
    vocab_size=4096,
)


ROWS = {  # means of the packed sequences
    "smollm2-135m": (SMOLLM2, {"tokens": 1000, "supervised": 750, "conversations": 1.3, "mean_context": 300}),
    "deepseek-15m": (DEEPSEEK, {"tokens": 468, "supervised": 349, "conversations": 2.3, "mean_context": 100}),
}


@pytest.mark.parametrize("name", ROWS)
def test_kinds_that_draft_in_one_pass_are_compared_with_eagle_3_at_three_rates_each(
    name, monkeypatch, tmp_path
):
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path))
    study = load_config(StudyConfig, STUDIES / f"{name}-kinds.yaml")
    runs = study_command.plan(study, STUDIES)
    files = [study_command.Preparation(Path(path), command) for path, command in study.prepare.items()]
    study_command.check(study, files, runs)
    rates = [len(arm.choose.get("training.learning_rate", ())) for arm in study.arms.values()]
    assert rates == [3] * 5
    kinds = {run.resolved.head.kind for run in runs}
    assert kinds == {"eagle3", "p-eagle", "dflash", "dspark"}


@pytest.mark.parametrize("name", ROWS)
def test_kinds_are_compared_at_equal_arithmetic(name):
    study = load_config(StudyConfig, STUDIES / f"{name}-kinds.yaml")
    target, rows = ROWS[name]
    costs = {}
    for run in study_command.plan(study, STUDIES):
        config = run.resolved
        draft = training_kind(config).new_config(config.head, target)
        work = make_workload(config, **rows)
        costs[run.arm] = config.training.max_steps * head_flops(draft, work)
    assert max(costs.values()) < 1.15 * min(costs.values()), costs


def test_eagle_1_and_eagle_3_are_compared_with_one_recipe_and_the_same_tokens(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path))
    study = load_config(StudyConfig, STUDIES / "smollm2-135m-methods.yaml")
    runs = study_command.plan(study, STUDIES)
    files = [study_command.Preparation(Path(path), command) for path, command in study.prepare.items()]
    study_command.check(study, files, runs)
    configs = {run.arm: run.resolved for run in runs}
    kinds = {name: config.head.kind for name, config in configs.items()}
    assert kinds == {
        "eagle-1": "eagle1",
        "eagle-3": "eagle3",
        "eagle-1-twice": "eagle1",
        "eagle-3-twice": "eagle3",
    }

    for size in ("", "-twice"):
        first = configs[f"eagle-1{size}"]
        third = configs[f"eagle-3{size}"]
        assert first.data == third.data and first.seed == third.seed
        assert first.training.regression and first.training.feature_noise, "EAGLE-1's own loss and noise"

        # Of the training, what belongs to a kind differs, and nothing else.
        own = {"ttt_length", "step_decay", "down_sample_ratio", "regression", "feature_noise"}
        first_training = first.training.model_dump(exclude=own)
        third_training = third.training.model_dump(exclude=own)
        common = first_training.keys() & third_training.keys()
        differing = {name for name in common if first_training[name] != third_training[name]}
        assert not differing

    # The other size has twice the data and is read as often.
    for name in ("eagle-1", "eagle-3"):
        once = configs[name]
        twice = configs[f"{name}-twice"]
        assert twice.head == once.head
        assert twice.training == once.training.model_copy(update={"max_steps": 2 * once.training.max_steps})
        assert twice.data.source != once.data.source and twice.data.store != once.data.store
    limits = {}
    for file in files:
        if "--limit" in file.words:
            limits[str(file.path)] = int(file.words[file.words.index("--limit") + 1])
    for name in ("chats", "code"):
        assert limits[f"runs/methods-{name}-twice.jsonl"] == 2 * limits[f"runs/methods-{name}.jsonl"]


@pytest.mark.nightly
def test_losses_averages_and_curricula_are_compared_over_two_seeds(study, tmp_path, capsys):
    raw = yaml.safe_load(study.read_text())
    chats = str(tmp_path / "chats.jsonl")
    mix = [{"source": chats, "phase": [0, 0.7]}, {"source": chats, "name": "own", "phase": [0.6, 1]}]
    raw["arms"] = {
        "ce": {},
        "mix": {"set": {"training.loss": {"ce": 0.1, "tv": 0.9}, "training.ema_decay": 0.9}},
        "dpace": {"set": {"training.dpace_alpha": 0.5, "training.ttt_curriculum": {"share": 0.5}}},
        "order": {"set": {"data.source": None, "data.mix": mix}, "about": "one source after the other"},
    }
    study.write_text(yaml.safe_dump(raw))
    assert main(["study", str(study), "--jobs", "2"]) == 0
    result = json.loads((tmp_path / "out" / "study.json").read_text())
    assert {arm["arm"] for arm in result["arms"]} == set(raw["arms"])
    for arm in result["arms"]:
        assert len(arm["tokens_seen"]) == 2 and all(arm["tokens_seen"])
        assert all(len(row["accept_lengths"]) == 2 and row["mean"] >= 1 for row in arm["figures"])
    losses = {}
    for name in raw["arms"]:
        path = tmp_path / "out" / "runs" / f"{name}-s0" / "metrics.jsonl"
        losses[name] = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    assert len({tuple(values) for values in losses.values()}) == 4
    assert "| order: one source after the other |" in capsys.readouterr().out
