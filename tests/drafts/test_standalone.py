"""Small models as drafts: their vocabulary is compared with the target's."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.engine.llm import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("small") / "target")


def resized(folder, out, num_rows, rename=None):
    """Copy of a model with another number of rows, and a token of its tokenizer renamed."""
    made = make_target(out)
    config = json.loads((folder / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "vocab_size": num_rows}))
    tensors = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        if value.shape[0] == config["vocab_size"]:
            rows = torch.zeros(num_rows, *value.shape[1:], dtype=value.dtype)
            shared = min(num_rows, len(value))
            rows[:shared] = value[:shared]
            tensors[name] = rows
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    if rename is not None:
        text = (made / "tokenizer.json").read_text()
        (made / "tokenizer.json").write_text(text.replace(*rename))
    return made


def levels(draft, folder):
    return {finding.subject: finding.level for finding in validate_draft(draft, folder)}


@pytest.mark.parametrize("num_rows", [316, 280])
def test_padding_of_the_same_tokenizer_is_no_error(folder, tmp_path, num_rows):
    draft = resized(folder, tmp_path / "draft", num_rows)
    found = levels(draft, folder)
    assert found["vocabulary"] == found["tokenizer"] == "ok"
    sizes = {"max_context": 64, "max_batch_size": 1}
    llm = LLM(str(folder), str(draft), algorithm="STANDALONE", shape="3,1,4", **sizes)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    (drafted,) = llm.generate([[70, 71, 72]], params)
    (plain,) = llm.generate([[70, 71, 72]], params, shape="none")
    assert drafted.token_ids == plain.token_ids and drafted.stats.num_verifies <= 6


def test_other_tokens_or_none_are_refused_where_the_number_differs(folder, tmp_path):
    other = resized(folder, tmp_path / "draft", 316, ('"!":', '"!!":'))
    assert levels(other, folder) == {"vocabulary": "error"}
    with pytest.raises(UserError, match="vocabulary of 316, the target one of 300, and their ids are other"):
        LLM(str(folder), str(other), algorithm="STANDALONE", max_context=64)
    for name in other.glob("*token*"):
        name.unlink()
    assert levels(other, folder) == {"vocabulary": "error"}
