"""DFlash and DSpark heads in the layouts of their authors and of speculators, there and back, and wrong
conventions."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_dflash, tiny_dspark
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.dflash.head import spread_layers
from eagle_kit.drafts.dflash.kind import DFLASH
from eagle_kit.drafts.dspark.kind import DSPARK
from eagle_kit.drafts.files.draft import DraftFolder, load_draft, save_draft
from eagle_kit.drafts.files.draft_files import open_draft
from eagle_kit.drafts.files.export import export_draft, import_draft
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.drafts.registry import find_kind, kind_of
from eagle_kit.engine.llm import LLM
from eagle_kit.models.loading.loader import load_target

PEERS = ("sglang", "vllm", "speculators")


def make(folder, tiny):
    make_target(folder / "target")
    target = load_target(folder / "target")
    head = tiny(target, mask_token_id=5, aux_layer_ids=(0, 2, 3))
    save_draft(head, folder / "ours", metadata={"step": 7}, dtype=torch.float32)
    return folder / "target", folder / "ours", target, head


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of a target and of a DFlash head for it, the target, and the head."""
    return make(tmp_path_factory.mktemp("dflash"), tiny_dflash)


@pytest.fixture(scope="module")
def corrected(tmp_path_factory):
    """The same of a DSpark head."""
    return make(tmp_path_factory.mktemp("dspark"), tiny_dspark)


