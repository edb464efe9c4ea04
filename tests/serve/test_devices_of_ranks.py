"""Devices of ranks: those of a list, those of their numbers, or the only one that a launcher shows."""

from types import SimpleNamespace

import pytest
import torch

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.serve import ranks as ranks_room
from eagle_kit.serve.llm import LLM
from eagle_kit.serve.options import devices_of
from eagle_kit.serve.ranks import join_ranks
from tests.serve.test_tensor_parallel import folder

__all__ = ["folder"]  # the fixture

WRONG_DEVICES = {
    ("cpu,cpu,cpu", 2): "3 devices were given for 2 ranks",
    ("cpu,cpu", 1): "2 devices were given for 1 rank",
    ("cpu,tpu", 2): "device 'tpu' is not known",
    ("cuda:x", 1): "device 'cuda:x' is not known",
    ("cuda:4", 1): "device cuda:4 was asked for, and there are 3 CUDA devices",
    ("cuda:0,cuda:3", 2): "device cuda:3 was asked for, and there are 3 CUDA devices",
    ("cuda:0", 2): "two of 2 ranks would share a GPU",
    ("cuda:1,cuda:1", 2): "two of 2 ranks would share a GPU",
    ("cuda,cuda:1", 2): "two of 2 ranks would share a GPU",
    ("cpu,cuda:1", 2): "are of several types",
    ("cuda", 4): "4 ranks need a device each, and there are 3 CUDA devices",
}


def test_devices_are_checked_by_name_before_ranks_start(folder, monkeypatch):
    with pytest.raises(UserError, match="2 devices were given for 1 rank"):
        LLM(folder, device="cpu,cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for (name, count), error in WRONG_DEVICES.items():
        with pytest.raises(UserError, match=error):
            devices_of(name, count)
    given = {"cuda": ("cuda:0", "cuda:1"), "cuda:2,cuda:0": ("cuda:2", "cuda:0"), "cpu": ("cpu", "cpu")}
    assert all(devices_of(name, 2) == list(map(torch.device, wanted)) for name, wanted in given.items())
    assert devices_of("cuda", 1) == [torch.device("cuda")]


@pytest.mark.parametrize("gpus", ["ab", "aa"])
def test_a_process_that_is_shown_one_gpu_has_that(folder, monkeypatch, gpus):
    """As by Slurm with a GPU for each task; where there is but one, it is not for two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=gpus[1]))
    others = SimpleNamespace(size=2, all=lambda mine: [gpus[0], mine], is_first=False)
    monkeypatch.setattr(ranks_room, "connect", lambda rank, size, device, timeout_s: others)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    config = EngineConfig(tensor_parallel=2, device="cuda")
    if gpus == "aa":
        with pytest.raises(UserError, match="2 ranks need a device each, and two of them see the same one"):
            join_ranks(folder, None, config)
        return
    assert join_ranks(folder, None, config).ranks is others
    assert join_ranks(folder, None, config.replace(device="auto")).ranks is others
    assert taken == [torch.device("cuda", 0)] * 2
    with pytest.raises(UserError, match="two of 2 ranks would share a GPU"):
        join_ranks(folder, None, config.replace(device="cuda:0"))
