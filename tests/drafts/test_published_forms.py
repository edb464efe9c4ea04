"""Heads as their trainers write them, in every form that says the same: what config and tensors leave out."""

import json
from dataclasses import replace

import pytest
import torch
from tiny import tiny_dflash, tiny_dspark, tiny_head, tiny_p_eagle, tiny_target

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.eagle3.kind import EAGLE3
from eagle_kit.drafts.files.draft_files import DraftFiles, open_draft
from eagle_kit.drafts.p_eagle.kind import P_EAGLE
from eagle_kit.drafts.registry import find_kind, kind_of
from eagle_kit.models.config import TargetConfig

IDS = "eagle_aux_hidden_state_layer_ids"
TARGET = tiny_target(num_layers=12)


def files_of(head=None, **changes) -> DraftFiles:
    """Files of a head as another project's: without our own part. A value of None removes a key."""
    files = EAGLE3.write(tiny_head(TARGET) if head is None else head, torch.float32)
    config = {key: value for key, value in files.config.items() if key != "eagle_kit"} | changes
    return DraftFiles({key: value for key, value in config.items() if value is not None}, files.tensors)


def renamed(files: DraftFiles, prefix: str = "model.") -> DraftFiles:
    """The same with the names of NeMo and vLLM."""
    tensors = {
        name
        if name in ("d2t", "t2d", "lm_head.weight")
        else prefix + name.replace("midlayer.", "layers.0."): t
        for name, t in files.tensors.items()
    }
    return replace(files, tensors=tensors)


NAMES = {
    "as trained by EAGLE": {"architectures": ["LlamaForCausalLM"]},
    "none": {"architectures": None},
    "NeMo's": {"architectures": ["LlamaEagle3DraftModel"], "num_aux_hidden_states": 3},
    "layers of the target": {"num_hidden_layers": 12},
    "no size of the vocabulary": {"draft_vocab_size": None},
    "no size of the target": {"target_hidden_size": None},
}


@pytest.mark.parametrize("name", NAMES)
def test_a_head_is_told_by_its_tensors(name):
    head = tiny_head(TARGET, target_hidden_size=40)
    files = renamed(files_of(head, **NAMES[name]))
    assert find_kind(files) is EAGLE3
    read = EAGLE3.read(files)
    assert replace(read.config, target="", template_hash="") == head.config
    assert torch.equal(read.midlayer.self_attn.qkv_proj.weight, head.midlayer.self_attn.qkv_proj.weight)


def test_eagle1s_tensors_are_not_taken_for_eagle3s():
    files = files_of()
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in files.tensors.items()
        if "input_layernorm" not in name and "hidden_norm" not in name and "." in name
    }
    tensors["fc.weight"] = torch.randn(48, 96)
    assert find_kind(replace(files, tensors=tensors)).name == "eagle1"


