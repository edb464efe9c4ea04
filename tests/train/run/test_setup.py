"""The parts of a run: a tokenizer with other tokens than the target's embedding has rows."""

import json

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file

from eagle_kit.config import load_config
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import read_object
from eagle_kit.train.run.setup import load_components
from tests.support.tiny_run import make_config


def resize(folder, num_rows):
    """Cut or pad the embedding and the output layer of a target to ``num_rows`` rows."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if len(tensor) == 300:
            rows = torch.zeros(num_rows, tensor.shape[1])
            rows[: min(300, num_rows)] = tensor[:num_rows]
            tensors[name] = rows
    save_file(tensors, path, metadata={"format": "pt"})
    config = read_object(folder / "config.json") | {"vocab_size": num_rows}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("num_rows", "draft_vocab_size"), [(250, 64), (300, 300)])
def test_a_tokenizer_may_be_larger_or_smaller_than_the_embedding(tmp_path, num_rows, draft_vocab_size):
    path = make_config(tmp_path, head={"draft_vocab_size": draft_vocab_size})
    resize(tmp_path / "target", num_rows)
    components = load_components(load_config(TrainConfig, path), PartialState())
    assert len(components.data.vocab_map.d2t) == draft_vocab_size


@pytest.mark.parametrize(
    ("num_rows", "draft_vocab_size", "cause"), [(90, 20, "has 90 rows"), (300, 301, "the target has 300")]
)
def test_a_token_without_a_row_is_one_sentence(tmp_path, num_rows, draft_vocab_size, cause):
    path = make_config(tmp_path, head={"draft_vocab_size": draft_vocab_size})
    resize(tmp_path / "target", num_rows)
    with pytest.raises(UserError, match=cause):
        load_components(load_config(TrainConfig, path), PartialState())