def contents(folder):
    texts = [json.loads((folder / name).read_text()) for name in ("config.json", "eagle_kit.json")]
    return texts, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_there_and_back_bit_for_bit(made, corrected, tmp_path, kind, peer):
    target, ours, _, head = made if kind == "dflash" else corrected
    export_draft(ours, tmp_path / peer, format=peer, dtype=None, target=target)
    (config, _), tensors = contents(tmp_path / peer)
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.2.self_attn.k_norm.weight"} <= set(
        tensors
    )
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(tensors)
    if peer == "speculators":  # layers by their inputs
        assert (config["speculators_model_type"], config["mask_token_id"]) == (kind, 5)
        assert "sliding_window_non_causal" not in config  # false makes whole layers causal in vLLM
        assert config["aux_hidden_state_layer_ids"] == [0, 2, 3]
        assert config["transformer_layer_config"]["num_hidden_layers"] == 3
        proposal = config["speculators_config"]["proposal_methods"][0]
        assert proposal["speculative_tokens"] == head.most_steps
        assert kind == "dflash" or (config["markov_rank"], config["sample_from_anchor"]) == (5, True)
    elif kind == "dspark":
        assert (config["mask_token_id"], config["target_layer_ids"]) == (5, [-1, 1, 2])
        assert config["architectures"] == ["Qwen3DSparkModel"] and config["markov_head_type"] == "vanilla"
        assert config["enable_confidence_head"] and config["confidence_head_with_markov"]
        assert {"markov_head.markov_w1.weight", "confidence_head.proj.bias"} <= set(tensors)
    else:  # by their outputs
        assert config["dflash_config"] == {"mask_token_id": 5, "target_layer_ids": [-1, 1, 2]}
        assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 6
    import_draft(tmp_path / peer, tmp_path / "back")
    (before, facts), old = contents(ours)
    (after, facts_after), new = contents(tmp_path / "back")
    assert (before, facts) == (after, facts_after) and old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize("peer", ["sglang", "speculators"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_heads_of_others_are_read_and_go_back_as_they_came(made, corrected, tmp_path, kind, peer):
    target, ours, model, head = made if kind == "dflash" else corrected
    export_draft(ours, tmp_path / peer, format=peer, dtype=None, target=target)
    config = json.loads((tmp_path / peer / "config.json").read_text())
    del config["eagle_kit"]
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / peer / "model.safetensors")
    save_file(tensors, theirs / "model.safetensors")
    assert DraftFolder.open(theirs).layout.format == peer
    assert all(finding.level != "error" for finding in validate_draft(theirs, target))
    import_draft(theirs, tmp_path / "imported", target=target)
    for folder in (theirs, tmp_path / "imported"):
        read = kind_of(head.config).read(open_draft(folder), model)
        assert read.config.aux_layer_ids == (0, 2, 3)
        for (name, mine), other in zip(head.named_parameters(), read.parameters(), strict=True):
            assert torch.equal(mine, other), name
    export_draft(tmp_path / "imported", tmp_path / "again", format=peer, dtype=None, target=target)
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config


@pytest.mark.parametrize("peer", ["speculators", "vllm"])
def test_an_output_layer_of_its_own(made, tmp_path, peer):
    target, _, model, _ = made
    head = tiny_dflash(model, draft_vocab_size=100)
    save_draft(head, tmp_path / "ours", metadata={}, dtype=torch.float32)
    export_draft(tmp_path / "ours", tmp_path / peer, format=peer, dtype=None, target=target)
    for folder in (tmp_path / "ours", tmp_path / peer):
        read = load_draft(folder, target=model)
        assert torch.equal(read.lm_head.weight, head.lm_head.weight)
        assert torch.equal(read.token_map, head.token_map)
    with pytest.raises(UserError, match="output layer only"):
        export_draft(tmp_path / "ours", tmp_path / "no", format="sglang", target=target)


@pytest.mark.parametrize("both", [False, True])
def test_sliding_layers_and_rows_are_kept(made, tmp_path, both):
    target, _, model, _ = made
    slides = {"sliding_window": 9, "sliding_layers": (0, 1), "sliding_both": both}
    head = tiny_dflash(model, **slides, predicts_next=True)
    save_draft(head, tmp_path / "ours", metadata={}, dtype=torch.float32)
    export_draft(tmp_path / "ours", tmp_path / "s", format="speculators", dtype=None, target=target)
    assert json.loads((tmp_path / "s" / "config.json").read_text())["sliding_window_non_causal"] is both
    import_draft(tmp_path / "s", tmp_path / "back")
    for folder in ("ours", "s", "back"):
        assert load_draft(tmp_path / folder, target=model).config == head.config
    with pytest.raises(UserError, match="sample_from_anchor"):
        export_draft(tmp_path / "ours", tmp_path / "no", format="vllm", target=target)


MASK_AND_LAYERS = {"mask_token_id": 5, "target_layer_ids": [1]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "causal": False},
            ((0,), True),
        ),
        ({"layer_types": ["sliding_attention"] * 3, "causal": True}, ((0, 1, 2), False)),
        ({"use_swa": True, "swa_window_size": 40, "causal": False}, ((0, 1, 2), True)),
    ],
)
def test_sliding_layers_as_vllm_reads_them(made, change, expected):
    files = open_draft(made[1])
    kinds = {key: change[key] for key in change if key == "layer_types"}
    table = {key: value for key, value in change.items() if key not in kinds}
    files.config.update(kinds, sliding_window=40, dflash_config=MASK_AND_LAYERS | table)
    config = DFLASH.read_config(files)
    assert (config.sliding_window, config.sliding_layers, config.sliding_both) == (40, *expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dflash_config": {"target_layer_ids": [1]}}, "which token is its mask"),
        ({"dflash_config": {"mask_token_id": 10**6, "target_layer_ids": [1]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [-2]}}, "layer ids"),
        ({"dflash_config": {"mask_token_id": 5, "projector_type": "domino"}}, "projector_type"),
        ({"markov_rank": 256}, "markov_rank"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 64}, "causal in a block"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1], "causal": True}}, "full attention"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_impossible_configs_are_refused(made, change, message):
    files = open_draft(made[1])
    files.config.update(change)
    with pytest.raises(UserError, match=message):
        DFLASH.read_config(files)


@pytest.mark.parametrize(
    ("target_layers", "layers"),
    [
        (1, (1,)),
        (2, (2,)),
        (3, (2,)),
        (4, (2,)),
        (5, (2, 3)),
        (6, (2, 3, 4)),
        (7, (2, 3, 4, 5)),
        (8, (2, 3, 4, 5, 6)),
        (12, (2, 4, 6, 8, 10)),
    ],
)
def test_new_heads_read_layers_that_a_small_target_has(target_layers, layers):
    assert spread_layers(target_layers) == layers


