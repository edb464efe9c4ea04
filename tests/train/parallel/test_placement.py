"""The target elsewhere than the head: spread over devices, sharded, or refused by name."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import family_config
from tiny_mixtures import randomised, v3
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.sharded import load_spread
from eagle_kit.train.parallel.placement import (
    layer_devices,
    load_placed,
    loading_device,
    output_layer,
    visible_devices,
)


def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys).tril()
    return torch.einsum("hqk,khd->qhd", scores, values)


def test_states_go_where_the_next_layer_is_and_come_home(tmp_path: Path) -> None:
    """The device without memory stands for a second one: mixing the two raises."""
    cpu, meta = torch.device("cpu"), torch.device("meta")
    target = load_spread(make_target(tmp_path / "target"), torch.float32, [cpu, meta], layer_devices)
    where = [next(layer.parameters()).device for layer in target.layers]
    assert where == [cpu, cpu, meta, meta] and target.norm.weight.device == cpu
    seen: list[torch.device] = []

    def watched(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append(q.device)
        return attend(layer, q, k, v)

    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):  # on its way home
        target(torch.arange(5), torch.arange(5), watched, (1, 3))
    assert seen == [cpu, cpu, meta, meta]


def test_layers_that_are_placed_give_the_same_states(tmp_path: Path) -> None:
    target, placed = (load_target(make_target(tmp_path / "target")) for _ in range(2))
    placed.place_layers([torch.device("cpu")] * 5)
    ids = torch.arange(7)
    whole, apart = (model(ids, ids, attend, (1, 3)) for model in (target, placed))
    assert torch.equal(whole.hidden, apart.hidden) and torch.equal(
        whole.aux_hidden_states, apart.aux_hidden_states
    )


def test_every_process_of_a_machine_spreads_over_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    def mine(local: int, processes: int) -> list[int]:
        accelerator: Any = SimpleNamespace(
            device=torch.device("cuda", local), local_process_index=local, num_processes=processes
        )
        return [device.index for device in visible_devices(accelerator)]

    assert mine(0, 1) == list(range(8))
    assert mine(1, 2) == [1, 3, 5, 7]
    assert [mine(i, 8) for i in range(8)] == [[i] for i in range(8)]


def test_a_gpu_that_is_not_there_is_refused() -> None:
    accelerator: Any = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(UserError, match=r"cuda:99, but there are \d+ CUDA devices"):
        loading_device("cuda:99", accelerator)


def test_validating_with_a_target_on_several_devices_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_kit.train.parallel import placement

    monkeypatch.setattr(placement, "visible_devices", lambda _: [torch.device("cpu"), torch.device("meta")])
    accelerator: Any = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    folder = make_target(tmp_path / "target")
    with pytest.raises(UserError, match="spreads the target over 2 devices"):
        load_placed(folder, "auto", accelerator, torch.float32, validates=True)
    load_placed(folder, "auto", accelerator, torch.float32)


@pytest.mark.parametrize("kind", ["tied", "experts", "hybrid"])
def test_a_target_that_is_loaded_layer_by_layer_is_the_same(kind: str, tmp_path: Path) -> None:
    if kind == "tied":
        make_target(tmp_path)
    else:
        config = v3() if kind == "experts" else family_config("qwen3_next")
        randomised(config).save_pretrained(tmp_path)
    accelerator: Any = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    placed = load_placed(tmp_path, "auto", accelerator, torch.bfloat16)
    whole = load_target(tmp_path, dtype=torch.bfloat16)
    assert (placed.lm_head.weight is placed.embed_tokens.weight) == (kind == "tied")
    weights = dict(placed.named_parameters())
    expected = dict(whole.named_parameters())
    assert weights.keys() == expected.keys() and not any(each.requires_grad for each in weights.values())
    for name, weight in expected.items():
        assert weights[name].dtype == weight.dtype and weights[name].equal(weight), name
    assert placed.rope.inv_freq.equal(whole.rope.inv_freq)


def test_a_target_of_transformers_own_layers_cannot_be_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_kit.train.parallel import placement

    randomised(family_config("gpt_neox")).save_pretrained(tmp_path)
    accelerator: Any = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    load_placed(tmp_path, "auto", accelerator, torch.float32)
    monkeypatch.setattr(placement, "visible_devices", lambda _: [torch.device("cpu"), torch.device("meta")])
    with pytest.raises(UserError, match="cannot be spread over devices"):
        load_placed(tmp_path, "auto", accelerator, torch.float32)


def test_sharing_the_target_is_refused_where_it_cannot_be(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    for placement in ("fsdp", "tensor-parallel"):
        assert run("--max-steps", "1", f"training.target_placement={placement}") == 2
        assert f"is {placement}, but there is one process" in capsys.readouterr().err
    assert run("--max-steps", "1", "training.target_placement=gpu") == 2
    assert "target_placement" in capsys.readouterr().err
    assert not run.output.exists()


def test_a_target_on_the_cpu_and_checkpointed_steps_train_and_validate_the_same_head(
    make_run: Callable,
) -> None:
    run = make_run(validation={"every": 2, "max_tokens": 4})
    assert run("--max-steps", "2") == 0
    elsewhere = ("training.target_placement=cpu", "training.gradient_checkpointing=steps")
    assert run("--max-steps", "2", f"output_dir={run.folder / 'other'}", *elsewhere) == 0
    ours, theirs = run.metrics("other"), run.metrics()
    assert ours[0]["loss"] == theirs[0]["loss"]
    assert ours[1]["loss"] == pytest.approx(theirs[1]["loss"], rel=1e-5)
    assert (run.folder / "other" / "best").exists()


def test_an_output_layer_that_is_there_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process on a GPU is told ``cuda``, and its tensors say ``cuda:0``."""
    target = load_target(make_target(tmp_path / "target"))
    assert output_layer(target, torch.device("cpu")) is target.lm_head
    target.to("meta")
    monkeypatch.setattr(torch, "empty", lambda *_, device: SimpleNamespace(device=torch.device("meta")))
    assert output_layer(target, torch.device("meta", 0)) is target.lm_head
