"""P-EAGLE heads in the layouts of vLLM and speculators, there and back, and heads that others wrote."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_p_eagle
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.files.draft import DraftFolder, load_draft, save_draft
from eagle_kit.drafts.files.draft_files import open_draft
from eagle_kit.drafts.files.export import export_draft, import_draft
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.drafts.p_eagle.kind import P_EAGLE
from eagle_kit.models.loading.loader import load_target

PEERS = ("vllm", "speculators")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of a target and of a head for it, the target, and the head."""
    folder = tmp_path_factory.mktemp("p-eagle")
    make_target(folder / "target")
    target = load_target(folder / "target")
    size = target.config.vocab_size
    head = tiny_p_eagle(
        target, size // 2, mask_token_id=size - 3, norm_before_residual=True, aux_layer_ids=(1, 2, 3)
    )
    save_draft(head, folder / "ours", metadata={"step": 7}, dtype=torch.float32)
    return folder / "target", folder / "ours", target, head


def contents(folder):
    texts = [json.loads((folder / name).read_text()) for name in ("config.json", "eagle_kit.json")]
    return texts, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("peer", PEERS)
def test_there_and_back_bit_for_bit(made, tmp_path, peer):
    target, ours, model, head = made
    export_draft(ours, tmp_path / peer, format=peer, dtype=None, target=target)
    assert DraftFolder.open(tmp_path / peer).layout.format == peer
    (config, _), tensors = contents(tmp_path / peer)
    mask = head.config.mask_token_id
    assert torch.equal(tensors["embed_tokens.weight"][mask], head.mask_embedding)
    others = torch.arange(len(model.embed_tokens.weight)) != mask
    assert torch.equal(tensors["embed_tokens.weight"][others], model.embed_tokens.weight[others])
    assert {name.split(".")[1] for name in tensors if name.startswith("layers.")} == {"0", "1", "2"}
    assert tensors["mask_hidden"].shape == (1, 1, 3 * 64) and "mask_embedding" not in tensors
    if peer == "vllm":
        assert (config["parallel_drafting"], config["ptd_token_id"]) == (True, mask)
        assert config["num_hidden_layers"] == 3
    else:
        assert (config["speculators_model_type"], config["mask_token_id"]) == ("peagle", mask)
        assert config["transformer_layer_config"]["num_hidden_layers"] == 3
    import_draft(tmp_path / peer, tmp_path / "back")
    (before, facts), old = contents(ours)
    (after, facts_after), new = contents(tmp_path / "back")
    assert (before, facts) == (after, facts_after) and old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize("peer", PEERS)
def test_heads_of_others_are_read_and_go_back_as_they_came(made, tmp_path, peer, recwarn):
    target, ours, model, head = made
    export_draft(ours, tmp_path / peer, format=peer, dtype=None, target=target)
    config = json.loads((tmp_path / peer / "config.json").read_text())
    del config["eagle_kit"]
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / peer / "model.safetensors")
    tensors["mask_hidden"] = tensors["mask_hidden"].view(1, -1)  # as some have it
    save_file(tensors, theirs / "model.safetensors")
    assert all(finding.level != "error" for finding in validate_draft(theirs, target))
    import_draft(theirs, tmp_path / "imported", target=target)
    for folder in (theirs, tmp_path / "imported"):
        read = P_EAGLE.read(open_draft(folder), model)
        for (name, mine), other in zip(head.named_parameters(), read.parameters(), strict=True):
            assert torch.equal(mine, other), name
        assert torch.equal(read.d2t, head.d2t)
    assert not [warning for warning in recwarn if "copy" in str(warning.message)]
    export_draft(tmp_path / "imported", tmp_path / "again", format=peer, dtype=None, target=target)
    back = load_file(tmp_path / "again" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name].flatten(), tensors[name].flatten()) for name in tensors)


@pytest.mark.parametrize(("peer", "key"), [("vllm", "ptd_token_id"), ("speculators", "mask_token_id")])
def test_a_wrong_token_of_the_mask_is_named_by_the_embedding_that_differs(made, tmp_path, peer, key):
    target, ours, model, head = made
    export_draft(ours, tmp_path / peer, format=peer, dtype=None, target=target)
    files = open_draft(tmp_path / peer)
    files.config[key] = 4
    mask = head.config.mask_token_id
    with pytest.raises(
        UserError, match=f"token 4 is its mask, .* of token {mask} is another.*{key} to {mask}"
    ):
        P_EAGLE.read(files, model)


def test_an_own_head_is_read_back(made):
    _, ours, model, head = made
    read = load_draft(ours, target=model)
    assert {name: getattr(read.config, name) for name in ("num_layers", "mask_token_id")} == {
        "num_layers": 3,
        "mask_token_id": head.config.mask_token_id,
    }
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), head.parameters(), strict=True))


@pytest.mark.parametrize("peer", ["sglang", "eagle"])
def test_who_has_no_such_heads_is_said(made, tmp_path, peer):
    with pytest.raises(UserError, match="all steps in one pass"):
        export_draft(made[1], tmp_path / peer, format=peer, target=made[0])


def test_a_target_that_is_not_at_hand_is_asked_for(made, tmp_path):
    with pytest.raises(UserError, match="not at hand.*--target"):
        export_draft(made[1], tmp_path / "vllm", format="vllm")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ptd_token_id": None}, "does not say which token is its mask"),
        ({"ptd_token_id": 10**6}, "ptd_token_id"),
        ({"pard_token": 1}, "the same token"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_impossible_configs_are_refused(made, change, message):
    files = open_draft(made[1])
    files.config.update(change)
    with pytest.raises(UserError, match=message):
        P_EAGLE.read_config(files)


@pytest.mark.parametrize("peer", PEERS)
def test_every_layer_has_the_output_bias_that_peers_make_where_queries_have_one(made, tmp_path, peer):
    target, _, model, _ = made
    head = tiny_p_eagle(model, 150, aux_layer_ids=(1, 2, 3), attention_bias=True)
    save_draft(head, tmp_path / "ours", metadata={})
    export_draft(tmp_path / "ours", tmp_path / "theirs", format=peer, dtype=None, target=target)
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    for layer in range(3):
        assert torch.equal(tensors[f"layers.{layer}.self_attn.o_proj.bias"], torch.zeros(64))
    import_draft(tmp_path / "theirs", tmp_path / "back")
    old, new = contents(tmp_path / "ours")[1], contents(tmp_path / "back")[1]
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