def test_wrong_conventions_are_named(made):
    """Layers that are stored in the other numbering, and rows whose meaning nothing says."""
    _, ours, model, _ = made
    big = replace(model.config, num_layers=30)
    usual = spread_layers(30)
    assert [layer - 1 for layer in spread_layers(36)] == [1, 9, 17, 25, 33]  # as published for Qwen3-8B
    theirs = (2, 9, 15, 21, 28)  # as the authors' code rounds
    for layers in (usual, [layer - 2 for layer in usual], theirs, [layer - 2 for layer in theirs]):
        # outputs are one less
        files = open_draft(ours)
        files.config["dflash_config"] = {"mask_token_id": 5, "target_layer_ids": list(layers)}
        del files.config["sample_from_anchor"]
        found = DFLASH.check(files, DFLASH.read_config(files), big)
        warned = {each.subject for each in found if each.level == "warning"}
        assert warned == {"layer ids", "rows of a block"}
    words = [each.words for each in DFLASH.conventions(tiny_dflash(model), model.config)]
    assert "rows that predict the next token" in words


@pytest.mark.parametrize(
    ("target_layers", "layers", "outputs"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (30, 5, [1, 8, 14, 20, 27]),
        (62, 5, [1, 16, 30, 44, 59]),
        (28, 8, [1, 4, 8, 11, 15, 18, 22, 25]),
        (28, 1, [14]),
    ],
)
def test_a_config_that_names_no_layers_means_those_of_the_authors(made, target_layers, layers, outputs):
    """As many as the head has layers, by the ``build_target_layer_ids`` of their repository."""
    _, ours, model, _ = made
    files = replace(open_draft(ours), tensors={})  # whose number of layers would be taken
    files.config.update(dflash_config={"mask_token_id": 5}, num_hidden_layers=layers, layer_types=None)
    config = DFLASH.read_config(files, replace(model.config, num_layers=target_layers))
    assert [layer - 1 for layer in config.aux_layer_ids] == outputs
    with pytest.raises(UserError, match="layer ids"):
        DFLASH.read_config(files)


def test_deepspec_s_baseline_has_rows_of_the_next_token(made):
    files = open_draft(made[1])
    del files.config["sample_from_anchor"]
    assert not DFLASH.read_config(files).predicts_next
    files.config["markov_rank"] = 0
    assert DFLASH.read_config(files).predicts_next


def test_specforge_s_keys_are_in_the_table_of_dflash(corrected):
    files = open_draft(corrected[1])
    parts = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head")
    moved = {key: files.config.pop(key) for key in (*parts, "confidence_head_with_markov")}
    table = {**moved, "projector_type": "dspark"}
    files.config.update(architectures=["DFlashDraftModel"], dflash_config=table)
    assert find_kind(files) is DSPARK
    assert DSPARK.read_config(files) == corrected[3].config


def as_modelopt(files, **changes):
    """A DSpark head of ours with ModelOpt's keys and names."""
    parts = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    table = {key: files.config[key] for key in parts}
    table |= {"projector_type": "dspark", "shift_label": True, "use_confidence_head": True, **changes}
    left_out = {*parts, "enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor"}
    config = {key: value for key, value in files.config.items() if key not in left_out}
    config |= {"architectures": ["DFlashDraftModel"], "dflash_config": table}
    tensors = {
        name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj"): tensor
        for name, tensor in files.tensors.items()
    }
    return replace(files, config=config, tensors=tensors)


@pytest.mark.parametrize("form", ["vanilla", "gated", "rnn"])
def test_modelopts_keys_and_names_of_dspark(corrected, form):
    head = tiny_dspark(corrected[2], mask_token_id=5, aux_layer_ids=(0, 2, 3), markov_form=form)
    files = as_modelopt(DSPARK.write(head, torch.float32))
    assert "markov_w1.weight" in files.tensors and "confidence_proj.bias" in files.tensors
    assert find_kind(files) is DSPARK
    read = DSPARK.read(files, corrected[2])
    assert read.config == head.config
    for (name, mine), other in zip(head.named_parameters(), read.parameters(), strict=True):
        assert torch.equal(mine, other), name
    (rows,) = (
        each for each in DSPARK.check(files, read.config, corrected[2].config) if "rows" in each.subject
    )
    assert rows.level == "ok"


def test_modelopts_head_may_have_no_confidence(corrected):
    files = as_modelopt(open_draft(corrected[1]), use_confidence_head=False)
    assert not DSPARK.read_config(files).has_confidence


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("architectures", [None, ["Qwen3ForCausalLM"], ["SomebodysDraftModel"]])
def test_a_head_of_blocks_is_recognised_by_its_tensors(made, corrected, kind, architectures):
    _, ours, _, head = made if kind == "dflash" else corrected
    files = open_draft(ours)
    files.config.pop("markov_rank", None)
    files.config["architectures"] = architectures
    found = find_kind(files)
    assert found.name == kind
    assert found.read_config(files) == head.config


