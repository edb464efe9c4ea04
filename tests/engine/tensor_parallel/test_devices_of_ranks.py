"""Devices of ranks: those of a list, those of their numbers, or the only one that a launcher shows."""

from types import SimpleNamespace

import pytest
import torch

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.options import devices_of
from eagle_kit.engine.tensor_parallel import ranks as ranks_module
from eagle_kit.engine.tensor_parallel.ranks import join_ranks
from tests.engine.tensor_parallel.test_tensor_parallel import folder

__all__ = ["folder"]  # the fixture

WRONG_DEVICES = {
    ("cpu,cpu,cpu", 2): "3 devices were given for 2 ranks",
    ("cpu,cpu", 3): "2 devices were given for 3 ranks",
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


@pytest.fixture
def launch(monkeypatch):
    """Look as rank 1 of 2 on a machine that shows ``num_gpus``, with the GPUs ``gpus`` of the ranks; returns
    what it is: the devices taken, and how often UUIDs were gathered and the group was left."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def launch(num_gpus, gpus, **environ):
        seen = SimpleNamespace(taken=[], gathered=[], num_left=0, timeouts=[])

        class Others:
            size, is_first = 2, False

            def all(self, mine):
                seen.gathered.append(mine)
                return [gpus[0], mine]

            def close(self):
                seen.num_left += 1

        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "set_device", seen.taken.append)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=gpus[1]))

        def connect(rank, size, device, timeout_s, start_timeout):
            seen.timeouts += [timeout_s, start_timeout.total_seconds()]
            return Others()

        monkeypatch.setattr(ranks_module, "connect", connect)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return seen

    return launch


def test_a_process_that_is_shown_one_gpu_has_that(folder, launch):
    """As by a launcher with a GPU for each task; on a machine that shows two, it has that of its number. Both
    make the same collectives, as they may be ranks of one model."""
    config = EngineConfig(tensor_parallel=2, device="cuda")
    for each in (config, config.replace(device="auto")):
        seen = launch(1, "ab")
        join_ranks(folder, None, each)
        assert (seen.taken, seen.gathered) == ([torch.device("cuda", 0)], ["b"])
    with pytest.raises(UserError, match="two of 2 ranks would share a GPU"):
        join_ranks(folder, None, config.replace(device="cuda:0"))
    seen = launch(2, "ab", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    join_ranks(folder, None, config)
    assert (len(seen.taken), seen.gathered, seen.num_left) == (1, ["b"], 0)


def test_a_group_waits_for_its_ranks_as_long_as_was_asked_for(folder, launch):
    seen = launch(2, "ab")
    times = {"rank_timeout_s": 7.0, "load_timeout_s": 9.0}
    join_ranks(folder, None, EngineConfig(tensor_parallel=2, device="cuda", **times))
    assert seen.timeouts == [7.0, 9.0]


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_gpu_that_two_ranks_were_given_is_named_and_the_group_left(folder, launch, num_gpus):
    seen = launch(num_gpus, "aa")
    with pytest.raises(UserError, match=r"Two of 2 ranks were given the same GPU \(a\)\.") as error:
        join_ranks(folder, None, EngineConfig(tensor_parallel=2, device="cuda"))
    assert "CUDA_VISIBLE_DEVICES, or set LOCAL_RANK" in error.value.remedy and seen.num_left == 1