class TestLayerIds:
    def test_of_the_top_level_are_inputs(self):
        files = files_of(eagle_config=None, **{IDS: [1, 5, 8]})
        assert EAGLE3.read_config(files, TARGET.config).aux_layer_ids == (1, 5, 8)
        (finding,) = (
            f for f in EAGLE3.check(files, EAGLE3.read_config(files), TARGET.config) if "ids" in f.subject
        )
        assert finding.level == "warning" and "output of layer i" in finding.cause

    def test_of_the_top_level_may_be_four(self):
        head = tiny_head(TARGET, aux_layer_ids=(1, 4, 7, 10))
        files = files_of(head, eagle_config=None, **{IDS: [1, 4, 7, 10]})
        assert EAGLE3.read(files, TARGET).config.aux_layer_ids == (1, 4, 7, 10)

    @pytest.mark.parametrize("nested", [[2, 6, 9], [1, 5, 8]])
    def test_of_both_places_may_be_one_in_two_numberings(self, nested):
        files = files_of(eagle_config={IDS: nested}, **{IDS: [2, 6, 9]})
        assert EAGLE3.read_config(files).aux_layer_ids == (2, 6, 9)

    def test_of_both_places_that_differ_are_refused(self):
        files = files_of(eagle_config={IDS: [2, 6, 9]}, **{IDS: [1, 5, 9]})
        with pytest.raises(UserError, match=r"\[1, 5, 9\] at its top level and \[2, 6, 9\]"):
            EAGLE3.read_config(files)

    def test_that_are_not_named_are_as_many_as_fc_reads(self):
        files = files_of(tiny_head(TARGET, aux_layer_ids=(1, 4, 7, 10)), eagle_config=None)
        with pytest.raises(UserError, match="reads 4 states"):
            EAGLE3.read_config(files, TARGET.config)

    @pytest.mark.parametrize(("ids", "level"), [([1, 5, 8], "warning"), ([2, 6, 9], "ok")])
    def test_of_converted_heads_that_look_like_outputs_are_named(self, ids, level):
        layer = {**files_of().config, "model_type": "llama"}
        config = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "norm_before_residual": False,
            "draft_vocab_size": 67,
            IDS: ids,
        }
        files = DraftFiles(config, files_of().tensors)
        read = EAGLE3.read_config(files)
        assert read.aux_layer_ids == tuple(ids)
        (finding,) = (f for f in EAGLE3.check(files, read, TARGET.config) if f.subject == "layer ids")
        assert finding.level == level