def test_nemos_windows_are_of_both_directions(made):
    window = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 40}
    files = open_draft(made[1])
    files.config.update(window, architectures=["Qwen3DFlashDraftModel"])
    assert DFLASH.read_config(files).sliding_both
    files.config["architectures"] = ["DFlashDraftModel"]
    with pytest.raises(UserError, match="does not say whether"):
        DFLASH.read_config(files)


@pytest.mark.parametrize(
    ("top", "table", "message"),
    [
        ({"block_size": 6}, {"block_size": 7}, "block_size 6 and dflash_config.block_size 7"),
        ({"mask_token_id": 6}, {"mask_token_id": 5}, "mask_token_id 6 and"),
        ({"target_layer_ids": [0, 1, 2]}, {"target_layer_ids": [-1, 1, 2]}, "target_layer_ids"),
        ({"sample_from_anchor": False}, {"shift_label": True}, "sample_from_anchor False and shift_label"),
        ({}, {"causal": True}, "as JetSpec's"),
    ],
)
def test_keys_that_contradict_each_other_or_our_rows_are_refused(made, top, table, message):
    files = open_draft(made[1])
    files.config["dflash_config"] |= table
    files.config.update(top)
    with pytest.raises(UserError, match=message):
        DFLASH.read_config(files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"markov_rank": -1}, "markov_rank"),
        ({"markov_head_type": "lstm"}, "one of vanilla, gated, rnn"),
        ({"markov_rank": 0}, "no Markov head whose embedding it could read"),
        ({"markov_head_type": "rnn", "sample_from_anchor": False}, "begins in a row that drafts nothing"),
        ({"selector_rank": 16}, "selector_rank"),
        ({"mask_token_id": None}, "which token is its mask"),
    ],
)
def test_impossible_dspark_configs_are_refused(corrected, change, message):
    files = open_draft(corrected[1])
    files.config.update(change)
    with pytest.raises(UserError, match=message):
        DSPARK.read_config(files)


def test_a_table_of_speculators_first_scale_is_imported_validated_and_served(corrected, tmp_path):
    target, _, model, _ = corrected
    head = tiny_dspark(model, mask_token_id=5, aux_layer_ids=(0, 2, 3))
    table = head.markov_head.markov_w1.weight
    with torch.no_grad():
        table.copy_(torch.nn.Embedding(*table.shape).weight)
    save_draft(head, tmp_path / "ours", metadata={})
    export_draft(tmp_path / "ours", tmp_path / "theirs", format="speculators", dtype=None, target=target)

    import_draft(tmp_path / "theirs", tmp_path / "back", target=target)
    errors = [each for each in validate_draft(tmp_path / "back", target) if each.level == "error"]
    assert errors == []
    llm = LLM(str(target), str(tmp_path / "back"), shape="3,1,4", max_context=64, max_batch_size=1)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (drafted,) = llm.generate([[70, 71, 72]], params)
    (plain,) = llm.generate([[70, 71, 72]], params, shape="none")
    assert drafted.token_ids == plain.token_ids


def test_weights_of_another_form_are_named(corrected):
    files = open_draft(corrected[1])
    files.config["markov_head_type"] = "gated"
    with pytest.raises(UserError, match=r"markov_head.gate_proj.weight is missing"):
        DSPARK.weights(files, DSPARK.read_config(files))


@pytest.mark.parametrize(
    ("changes", "peer", "message"),
    [
        ({"markov_form": "gated"}, "vllm", "know no markov_head_type gated"),
        ({"markov_form": "rnn"}, "vllm", "know no markov_head_type rnn"),
        ({"markov_rank": 0, "confidence_reads_token": False}, "vllm", "have a Markov head"),
        ({"draft_vocab_size": 100}, "sglang", "output layer only"),
        ({"predicts_next": False}, "sglang", "for each of block_size rows"),
        ({}, "eagle", "no class for dspark heads"),
    ],
)
def test_what_a_peer_does_not_serve_is_named(corrected, tmp_path, changes, peer, message):
    target, _, model, _ = corrected
    save_draft(tiny_dspark(model, **changes), tmp_path / "ours", metadata={}, dtype=torch.float32)
    with pytest.raises(UserError, match=message):
        export_draft(tmp_path / "ours", tmp_path / "no", format=peer, target=target)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("tiny", [tiny_dflash, tiny_dspark])
