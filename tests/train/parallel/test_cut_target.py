"""A target that processes share by tensor parallelism: each has a part, and the states of its own rows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import family_config
from rank_processes import run_ranks
from tiny import tiny_head
from tiny_mixtures import randomised, v3
from tiny_run import make_target
from transformers import AutoModelForCausalLM

from eagle_kit.config.train import ValidationConfig
from eagle_kit.models.loading.loader import load_target
from eagle_kit.objective.target_features import TargetFeatures, capture_features
from eagle_kit.ops.attention.packed import document_spans
from eagle_kit.train.parallel.placement import between_whole_ends, load_cut
from eagle_kit.train.run.state_source import state_source
from eagle_kit.train.run.validation import Validator

LAYERS = (1, 2, 3)
LENGTHS = ((37, 1, 20), (11, 50), (64,), (5, 5, 5, 5))
"""Of the documents in the packed sequence of each process."""


def row(rank: int) -> Any:
    """What a source reads of a packed sequence."""
    generator = torch.Generator().manual_seed(rank)
    lengths = LENGTHS[rank]
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    doc_start = starts.repeat_interleave(torch.tensor(lengths))
    ids = torch.randint(270, (sum(lengths),), generator=generator)
    taught = torch.arange(1, sum(lengths), 2)
    plan = SimpleNamespace(teacher_positions=taught, spans=document_spans(doc_start))
    return SimpleNamespace(ids=ids, doc_start=doc_start, plan=plan)


def capture_cut(ranks: Any, folder: Path) -> tuple[TargetFeatures, int]:
    """States of this process's row, and bytes of the layers that it holds."""
    process: Any = SimpleNamespace(
        process_index=ranks.rank, num_processes=ranks.size, device=torch.device("cpu")
    )
    cut = load_cut(folder, process, torch.float32, "")
    target = between_whole_ends(cut, folder)
    held = sum(parameter.nbytes for name, parameter in target.layers.named_parameters() if "norm" not in name)
    return state_source(target, "tensor-parallel", cut).states(row(ranks.rank), LAYERS), held


def make_hybrid(folder: Path) -> None:
    config = family_config("qwen3_5_text")
    config.vocab_size = 271
    randomised(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("llama", 2),
        pytest.param("llama", 4, marks=pytest.mark.nightly),
        ("deepseek", 2),
        pytest.param("hybrid", 2, marks=pytest.mark.nightly),  # is validated below
    ],
)
def test_every_process_has_the_states_of_its_row_from_its_part_of_the_weights(
    kind: str, size: int, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    if kind == "llama":
        make_target(folder)
    elif kind == "hybrid":
        make_hybrid(folder)
    else:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(v3()).save_pretrained(folder)
    whole = load_target(folder)
    layers = whole.layers.named_parameters()
    whole_bytes = sum(parameter.nbytes for name, parameter in layers if "norm" not in name)
    for rank, (found, held) in enumerate(run_ranks(size, capture_cut, folder)):
        mine = row(rank)
        expected = capture_features(whole, mine.ids, mine.doc_start, LAYERS, mine.plan.teacher_positions)
        torch.testing.assert_close(found.aux_hidden_states, expected.aux_hidden_states, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.hidden, expected.hidden, rtol=1e-4, atol=1e-4)
        assert found.argmax.equal(expected.argmax) and (found.argmax >= 0).any()
        if kind == "llama" and size == 2:  # where heads divide by processes nothing is held twice
            assert held == whole_bytes / size
        assert held < whole_bytes


PROMPTS = [[(5 * i + 3 * j) % 270 for j in range(9 + 4 * i)] for i in range(3)]
VALIDATION = ValidationConfig(shapes=("3,1,4", "3,3,8"), max_tokens=12, batch_size=2)


def validate_cut(ranks: Any, folder: Path, head: Any) -> dict[str, Any]:
    process: Any = SimpleNamespace(
        process_index=ranks.rank, num_processes=ranks.size, device=torch.device("cpu")
    )
    cut = load_cut(folder, process, torch.float32, "")
    between_whole_ends(cut, folder)
    validator = Validator(cut, PROMPTS, VALIDATION)
    return [validator.validate(head).row() for _ in range(2)][1] | {"responses": validator.responses}


def test_processes_validate_a_hybrid_together_as_one_alone(tmp_path: Path) -> None:
    make_hybrid(tmp_path)
    whole = load_target(tmp_path)
    head = tiny_head(whole, 200)
    validator = Validator(whole, PROMPTS, VALIDATION)
    expected = validator.validate(head).row() | {"responses": validator.responses}
    assert run_ranks(2, validate_cut, tmp_path, head) == [expected] * 2