HALF = [
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
]
TWO = {
    "full_attention": {"rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


class TestRope:
    @pytest.mark.parametrize("changes", HALF)
    def test_a_share_of_a_head_is_rotated(self, changes):
        head = EAGLE3.read(files_of(**{"rope_parameters": None, **changes}))
        assert head.config.rotary_dim == 4 and len(head.rope.inv_freq) == 2
        whole = EAGLE3.read(files_of(partial_rotary_factor=1.0))
        assert whole.config.rotary_dim is None and len(whole.rope.inv_freq) == 4

    def test_of_the_heads_kind_of_layer_is_taken(self):
        assert EAGLE3.read_config(files_of(rope_parameters=TWO)).rope_theta == 1e6
        kinds = {"layer_types": ["sliding_attention"] * 12, "sliding_window": 65}
        assert EAGLE3.read_config(files_of(rope_parameters=TWO, **kinds)).rope_theta == 1e4
        kinds = {"use_sliding_window": True, "sliding_window": 65}
        assert EAGLE3.read_config(files_of(rope_parameters=TWO, **kinds)).rope_theta == 1e4

    def test_of_speculators_full_attention_is_refused_where_its_trainer_rotates_otherwise(self):
        layer = {**files_of().config, "model_type": "llama", "rope_parameters": TWO}
        config = {"speculators_model_type": "eagle3", "norm_before_residual": True, IDS: [2, 6, 9]}
        with pytest.raises(UserError, match="with the rotation of sliding windows"):
            EAGLE3.read_config(DraftFiles(config | {"transformer_layer_config": layer}, {}))
        layer |= {"layer_types": ["sliding_attention"], "sliding_window": 65}
        read = EAGLE3.read_config(DraftFiles(config | {"transformer_layer_config": layer}, {}))
        assert read.rope_theta == 1e4

    def test_of_three_axes_is_the_plain_one_for_text(self):
        rope = {"rope_type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 5e5}
        read = EAGLE3.read_config(files_of(rope_parameters=rope))
        assert (read.rope_theta, read.rope_scaling) == (5e5, None)

    @pytest.mark.parametrize("changes", HALF)
    def test_of_a_target_whose_family_rotates_all_is_refused_by_name(self, changes):
        config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 48, "num_attention_heads": 6}
        config |= {"num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 131}
        assert TargetConfig.from_dict(config).rotary_dim is None
        with pytest.raises(UserError, match="says partial_rotary_factor 0.5"):
            TargetConfig.from_dict(config | changes)

    def test_of_a_target_is_that_of_its_kind_of_layers(self):
        config = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 48, "num_attention_heads": 6}
        config |= {"num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 131, "rope_parameters": TWO}
        assert TargetConfig.from_dict(config).rope_theta == 1e6
        with pytest.raises(UserError, match="rotate differently"):
            TargetConfig.from_dict(config | {"layer_types": ["full_attention", "sliding_attention"]})


@pytest.mark.parametrize("make", [tiny_dflash, tiny_dspark, tiny_p_eagle])
def test_a_head_that_is_cut_off_is_not_taken_for_a_shorter_one(make):
    head = make(TARGET, num_layers=3)
    kind = kind_of(head.config)
    files = kind.write(head, torch.float32)
    kept = {name: tensor for name, tensor in files.tensors.items() if not name.startswith("layers.2.")}
    cut = replace(files, tensors=kept)
    with pytest.raises(UserError, match=r"layers\.2\.\S+ is missing"):
        kind.weights(cut, kind.read_config(cut, TARGET.config))

    # A number that is the target's says nothing of the head.
    kinds = {"layer_types": ["full_attention"] * 12} if "layer_types" in files.config else {}
    copied = replace(files, config=files.config | {"num_hidden_layers": 12} | kinds)
    assert kind.read_config(copied, TARGET.config) == kind.read_config(files, TARGET.config)


def test_shards_of_a_pickled_head_are_read_by_their_index(tmp_path):
    files = files_of()
    (tmp_path / "config.json").write_text(json.dumps(files.config))
    names = list(files.tensors)
    shards = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
    for file, part in shards.items():
        torch.save({name: files.tensors[name] for name in part}, tmp_path / file)
    table = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    read = open_draft(tmp_path)
    assert set(read.tensors) == set(names) and find_kind(read) is EAGLE3
    assert all(torch.equal(read.tensors[name], files.tensors[name]) for name in names)
    (tmp_path / file).unlink()
    with pytest.raises(UserError, match=f"{file} is missing"):
        dict(open_draft(tmp_path).tensors)


class TestEndsOfItsOwn:
    """Embedding and output layer."""

    def whole(self, **changes) -> DraftFiles:
        files = files_of(tiny_head(TARGET, draft_vocab_size=131), **changes)
        drop = ("lm_head.weight", "d2t", "t2d")
        return replace(files, tensors={name: t for name, t in files.tensors.items() if name not in drop})

    def test_a_tied_output_layer_is_the_embedding(self):
        target = tiny_target(num_layers=12, tie_word_embeddings=False)
        files = self.whole(tie_word_embeddings=True)
        assert torch.equal(EAGLE3.read(files, target).lm_head.weight, target.embed_tokens.weight)
        own = target.embed_tokens.weight + 1.0
        brought = replace(files, tensors={**files.tensors, "embed_tokens.weight": own})
        head = EAGLE3.read(brought, target)
        assert torch.equal(head.lm_head.weight, own) and torch.equal(head.embed_tokens.weight, own)
        borrowed = EAGLE3.read(self.whole(), target)
        assert torch.equal(borrowed.lm_head.weight, target.head_weight)

    def test_a_tied_head_needs_its_target_or_its_embedding(self):
        with pytest.raises(UserError, match="tie_word_embeddings"):
            EAGLE3.read(self.whole(tie_word_embeddings=True))

    @pytest.mark.parametrize("make", [tiny_head, tiny_p_eagle])
    def test_rows_that_are_not_the_targets_make_an_embedding_its_own(self, make):
        head = make(TARGET)
        kind = EAGLE3 if make is tiny_head else P_EAGLE
        files = kind.write(head, torch.float32)
        table = TARGET.embed_tokens.weight.detach().clone()
        same = {**files.tensors, "embed_tokens.weight": table.bfloat16().float()}
        assert kind.read(replace(files, tensors=same), TARGET).embed_tokens is None
        table[[3, 5]] *= 1.5
        head = kind.read(replace(files, tensors={**files.tensors, "embed_tokens.weight": table}), TARGET)
        assert torch.equal(head.embedding(TARGET.embed_tokens.weight)[3], table[3])
        again = kind.write(head, torch.float32)
        assert torch.equal(kind.read(again).embed_tokens.weight, head.embed_tokens.weight)
