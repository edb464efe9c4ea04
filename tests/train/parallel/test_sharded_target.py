"""A target that processes share by FSDP2: each reads the rows of its shards, and all run it together."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from families import family_config
from fork_server import FORK_SERVER
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from tiny_mixtures import randomised, v3
from tiny_run import make_target
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from eagle_kit.models.loading import sharded
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.fp8 import E4M3, MAX
from eagle_kit.train.parallel.placement import load_placed

LAYERS = (1, 2)
BIG = {
    "vocab_size": 300,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""71 MB of matrices in fp32, much more than what a process needs besides."""


class Found(NamedTuple):
    """What a process has of a sharded target.

    Attributes:
        hidden, aux: of a forward.
        state: whole weights of the last layer.
        held: bytes of its shards.
        read: bytes of matrices that it read from the files.
        private: bytes of memory of its own that loading took.
    """

    hidden: torch.Tensor
    aux: torch.Tensor
    state: dict[str, torch.Tensor]
    held: int
    read: int
    private: int


def private_bytes() -> int:
    """Bytes of this process that are no pages of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


@torch.no_grad()
def forward(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(29) + 3
    starts = torch.zeros(29, dtype=torch.int32)
    out = target(ids, torch.arange(29), target.packed([(0, 29)], starts), LAYERS)
    return out.hidden, out.aux_hidden_states


def of_a_process(ranks: Any, folder: Path, dtype: torch.dtype) -> Found:
    """Load a sharded target and run it."""
    process: Any = SimpleNamespace(
        process_index=ranks.rank, is_local_main_process=ranks.rank == 0, device=torch.device("cpu")
    )
    num_read = 0
    take_rows = sharded.take_rows

    def counted(tensors: Any, name: str, rows: range, *others: Any) -> torch.Tensor:
        nonlocal num_read
        tensor = tensors[name]
        if tensor.ndim > 1 and "layers" in name:
            num_read += tensor[: len(rows)].nbytes
        return take_rows(tensors, name, rows, *others)

    importlib.import_module("torch.distributed.fsdp")  # its own memory is not counted
    sharded.take_rows = counted
    before = private_bytes()
    target = load_placed(folder, "fsdp", process, dtype)
    private = private_bytes() - before
    sharded.take_rows = take_rows

    shards = [weight for weight in target.layers.parameters() if isinstance(weight, DTensor)]
    assert shards and all(weight.ndim > 1 and not weight.requires_grad for weight in shards)
    held = sum(weight.to_local().nbytes for weight in shards)
    hidden, aux = forward(target)
    return Found(hidden, aux, target.layer_state(-1), held, num_read, private)


def matrix_bytes(target: Target) -> int:
    return sum(weight.nbytes for weight in target.layers.parameters() if weight.ndim > 1)


def make_fp8(folder: Path, *, by_blocks: bool) -> None:
    """A Llama in fp8, with scales of blocks of 16 by 16, or of outputs."""
    make_target(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name]
        if by_blocks:
            blocks = weight.unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
            scales = blocks.abs().amax((1, 3)) / MAX
            each = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
            tensors[f"{name}_scale_inv"] = scales
        else:
            each = weight.abs().amax(1, keepdim=True) / MAX
            tensors[f"{name}_scale"] = each
        tensors[name] = (weight / each).to(E4M3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    method: dict[str, Any] = {"quant_method": "fbgemm_fp8"}
    if by_blocks:
        method = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method}))


def make_hybrid(folder: Path) -> None:
    """Layers whose published tensors are taken apart."""
    config = family_config("qwen3_next")
    config.vocab_size = 271
    randomised(config).save_pretrained(folder)


def make_experts(folder: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(v3()).save_pretrained(folder)


def make_bridged(folder: Path) -> None:
    randomised(family_config("gpt_neox")).save_pretrained(folder)


def make_big(folder: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**BIG)).save_pretrained(folder)


TARGETS: dict[str, Callable[[Path], Any]] = {
    "tied": make_target,
    "experts": make_experts,
    "hybrid": make_hybrid,
    "blocks of fp8": lambda folder: make_fp8(folder, by_blocks=True),
    "outputs in fp8": lambda folder: make_fp8(folder, by_blocks=False),
    "of transformers": make_bridged,
}


def dtype_of(kind: str) -> torch.dtype:
    """The hybrid has parameters that stay fp32 in any dtype."""
    return torch.bfloat16 if kind == "hybrid" else torch.float32


def of_all_kinds(ranks: Any, folder: Path) -> dict[str, Found]:
    """:func:`of_a_process` for each of :data:`TARGETS`."""
    return {kind: of_a_process(ranks, folder / kind, dtype_of(kind)) for kind in TARGETS}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_processes_run_their_shards_as_one_runs_the_whole(size: int, tmp_path: Path) -> None:
    for kind, make in TARGETS.items():
        make(tmp_path / kind)
    processes = run_ranks(size, of_all_kinds, tmp_path, processes=FORK_SERVER)
    for kind in TARGETS:
        whole = load_target(tmp_path / kind, dtype=dtype_of(kind))
        hidden, aux = forward(whole)
        expected = whole.layer_state(-1)
        for found in (process[kind] for process in processes):
            assert found.hidden.equal(hidden) and found.aux.equal(aux), kind
            assert found.state.keys() == expected.keys()
            assert all(found.state[name].equal(expected[name]) for name in expected), kind


@pytest.mark.parametrize("size", [2, 4])
def test_a_process_reads_and_keeps_its_part_alone(size: int, tmp_path: Path) -> None:
    """Every row is read by one process, and no process has the other rows in memory of its own."""
    make_big(tmp_path)
    whole = load_target(tmp_path)
    hidden, _ = forward(whole)
    total = matrix_bytes(whole)
    processes = run_ranks(size, of_a_process, tmp_path, torch.float32, processes=FORK_SERVER)
    assert sum(found.read for found in processes) == total
    for found in processes:
        assert found.hidden.equal(hidden)
        assert found.read == found.held == total / size
        assert found.private < total / size + 4e6
