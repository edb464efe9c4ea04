"""Out in every format and back, bit for bit, heads of every kind; what a format cannot hold is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import randomise, tiny_head, tiny_target
from tiny_mixtures import deepseek_v3_target, v3
from tiny_mtp import load_modules, save_target
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.eagle1.head import Eagle1Config, Eagle1Head
from eagle_kit.drafts.eagle1.kind import EAGLE1
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.eagle3.kind import EAGLE3 as EAGLE3_KIND
from eagle_kit.drafts.files.convert import write_draft_as
from eagle_kit.drafts.files.draft import DraftFolder, load_draft, save_draft
from eagle_kit.drafts.files.draft_files import open_draft
from eagle_kit.drafts.files.export import export_draft, import_draft
from eagle_kit.drafts.files.formats import Served
from eagle_kit.models.loading.loader import load_target

PEERS = ("sglang", "vllm", "speculators", "eagle")
SHIPPED = Path(__file__).parents[3] / "checkpoints" / "smollm2-135m-eagle3"
USUAL = (2, 6, 9)
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 64}


def eagle3(**changes):
    target = tiny_target(num_layers=12)
    return tiny_head(target, **{"aux_layer_ids": USUAL, **changes})


def latent(**changes) -> Eagle3Head:
    config = deepseek_v3_target(num_hidden_layers=12)
    head = Eagle3Head(Eagle3Config.for_target(config, 67, latent=True, **changes))
    hot = torch.arange(67) * 2
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[hot] = True
    head.set_vocab_map(hot - torch.arange(67), t2d)
    return randomise(head, 3, 0.2)


def eagle1(**changes) -> Eagle1Head:
    sizes = {"hidden_size": 48, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 96}
    rest = {"vocab_size": 131, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None}
    config = Eagle1Config(**{**sizes, **rest, "max_position_embeddings": 512, **changes})
    return randomise(Eagle1Head(config), 4, 0.2)


def modules(folder: Path, count: int = 1, copies: bool = False, **changes):
    save_target(folder / "whole", modules=count, copies=copies, **changes)
    return load_modules(folder / "whole")


def saved(folder: Path, head, dtype=torch.float32) -> Path:
    """A draft of ours; its target is known by name only."""
    save_draft(head, folder / "ours", metadata={"step": 7, "accept_length": {"3,1,4": 1.5}}, dtype=dtype)
    return folder / "ours"


def contents(folder: Path) -> tuple[dict, dict[str, torch.Tensor], dict]:
    texts = [json.loads((folder / name).read_text()) for name in ("config.json", "eagle_kit.json")]
    return texts[0], load_file(folder / "model.safetensors"), texts[1]


def assert_same(one: Path, other: Path) -> None:
    """The same keys, values, names, dtypes and bits."""
    (config, tensors, metadata), (config2, tensors2, metadata2) = contents(one), contents(other)
    assert config == config2
    assert metadata == metadata2
    assert tensors.keys() == tensors2.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == tensors2[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), tensors2[name].view(torch.uint8)), name


def there_and_back(source: Path, folder: Path, peer: str) -> None:
    export_draft(source, folder / peer, format=peer, dtype=None)
    assert DraftFolder.open(folder / peer).layout.format == peer
    import_draft(folder / peer, folder / f"{peer}-back")
    assert_same(source, folder / f"{peer}-back")


EAGLE3 = {
    "plain": {},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "residual after its norm": {"norm_before_residual": True},
    "biases": {"attention_bias": True},
    "all of the vocabulary": {"draft_vocab_size": 131},
    "scaled RoPE": {"rope_scaling": ROPE},
    "four layers": {"aux_layer_ids": (2, 5, 8, 11)},
    "one norm before fc": {"norm_before_fc": True},
    "Qwen3's layer": {"qk_norm": True},
    "half of a head rotated": {"rotary_dim": 4},
    "a window": {"sliding_window": 65},
    "final states": {"aux_layer_ids": ()},
    "an embedding of its own": {"own_embedding": True},
}
REFUSED = {
    ("one norm before fc", "sglang"): "norm_before_fc",
    ("one norm before fc", "eagle"): "norm_before_fc",
    ("Qwen3's layer", "sglang"): "norms of queries and keys",
    ("Qwen3's layer", "eagle"): "norms of queries and keys",
    ("half of a head rotated", "sglang"): "partial_rotary_factor",
    ("half of a head rotated", "eagle"): "partial_rotary_factor",
    ("a window", "sglang"): "a sliding window",
    ("a window", "eagle"): "a sliding window",
    ("final states", "speculators"): "reads the target's final states",
    ("final states", "eagle"): "reads the target's final states",
    ("an embedding of its own", "sglang"): "takes the target's embedding",
    ("residual after its norm", "sglang"): "residual before hidden_norm",
    ("biases", "sglang"): "no biases of attention",
    ("EAGLE-3.1", "eagle"): "has no fc_norm",
    ("residual after its norm", "eagle"): "has no norm_before_residual",
    ("biases", "eagle"): "has no attention_bias",
    ("scaled RoPE", "eagle"): "no scaling of the kind llama3",
    ("four layers", "eagle"): "captures the layers 2, L//2 and L-3",
    ("all of the vocabulary", "vllm"): "in another order",
    ("all of the vocabulary", "speculators"): "in another order",
    ("all of the vocabulary", "eagle"): "in another order",
}


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_heads_come_back_bit_for_bit_or_are_refused_with_the_reason(tmp_path, name, peer):
    source = saved(tmp_path, eagle3(**EAGLE3[name]))
    if words := REFUSED.get((name, peer)):
        with pytest.raises(UserError, match=words) as error:
            export_draft(source, tmp_path / peer, format=peer, dtype=None)
        assert str(error.value.cause).count(". ") == 0 and not (tmp_path / peer).exists()
    else:
        there_and_back(source, tmp_path, peer)


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_full_vocabulary_in_its_own_order_and_half_types_come_back(tmp_path, peer, dtype):
    head = eagle3(draft_vocab_size=131)
    head.set_vocab_map(torch.zeros(131, dtype=torch.int64), torch.ones(131, dtype=torch.bool))
    there_and_back(saved(tmp_path, head, dtype), tmp_path, peer)
    has_map = "d2t" in load_file(tmp_path / peer / "model.safetensors")
    assert has_map == (peer == "sglang")  # the others' classes have no such tensor then


def test_unknown_keys_of_the_config_ride_along(tmp_path):
    source = saved(tmp_path, eagle3())
    path = source / "config.json"
    raw = json.loads(path.read_text()) | {"made_by": ["somebody", 7]}
    raw["eagle_config"]["note"] = "kept"
    raw["eagle_kit"]["more"] = {"a": 1}
    path.write_text(json.dumps(raw))
    for peer in PEERS:
        there_and_back(source, tmp_path, peer)


def test_an_embedding_of_its_own_comes_back(tmp_path):
    source = saved(tmp_path, eagle3())
    tensors = load_file(source / "model.safetensors") | {"embed_tokens.weight": torch.randn(131, 48)}
    save_file(tensors, source / "model.safetensors")
    for peer in PEERS:
        there_and_back(source, tmp_path, peer)


@pytest.mark.parametrize("peer", ["sglang", "vllm"])
def test_latent_heads_come_back(tmp_path, peer):
    there_and_back(saved(tmp_path, latent()), tmp_path, peer)


def test_latent_heads_are_refused_where_there_is_no_class(tmp_path):
    source = saved(tmp_path, latent())
    for peer in ("speculators", "eagle"):
        with pytest.raises(UserError, match="no EAGLE-3 layer with latent attention"):
            export_draft(source, tmp_path / peer, format=peer)
    head = latent()
    wide = saved(tmp_path / "b", latent(mla=replace(head.config.mla, interleaved=False)))
    with pytest.raises(UserError, match="lie side by side"):
        export_draft(wide, tmp_path / "vllm", format="vllm")


def test_what_a_class_of_latent_attention_has_not_is_named(tmp_path):
    mla = latent().config.mla
    for changes, peer, words in (
        ({"attention_bias": True}, "vllm", "latent attention has no biases"),
        ({"attention_bias": True}, "sglang", "no biases of attention"),
        ({"mla": replace(mla, q_lora_rank=None)}, "sglang", "needs a bottleneck for queries"),
    ):
        source = saved(tmp_path / f"{peer}-{len(words)}", latent(**changes))
        with pytest.raises(UserError, match=words):
            export_draft(source, tmp_path / "out", format=peer)
    there_and_back(saved(tmp_path, latent(mla=replace(mla, q_lora_rank=None))), tmp_path, "vllm")
    there_and_back(saved(tmp_path, latent(mla=replace(mla, interleaved=False))), tmp_path, "sglang")


def test_an_embedding_that_sglang_would_replace_is_compared_with_the_targets(tmp_path):
    target = make_target(tmp_path / "target")
    model = load_target(target)
    source = saved(tmp_path, tiny_head(model, aux_layer_ids=(1, 2, 3)))
    for factor in (1.0, 1.5):
        own = model.embed_tokens.weight.detach() * factor
        tensors = load_file(source / "model.safetensors") | {"embed_tokens.weight": own}
        save_file(tensors, source / "model.safetensors")
        if factor == 1.0:
            export_draft(source, tmp_path / "copy", format="sglang", target=target)
    with pytest.raises(UserError, match="takes the target's embedding"):
        export_draft(source, tmp_path / "own", format="sglang", target=target)


def test_an_embedding_that_sglang_replaces_by_that_of_an_unknown_target_is_a_warning(tmp_path):
    source = saved(tmp_path, eagle3())
    tensors = load_file(source / "model.safetensors") | {"embed_tokens.weight": torch.randn(131, 48)}
    save_file(tensors, source / "model.safetensors")
    with pytest.warns(UserWarning, match="embed_tokens.weight"):
        export_draft(source, tmp_path / "out", format="sglang")


def test_a_head_of_another_width_than_its_target_needs_an_embedding_of_its_own(tmp_path):
    source = saved(tmp_path, eagle3(target_hidden_size=40))
    for peer in PEERS:
        with pytest.raises(UserError, match="narrower or wider than its target"):
            export_draft(source, tmp_path / peer, format=peer)
    tensors = load_file(source / "model.safetensors") | {"embed_tokens.weight": torch.randn(131, 48)}
    save_file(tensors, source / "model.safetensors")
    for peer in ("sglang", "vllm"):
        there_and_back(source, tmp_path, peer)
    with pytest.raises(UserError, match="states of the head's own width only"):
        export_draft(source, tmp_path / "out", format="speculators")


@pytest.mark.parametrize(
    ("lengths", "steps"), [({}, 4), ({"3,1,4": 1.5, "5,4,16": 2.0}, 3), ({"none": 1.0, "6,1,7": 2.0}, 6)]
)
def test_the_proposal_for_speculators_has_the_steps_that_were_measured(tmp_path, lengths, steps):
    save_draft(eagle3(), tmp_path / "ours", metadata={"accept_length": lengths})
    export_draft(tmp_path / "ours", tmp_path / "theirs", format="speculators")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())["speculators_config"]
    assert [each["speculative_tokens"] for each in config["proposal_methods"]] == [steps]


def test_the_verifier_of_speculators_is_the_target(tmp_path):
    target = make_target(tmp_path / "small")
    head = tiny_head(load_target(target), aux_layer_ids=(1, 2, 3))
    head.config = replace(head.config, target="org/another")
    source = saved(tmp_path, head)
    unknown = write_draft_as(open_draft(source), EAGLE3_KIND, "speculators", Served()).config
    verifier = unknown["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "org/another", "architectures": []}
    export_draft(source, tmp_path / "named", format="speculators", target=target)
    config = json.loads((tmp_path / "named" / "config.json").read_text())["speculators_config"]
    assert config["verifier"] == {"name_or_path": "small", "architectures": ["LlamaForCausalLM"]}


BIASES = {
    "fc": {},
    "none": {"fc_bias": False},
    "queries": {"attention_bias": True, "fc_bias": False},
    "all": {"attention_bias": True, "attention_out_bias": True},
    "output": {"attention_out_bias": True, "fc_bias": False},
}


@pytest.mark.parametrize("peer", ["sglang", "vllm", "eagle"])
@pytest.mark.parametrize("name", BIASES)
def test_eagle1_heads_come_back(tmp_path, name, peer):
    source = saved(tmp_path, eagle1(**BIASES[name]))
    if peer == "vllm" and BIASES[name].get("fc_bias", True):
        with pytest.raises(UserError, match="the fc of its EAGLE class has no bias"):
            export_draft(source, tmp_path / peer, format=peer, dtype=None)
    elif peer == "eagle" and BIASES[name].get("attention_out_bias"):
        with pytest.raises(UserError, match="no bias after its attention"):
            export_draft(source, tmp_path / peer, format=peer, dtype=None)
    else:
        there_and_back(source, tmp_path, peer)
        names = set(load_file(tmp_path / peer / "model.safetensors"))
        assert ("fc.bias" in names) == (peer == "sglang" or BIASES[name].get("fc_bias", True))
        raw = json.loads((tmp_path / peer / "config.json").read_text())
        if peer != "eagle":  # they take this key for biases of attention
            assert "bias" not in raw
        qkv = BIASES[name].get("attention_bias", False)
        out = BIASES[name].get("attention_out_bias", False)
        layer = {each.split(".")[-2] for each in names if each.endswith("_proj.bias")}
        if peer == "sglang":  # which has all of them or none
            assert raw["attention_bias"] == (qkv or out)
            everywhere = {"q_proj", "k_proj", "v_proj", "o_proj"}
            assert layer == (everywhere if qkv or out else set())
        if peer == "vllm":
            assert (raw["qkv_bias"], raw["attention_bias"]) == (qkv, out)


@pytest.mark.parametrize(
    ("changes", "peer", "words"),
    [
        ({"head_dim": 10}, "eagle", "heads together are as wide as the hidden size"),
        ({"rope_scaling": ROPE}, "eagle", "no scaling of the kind llama3"),
    ],
)
def test_an_eagle1_head_that_eagles_class_cannot_hold_is_refused(tmp_path, changes, peer, words):
    source = saved(tmp_path, eagle1(fc_bias=False, **changes))
    with pytest.raises(UserError, match=words):
        export_draft(source, tmp_path / peer, format=peer, dtype=None)
    for other in ("sglang", "vllm"):
        there_and_back(source, tmp_path, other)


def test_an_output_layer_of_an_eagle1_head_has_no_place_in_vllm(tmp_path):
    source = saved(tmp_path, eagle1(fc_bias=False))
    tensors = load_file(source / "model.safetensors") | {"lm_head.weight": torch.randn(131, 48)}
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(UserError, match="no place for lm_head.weight"):
        export_draft(source, tmp_path / "vllm", format="vllm", dtype=None)
    for peer in ("sglang", "eagle"):
        there_and_back(source, tmp_path, peer)


@pytest.mark.parametrize("peer", ["sglang", "eagle"])
def test_a_peer_that_does_not_read_a_factor_of_logits_is_named(tmp_path, peer):
    files = open_draft(saved(tmp_path, eagle1(fc_bias=False, logit_scale=0.25)))
    with pytest.warns(match=rf"{peer} does not read logit_scale \(0.25\)") as found:
        write_draft_as(files, EAGLE1, peer, Served())
    assert len(found) == 1


def test_vllm_reads_a_factor_of_logits(tmp_path, recwarn):
    files = open_draft(saved(tmp_path, eagle1(fc_bias=False, logit_scale=0.25)))
    recwarn.clear()
    write_draft_as(files, EAGLE1, "vllm", Served())
    assert not list(recwarn)


def test_eagle1_heads_are_refused_for_speculators(tmp_path):
    with pytest.raises(UserError, match="dropped its class for EAGLE-1"):
        export_draft(saved(tmp_path, eagle1()), tmp_path / "out", format="speculators")


@pytest.mark.parametrize(("peer", "count"), [("sglang", 1), ("vllm", 1), ("vllm", 2)])
def test_modules_come_back(tmp_path, peer, count):
    source = saved(tmp_path, modules(tmp_path, count))
    there_and_back(source, tmp_path, peer)
    names = set(load_file(tmp_path / peer / "model.safetensors"))
    first = 0 if peer == "sglang" else count
    assert {int(name.split(".")[2]) for name in names} == set(range(first, first + count))
    loaded, ours = load_draft(tmp_path / peer), load_draft(source)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), ours.parameters(), strict=True))


def test_modules_are_refused_where_they_cannot_be_served(tmp_path):
    several = saved(tmp_path / "a", modules(tmp_path / "a", 2))
    with pytest.raises(UserError, match="one module for all steps, and these are 2"):
        export_draft(several, tmp_path / "out", format="sglang")
    dense = saved(tmp_path / "b", modules(tmp_path / "b", n_routed_experts=None))
    for peer in ("sglang", "vllm"):
        with pytest.raises(UserError, match="mixtures of experts, and these have an MLP"):
            export_draft(dense, tmp_path / "out", format=peer)
    own = saved(tmp_path / "c", modules(tmp_path / "c", copies=True))  # of an unknown target
    for peer in ("sglang", "vllm"):
        with pytest.raises(UserError, match="uses the target's output layer, and these modules have their"):
            export_draft(own, tmp_path / "out", format=peer)
    halves = saved(tmp_path / "d", modules(tmp_path / "d", rope_interleave=False))
    with pytest.raises(UserError, match="lie side by side"):
        export_draft(halves, tmp_path / "out", format="vllm")
    there_and_back(halves, tmp_path, "sglang")
    for peer in ("speculators", "eagle"):
        with pytest.raises(UserError, match="no class for DeepSeek's MTP modules"):
            export_draft(several, tmp_path / "out", format=peer)


@pytest.mark.parametrize("one", PEERS)
@pytest.mark.parametrize("two", PEERS)
def test_every_pair_is_the_same_by_whichever_way(tmp_path, one, two):
    """ours -> one -> two is ours -> two, and two -> ours is ours again."""
    source = saved(tmp_path, eagle3())
    export_draft(source, tmp_path / "one", format=one, dtype=None)
    export_draft(tmp_path / "one", tmp_path / "two", format=two, dtype=None)
    export_draft(source, tmp_path / "straight", format=two, dtype=None)
    assert_same(tmp_path / "two", tmp_path / "straight")
    import_draft(tmp_path / "two", tmp_path / "back")
    assert_same(tmp_path / "back", source)


@pytest.mark.parametrize("peer", PEERS)
def test_the_shipped_head_comes_back(tmp_path, peer):
    shutil.copytree(SHIPPED, tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    target = make_target(tmp_path / "target")  # nothing is read of it but its family
    raw = json.loads((target / "config.json").read_text())
    sizes = {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30, "num_attention_heads": 9}
    sizes |= {"num_key_value_heads": 3, "max_position_embeddings": 8192, "head_dim": 64}
    (target / "config.json").write_text(json.dumps(raw | sizes))
    export_draft(tmp_path / "ours", tmp_path / peer, format=peer, dtype=None, target=target)
    import_draft(tmp_path / peer, tmp_path / "back")
    assert_same(tmp_path / "ours", tmp_path / "back")
    ids = json.loads((tmp_path / peer / "config.json").read_text())
    ids = ids.get("eagle_config", ids)["eagle_aux_hidden_state_layer_ids"]
    assert ids == ([1, 14, 26] if peer == "sglang" else [2, 15, 27])
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]


def sglang_captures(ids: list[int], *, is_deepseek: bool) -> list[int]:
    """Inputs of which layers SGLang 0.5.23 hands to the head: ``set_eagle3_layers_to_capture`` of
    ``models/targets/llama.py`` (and of every other family but one), and of ``models/deepseek_v2.py``."""
    if is_deepseek and ids[0] != 1:
        return ids
    return [layer + 1 for layer in ids]


@pytest.mark.parametrize("is_deepseek", [False, True])
@pytest.mark.parametrize("ids", [(2, 6, 9), (3, 6, 9), (1, 5, 8), (2, 3, 10), (0, 6, 9), (2, 6, 12)])
def test_sglang_captures_the_layers_that_the_head_was_trained_with(tmp_path, ids, is_deepseek):
    source = saved(tmp_path, eagle3(aux_layer_ids=ids))
    target = tmp_path / "target"
    raw = v3(num_hidden_layers=12, hidden_size=48, vocab_size=131).to_dict() if is_deepseek else None
    if raw is None:
        make_target(target)
        raw = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 12}
    target.mkdir(exist_ok=True)
    architecture = "DeepseekV3ForCausalLM" if is_deepseek else "LlamaForCausalLM"
    raw |= {"hidden_size": 48, "vocab_size": 131, "architectures": [architecture]}
    (target / "config.json").write_text(json.dumps(raw, default=str))
    impossible = ids[-1] == 12 or (is_deepseek and ids[0] == 1) or (not is_deepseek and ids[0] == 0)
    if impossible:
        with pytest.raises(UserError, match="cannot be written for SGLang"):
            export_draft(source, tmp_path / "out", format="sglang", target=target)
        return
    export_draft(source, tmp_path / "out", format="sglang", target=target)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["eagle_config"]
    assert sglang_captures(written["eagle_aux_hidden_state_layer_ids"], is_deepseek=is_deepseek) == list(ids)
    assert load_draft(tmp_path / "out").config.aux_layer_ids == ids


def test_without_the_targets_family_unusual_layers_are_not_guessed_at(tmp_path):
    source = saved(tmp_path, eagle3(aux_layer_ids=(3, 6, 9)))
    with pytest.raises(UserError, match="depends on the target's family") as error:
        export_draft(source, tmp_path / "out", format="sglang")
    assert "--target" in error.value.remedy


@pytest.mark.parametrize("norms", [{}, {"fc_norm": True}, {"norm_before_fc": True}], ids=str)
def test_layers_out_of_order_are_written_in_ascending_order(tmp_path, norms):
    head = eagle3(aux_layer_ids=(6, 2, 9), **norms)
    export_draft(saved(tmp_path, head), tmp_path / "vllm", format="vllm", dtype=None)
    written = load_draft(tmp_path / "vllm")
    assert written.config.aux_layer_ids == (2, 6, 9)
    assert "target layers 2, 6, 9" in (tmp_path / "vllm" / "README.md").read_text()
    low, middle, high = torch.randn(3, 5, head.config.target_hidden_size).unbind()
    fused = written.fuse(torch.cat((low, middle, high), -1))
    torch.testing.assert_close(fused, head.fuse(torch.cat((middle, low, high), -1)))


def in_fp8(folder: Path, columns: int) -> Path:
    """The draft with fc in fp8, whose scales are of 16 rows and so many columns."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    rows, width = tensors["fc.weight"].shape
    scales = torch.rand(rows // 16, -(-width // columns)) + 0.1
    spread = scales.repeat_interleave(16, 0).repeat_interleave(columns, 1)[:, :width]
    tensors["fc.weight"] = (tensors["fc.weight"] / spread).to(torch.float8_e4m3fn)
    save_file({**tensors, "fc.weight_scale_inv": scales}, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, columns]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("columns", [16, 48, 144])
def test_scales_of_blocks_in_fp8_go_with_their_layers(tmp_path, columns):
    source = in_fp8(saved(tmp_path, eagle3(aux_layer_ids=(9, 2, 6))), columns)
    export_draft(source, tmp_path / "vllm", format="vllm", dtype=None)
    low, middle, high = torch.randn(3, 5, 48).unbind()
    fused = load_draft(tmp_path / "vllm").fuse(torch.cat((low, middle, high), -1))
    torch.testing.assert_close(fused, load_draft(source).fuse(torch.cat((high, low, middle), -1)))


def test_a_scale_in_fp8_of_two_layers_at_once_is_refused(tmp_path):
    source = in_fp8(saved(tmp_path, eagle3(aux_layer_ids=(9, 2, 6))), 32)
    with pytest.raises(UserError, match="two layers at once") as error:
        export_draft(source, tmp_path / "vllm", format="vllm", dtype=None)
    assert "--dtype" in error.value.remedy
    export_draft(source, tmp_path / "vllm", format="vllm")


@pytest.mark.parametrize("name", ["fc.weight", "fc_norm.1.weight", "input_norm.weight"])
def test_layers_out_of_order_need_all_that_reads_them(tmp_path, name):
    """Without a target the draft is not checked before."""
    source = saved(tmp_path, eagle3(aux_layer_ids=(9, 2, 6), fc_norm=True, norm_before_fc=True))
    tensors = load_file(source / "model.safetensors")
    tensors[name] = tensors[name][..., :-1].contiguous()
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(UserError, match=rf"{name} has shape"):
        export_draft(source, tmp_path / "vllm", format="vllm", dtype=None)
    del tensors[name]
    save_file(tensors, source / "model.safetensors")
    if name != "input_norm.weight":
        with pytest.raises(UserError, match=f"{name} is missing"):
            export_draft(source, tmp_path / "vllm", format="vllm", dtype=None)


def test_a_layer_that_is_read_twice_is_refused(tmp_path):
    source = saved(tmp_path, eagle3(aux_layer_ids=(6, 2, 6)))
    for peer in PEERS:
        with pytest.raises(UserError, match="captures each once") as error:
            export_draft(source, tmp_path / peer, format=peer)
        assert "head.aux_layer_ids" in error.value.remedy