def test_a_body_of_another_width_than_its_target_has_no_place_in_speculators(made, tmp_path, tiny):
    save_draft(tiny(made[2], target_hidden_size=40), tmp_path / "ours", metadata={}, dtype=torch.float32)
    with pytest.raises(UserError, match="states of the head's own width only"):
        export_draft(tmp_path / "ours", tmp_path / "no", format="speculators")
    export_draft(tmp_path / "ours", tmp_path / "yes", format="sglang")


@pytest.mark.parametrize("form", ["vanilla", "gated", "rnn"])
def test_sglang_finds_a_tensor_for_every_part_of_each_form(corrected, tmp_path, form):
    """As ``models/dspark.py`` of SGLang 0.5.23 builds its two heads; a name beyond them stops its start."""
    target, _, model, _ = corrected
    head = tiny_dspark(model, markov_form=form, confidence_reads_token=False)
    save_draft(head, tmp_path / "ours", metadata={}, dtype=torch.float32)
    export_draft(tmp_path / "ours", tmp_path / "s", format="sglang", dtype=None, target=target)
    (config, _), tensors = contents(tmp_path / "s")
    size, rank, words = config["hidden_size"], config["markov_rank"], config["vocab_size"]
    wanted = {
        "markov_head.markov_w1.weight": (words, rank),
        "markov_head.markov_w2.weight": (words, rank),
        "confidence_head.proj.weight": (1, size),
        "confidence_head.proj.bias": (1,),
    }
    part, rows, columns = {
        "vanilla": ("", 0, 0),
        "gated": ("markov_head.gate_proj", rank, size + rank),
        "rnn": ("markov_head.joint_proj", 3 * rank, 2 * rank + size),
    }[form]
    if part:
        wanted |= {f"{part}.weight": (rows, columns), f"{part}.bias": (rows,)}
    found = {name: tuple(each.shape) for name, each in tensors.items() if "_head." in name}
    assert found == wanted
    assert (config["markov_head_type"], config["confidence_head_with_markov"]) == (form, False)


@pytest.mark.parametrize("said", [{}, {"sample_from_anchor": None}])
def test_rows_that_nothing_tells_are_of_the_next_token_and_warned_of(corrected, said):
    _, ours, model, head = corrected
    files = open_draft(ours)
    del files.config["sample_from_anchor"]
    files.config.update(said)
    config = DSPARK.read_config(files)
    assert config.predicts_next
    warned = {each.subject for each in DSPARK.check(files, config, model.config) if each.level == "warning"}
    assert "rows of a block" in warned
    words = [each.words for each in DSPARK.conventions(head, model.config)]
    assert "rows that predict their own token" in words


def test_rows_of_a_head_of_speculators_that_does_not_say_what_they_predict_are_refused(corrected, tmp_path):
    target, ours, _, _ = corrected
    export_draft(ours, tmp_path / "theirs", format="speculators", target=target)
    files = open_draft(tmp_path / "theirs")
    del files.config["sample_from_anchor"]
    with pytest.raises(UserError, match="its own token or the next one"):
        DSPARK.read_config(files)


def test_the_table_of_dflash_tells_what_rows_predict(corrected):
    _, ours, model, _ = corrected
    files = open_draft(ours)
    files.config["dflash_config"] = {"sample_from_anchor": files.config.pop("sample_from_anchor")}
    found = DSPARK.check(files, DSPARK.read_config(files), model.config)
    assert {each.level for each in found if each.subject == "rows of a block"} == {"ok"}


@pytest.mark.parametrize(
    "changes",
    [{}, {"confidence_reads_token": False}, {"has_confidence": False, "confidence_reads_token": False}],
)
def test_keys_of_the_confidence_head_that_are_missing_follow_from_its_weights(corrected, tmp_path, changes):
    head = tiny_dspark(corrected[2], **changes)
    save_draft(head, tmp_path, metadata={}, dtype=torch.float32)
    files = open_draft(tmp_path)
    del files.config["enable_confidence_head"], files.config["confidence_head_with_markov"]
    assert DSPARK.read_config(files) == replace(head.config, **files.about)


def test_a_config_that_says_all_is_read_without_weights(corrected, tmp_path):
    (tmp_path / "config.json").write_bytes((corrected[1] / "config.json").read_bytes())
    assert DSPARK.read_config(open_draft(tmp_path)) == corrected[3].config
