"""MTP modules of GLM and Qwen: their published forward, and what becomes of them."""

import json

import pytest
import torch
from families import family_config
from safetensors.torch import load_file
from tiny_modules import PREFIXES, save_with_module

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.files.draft import load_draft, save_draft
from eagle_kit.drafts.files.draft_files import open_draft
from eagle_kit.drafts.files.formats import Served
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.drafts.mtp.kind import MTP
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.load_draft import load_draft_model
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.ops.attention.prefill import prefill_attention
from eagle_kit.train.run.simulate import match_table


@pytest.fixture(scope="module", params=PREFIXES)
def made(request, tmp_path_factory):
    """Folder of a target with a module, the target, and the module's published forward."""
    if family_config(request.param) is None:
        pytest.skip(f"this transformers does not know {request.param}")
    folder = tmp_path_factory.mktemp(request.param)
    published = save_with_module(request.param, folder)
    return folder, load_target(folder), published


def first_step(head, target, ids):
    states = target(ids, torch.arange(len(ids)), target.causal()).hidden[:-1]

    def attend(layer, q, k, v):
        return prefill_attention(q, k, v, head.config.attention_scale)

    return states, head(states, target.embed(ids[1:]), torch.arange(len(ids) - 1), attend, 0)


@torch.no_grad()
def test_a_module_is_the_published_one(made):
    folder, target, published = made
    assert isinstance(target, LlamaModel)
    head = MTP.read(open_draft(folder), target)
    ids = torch.randint(3, 131, (30,), generator=torch.Generator().manual_seed(0))
    states, out = first_step(head, target, ids)
    torch.testing.assert_close(out, published(states, target.embed(ids[1:])), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_modules_load_as_they_were(made, tmp_path, dtype):
    folder, target, _ = made
    head = MTP.read(open_draft(folder), target, dtype=dtype)
    save_draft(head, tmp_path / "draft", metadata={}, dtype=dtype)
    loaded = load_draft(tmp_path / "draft").bind(target.lm_head)
    assert type(loaded) is type(head)
    for (name, mine), (other, theirs) in zip(head.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other and torch.equal(mine.float(), theirs.float()), name
    errors = [each for each in validate_draft(tmp_path / "draft", folder) if each.level == "error"]
    assert not errors, errors


@pytest.mark.parametrize("shape", [pytest.param("1,1,2", marks=pytest.mark.nightly), "3,1,4", "3,2,6"])
def test_nextn_serves_the_targets_own_module(made, shape):
    folder, target, _ = made
    prompts = [[5, 9, 3, 7], [8] * 17, list(range(3, 30))]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    sizes = {"max_batch_size": 3, "max_context": 128, "page_size": 4}
    plain = LLM(target, shape="none", **sizes).generate(prompts, params)
    llm = LLM(target, load_draft_model(folder, target, algorithm="NEXTN"), shape=shape, **sizes)
    for _ in range(2):
        drafted = llm.generate(prompts, params)
        assert [response.token_ids for response in drafted] == [response.token_ids for response in plain]


def test_other_engines_read_the_module_from_the_target(made, tmp_path):
    folder, target, _ = made
    save_draft(MTP.read(open_draft(folder), target), tmp_path / "draft", metadata={})
    files = open_draft(tmp_path / "draft")
    with pytest.raises(UserError, match="out of the target's own checkpoint"):
        MTP.format.write(files, "sglang", Served())


def test_a_module_inside_of_a_model_that_sees_is_read(made, tmp_path):
    """A nested config, here without the number of modules."""
    from safetensors.torch import save_file

    folder, target, _ = made
    config = json.loads((folder / "config.json").read_text())
    names = {"qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"}
    if config["model_type"] not in names:
        pytest.skip("published as a text model only")
    inner = {key: value for key, value in config.items() if key != "mtp_num_hidden_layers"}
    name = f"{names[config['model_type']]}ForConditionalGeneration"
    outer = {"architectures": [name], "model_type": "qwen3_5", "text_config": inner, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    moved = {key.replace("model.", "model.language_model.", 1): value for key, value in tensors.items()}
    save_file(moved, tmp_path / "model.safetensors")
    head, alone = (MTP.read(open_draft(each), target) for each in (tmp_path, folder))
    assert all(torch.equal(mine, alone.state_dict()[key]) for key, mine in head.state_dict().items())


def test_missing_parts_are_named(made, tmp_path):
    import shutil

    from safetensors.torch import save_file

    folder, target, _ = made
    shutil.copytree(folder, tmp_path / "t")
    file = tmp_path / "t" / "model.safetensors"
    tensors = {
        name: value
        for name, value in load_file(file).items()
        if not name.endswith(("mtp.fc.weight", "eh_proj.weight"))
    }
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"eh_proj.weight is missing|no weights of any|has no MTP"):
        MTP.read(open_draft(tmp_path / "t"), target)


def test_a_target_saved_without_its_module_is_named(made, tmp_path):
    """As transformers saves a fine-tuned copy."""
    import shutil

    from safetensors.torch import save_file

    folder, target, _ = made
    shutil.copytree(folder, tmp_path / "t")
    file = tmp_path / "t" / "model.safetensors"
    kept = {k: v for k, v in load_file(file).items() if not k.startswith(("mtp.", "model.layers.4."))}
    save_file(kept, file)
    with pytest.raises(UserError, match=r"no weights of any|has no MTP"):
        load_draft_model(tmp_path / "t", target, algorithm="NEXTN")


def test_a_module_in_bf16_is_judged(made):
    folder, _, _ = made
    target = load_target(folder, torch.bfloat16)
    head = MTP.read(open_draft(folder), target, dtype=torch.bfloat16)
    ids = torch.randint(3, 131, (20,), generator=torch.Generator().manual_seed(0))
    assert match_table(target, head, ids, 8, 2).shape == (11, 2)
