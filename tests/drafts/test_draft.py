"""Draft folders: the published layout, read back to the bit; other spellings; broken folders refused."""

import errno
import json
import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from published_eagle3 import PublishedEagle3
from safetensors.torch import load_file, save_file
from tiny import tiny_head, tiny_target

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.eagle3.kind import EAGLE3
from eagle_kit.drafts.files.draft import load_draft, save_draft
from eagle_kit.drafts.files.draft_files import open_draft, read_metadata
from eagle_kit.ops.attention.prefill import prefill_attention

WEIGHTS, CONFIG = "model.safetensors", "config.json"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def head(target):
    head = tiny_head(target)
    head.config = replace(head.config, target="tiny", template_hash="0123456789abcdef")
    return head


@pytest.fixture
def folder(head, tmp_path):
    """A saved draft."""
    save_draft(head, tmp_path / "draft", metadata={"tokens_seen": 12})
    return tmp_path / "draft"


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def change_config(folder: Path, **values) -> dict:
    """Set keys; a value of ... removes the key."""
    config = {**json.loads((folder / CONFIG).read_text()), **values}
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / CONFIG).write_text(json.dumps(config))
    return config


def rename(tensors: dict, old: str, new: str) -> None:
    for name in list(tensors):
        if name.startswith(old):
            tensors[new + name.removeprefix(old)] = tensors.pop(name)


def same(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_draft_is_written_through_a_link_to_another_disk(head, folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "new").symlink_to(tmp_path / "disk" / "new")
    for name in ("link", "new"):
        save_draft(head, tmp_path / name, metadata={"tokens_seen": 13})
        assert (tmp_path / name).is_symlink() and read_metadata(tmp_path / name) == {"tokens_seen": 13}
    assert read_metadata(folder) == {"tokens_seen": 13}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "draft", "link", "new"]


@pytest.mark.parametrize(
    ("number", "remedy"), [(28, "Free some space"), (30, "Make it writable"), (13, "Make it writable")]
)
def test_the_remedy_of_a_draft_that_cannot_be_written_is_that_of_the_error(
    head, tmp_path, monkeypatch, number, remedy
):
    def refused(*args, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("safetensors.torch.save_file", refused)
    with pytest.raises(UserError) as caught:
        save_draft(head, tmp_path / "draft", metadata={})
    assert caught.value.remedy.startswith(remedy)
    assert not [*tmp_path.iterdir()]


def test_a_saved_head_comes_back_to_the_bit(head, folder):
    loaded = load_draft(folder)
    assert loaded.config == head.config
    assert same(loaded, head)
    assert read_metadata(folder) == {"tokens_seen": 12}


def test_bfloat16_halves_the_file_and_keeps_the_map(head, tmp_path):
    save_draft(head, tmp_path / "half", metadata={}, dtype=torch.bfloat16)
    save_draft(head, tmp_path / "full", metadata={})
    loaded = load_draft(tmp_path / "half")
    assert loaded.lm_head.weight.dtype == torch.float32
    assert torch.equal(loaded.lm_head.weight, head.lm_head.weight.bfloat16().float())
    assert torch.equal(loaded.d2t, head.d2t)
    sizes = [(tmp_path / name / WEIGHTS).stat().st_size for name in ("half", "full")]
    assert sizes[0] < 0.6 * sizes[1]
    assert json.loads((tmp_path / "half" / CONFIG).read_text())["torch_dtype"] == "bfloat16"


def test_names_shapes_and_types_are_the_published_ones(folder):
    size, width, hot, vocab = 48, 96, 67, 131
    layer = {
        "self_attn.q_proj": (6 * 8, 2 * size),
        "self_attn.k_proj": (2 * 8, 2 * size),
        "self_attn.v_proj": (2 * 8, 2 * size),
        "self_attn.o_proj": (size, 6 * 8),
        "mlp.gate_proj": (width, size),
        "mlp.up_proj": (width, size),
        "mlp.down_proj": (size, width),
        "hidden_norm": (size,),
        "input_layernorm": (size,),
        "post_attention_layernorm": (size,),
    }
    expected = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    expected |= {"fc.weight": (size, 3 * size), "norm.weight": (size,), "lm_head.weight": (hot, size)}
    expected |= {"d2t": (hot,), "t2d": (vocab,)}
    tensors = load_file(folder / WEIGHTS)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)


def test_the_config_says_what_other_engines_ask(target, folder):
    config = json.loads((folder / CONFIG).read_text())
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 48,
        "target_hidden_size": 48,
        "head_dim": 8,
        "vocab_size": 131,
        "draft_vocab_size": 67,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert config["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [2, 2, 1],
        "eagle_aux_hidden_state_convention": "input",
        "use_aux_hidden_state": True,
    }
    assert config["eagle_kit"]["target"] == "tiny"
    assert config["eagle_kit"]["template_hash"] == "0123456789abcdef"


@pytest.mark.parametrize(
    "flags",
    [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_residual": True}],
    ids=["eagle3", "eagle3.1", "norm before residual"],
)
def test_a_saved_head_computes_the_published_forward(target, tmp_path, flags):
    save_draft(tiny_head(target, **flags), tmp_path / "draft", metadata={})
    ours, published = load_draft(tmp_path / "draft").eval(), PublishedEagle3(tmp_path / "draft")
    generator = torch.Generator().manual_seed(5)
    aux = torch.randn(9, 3 * 48, generator=generator)
    embeds = torch.randn(10, 48, generator=generator)
    with torch.no_grad():
        # eight committed rows at once, then two draft steps that feed back their own output
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def attend(layer, q, k, v):
            seen.append((k, v))
            keys, values = torch.cat([k for k, _ in seen]), torch.cat([v for _, v in seen])
            return prefill_attention(q, keys, values, 8**-0.5)

        fused = ours.fuse(aux)
        out = [ours(fused[:8], embeds[:8], torch.arange(8), attend)]
        out += [ours(out[-1][-1:], embeds[8:9], torch.tensor([8]), attend)]
        out += [ours(out[-1][-1:], embeds[9:10], torch.tensor([9]), attend)]
        rows = torch.cat(out)
        logits = torch.full((10, 131), float("-inf")).index_copy(1, ours.token_map, ours.logits(rows))
    hidden = None
    for i in range(10):
        hidden = published.fuse(aux[i].double()) if i < 8 else hidden
        hidden, want = published.step(hidden, embeds[i].double(), i)
        assert (rows[i] - hidden).abs().max() < 1e-4 * hidden.abs().max(), f"row {i}"
        named = want > float("-inf")
        assert torch.equal(named, logits[i] > float("-inf"))
        assert (logits[i][named] - want[named]).abs().max() < 1e-4 * want[named].abs().max(), f"row {i}"


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0.", "model.midlayer."])
def test_other_spellings_of_the_layer_are_read(head, folder, prefix):
    change_weights(folder, lambda tensors: rename(tensors, "midlayer.", prefix))
    assert same(load_draft(folder), head)


def test_a_missing_t2d_is_rebuilt_from_an_unsorted_d2t(head, folder):
    assert (head.token_map.diff() < 0).any()
    change_weights(folder, lambda tensors: tensors.pop("t2d"))
    loaded = load_draft(folder)
    assert torch.equal(loaded.t2d, head.t2d)
    assert int(loaded.t2d.sum()) == 67


def test_an_old_pytorch_file_is_read(head, folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    assert same(load_draft(folder), head)
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")
    with pytest.raises(UserError, match="corrupt or truncated"):
        load_draft(folder)


@pytest.mark.parametrize("value", [None, ...], ids=["null", "absent"])
def test_without_a_draft_vocabulary_the_targets_is_meant(target, tmp_path, value):
    head = tiny_head(target, draft_vocab_size=131)
    head.set_vocab_map(torch.zeros(131, dtype=torch.int64), torch.ones(131, dtype=torch.bool))
    save_draft(head, tmp_path / "draft", metadata={})
    change_config(tmp_path / "draft", draft_vocab_size=value, eagle_kit=...)
    change_weights(tmp_path / "draft", lambda tensors: (tensors.pop("d2t"), tensors.pop("t2d")))
    assert same(load_draft(tmp_path / "draft"), head)
    change_weights(tmp_path / "draft", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(UserError, match="no lm_head because it shares its target's"):
        load_draft(tmp_path / "draft")
    loaded = load_draft(tmp_path / "draft", target=target)
    assert torch.equal(loaded.lm_head.weight, target.head_weight)
    assert loaded.lm_head.weight.data_ptr() != target.head_weight.data_ptr()


def test_an_embedding_that_is_the_targets_is_left_out_and_another_one_used(target, head, folder):
    own = target.embed_tokens.weight.detach().clone()
    change_weights(folder, lambda tensors: tensors.update({"embed_tokens.weight": own}))
    assert same(load_draft(folder, target=target), head)
    own[7] += 0.1
    change_weights(folder, lambda tensors: tensors.update({"embed_tokens.weight": own}))
    read = load_draft(folder, target=target)
    assert torch.equal(read.embedding(target.embed_tokens.weight), own)
    change_weights(folder, lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(130, 48)}))
    with pytest.raises(UserError, match="embed_tokens.weight has shape"):
        load_draft(folder)


def test_layer_ids_in_the_output_numbering_are_converted(folder):
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}
    change_config(folder, eagle_config={**ids, "eagle_aux_hidden_state_convention": "output"})
    assert EAGLE3.read_config(open_draft(folder)).aux_layer_ids == (2, 15, 27)
    change_config(folder, eagle_config=ids)
    assert EAGLE3.read_config(open_draft(folder)).aux_layer_ids == (1, 14, 26)
    change_config(folder, eagle_config={**ids, "eagle_aux_hidden_state_convention": "middle"})
    with pytest.raises(UserError, match="unknown convention 'middle'"):
        EAGLE3.read_config(open_draft(folder))


def test_a_draft_that_names_no_layers_takes_its_targets_usual_ones(target, head, folder):
    change_config(folder, eagle_config=...)
    with pytest.raises(UserError, match="does not say which target layers"):
        load_draft(folder)
    assert load_draft(folder, target=target).config.aux_layer_ids == target.config.default_aux_layer_ids


@pytest.mark.parametrize("ids", [[], "2", [2, "15", 27], [2.5, 3, 4], [True, 2, 3]])
def test_layer_ids_that_are_no_list_of_numbers_are_refused(folder, ids):
    change_config(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    with pytest.raises(UserError, match="has the layer ids"):
        EAGLE3.read_config(open_draft(folder))


def test_missing_unknown_and_misshapen_tensors_are_all_named(folder):
    def spoil(tensors):
        del tensors["midlayer.self_attn.v_proj.weight"]
        del tensors["fc.weight"]
        tensors["midlayer.self_attn.sinks"] = torch.zeros(6)
        tensors["lm_head.weight"] = torch.zeros(66, 48)

    change_weights(folder, spoil)
    with pytest.raises(UserError) as error:
        load_draft(folder)
    for words in (
        "self_attn.v_proj.weight is missing",
        "fc.weight is missing",
        "midlayer.self_attn.sinks is unexpected",
        "lm_head.weight has shape [66, 48] instead of [67, 48]",
    ):
        assert words in error.value.cause


def test_a_piece_of_the_wrong_height_is_named_and_not_mistaken_for_its_neighbour(folder):
    def shift_rows(tensors):
        tensors["midlayer.self_attn.q_proj.weight"] = torch.zeros(40, 96)
        tensors["midlayer.self_attn.k_proj.weight"] = torch.zeros(24, 96)

    change_weights(folder, shift_rows)
    with pytest.raises(UserError, match=r"k_proj.weight has shape \[24, 96\] instead of \[16, 96\]"):
        load_draft(folder)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": ["LlamaForCausalLMMedusa"]}, r"is Medusa heads \(LlamaForCausalLMMedusa\)"),
        ({"architectures": ["Eagle3GemmaForCausalLM"]}, "Gemma's layer"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"intermediate_size": ...}, "has no 'intermediate_size'"),
    ],
)
def test_another_architecture_is_refused(folder, values, words):
    change_config(folder, **values)
    with pytest.raises(UserError, match=words):
        load_draft(folder)


def swap(tensors: dict) -> None:
    """Another map of the same size: the first two offsets exchanged, ids kept."""
    ids = tensors["d2t"] + torch.arange(67)
    ids[[0, 1]] = ids[[1, 0]]
    tensors["d2t"] = ids - torch.arange(67)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("d2t"), "no d2t"),
        (lambda t: t.update(d2t=t["d2t"][:-1].clone()), r"int64 \[66\] instead of"),
        (lambda t: t.update(d2t=t["d2t"].float()), "float32"),
        (lambda t: t["d2t"].__setitem__(3, 10**6), "outside the vocabulary"),
        (lambda t: t["d2t"].__setitem__(3, int(t["d2t"][4]) + 1), "one twice"),
        (lambda t: t.update(d2t=t["d2t"] + torch.arange(67)), "token ids, not offsets"),
        (lambda t: t.update(t2d=~t["t2d"]), "marks other tokens"),
        (lambda t: t.update(t2d=t["t2d"][:-1].clone()), r"\[130\] instead of \[131\]"),
        (swap, "not the one it was saved with"),
    ],
)
def test_an_impossible_or_foreign_vocabulary_map_is_refused(folder, change, words):
    change_weights(folder, change)
    with pytest.raises(UserError, match=words):
        load_draft(folder)


@pytest.mark.parametrize("keep", [0, 7, 1500, -1])
def test_a_truncated_file_is_refused(folder, keep):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="corrupt or truncated"):
        load_draft(folder)


def test_missing_files_are_named(folder, tmp_path):
    with pytest.raises(UserError, match="neither a folder here"):
        load_draft(tmp_path / "nowhere")
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match="model.safetensors is missing"):
        load_draft(folder)
    (folder / CONFIG).unlink()
    with pytest.raises(UserError, match="has no config.json"):
        load_draft(folder)


def test_a_full_disk_is_noticed_before_anything_is_written(head, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(UserError, match="0 MB free"):
        save_draft(head, tmp_path / "draft", metadata={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("older", [False, True])
def test_a_disk_that_fills_up_while_saving_leaves_what_was_there(head, tmp_path, monkeypatch, older):
    if older:
        save_draft(head, tmp_path / "draft", metadata={"step": 1})
    before = sorted(path.name for path in tmp_path.rglob("*"))

    def fail(*args, **kwargs):
        Path(args[1]).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(UserError, match="No space left"):
        save_draft(head, tmp_path / "draft", metadata={"step": 2})
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    if older:
        assert read_metadata(tmp_path / "draft") == {"step": 1}
        assert same(load_draft(tmp_path / "draft"), head)


def test_metadata_that_is_no_json_leaves_nothing(head, tmp_path):
    with pytest.raises(TypeError):
        save_draft(head, tmp_path / "draft", metadata={"bad": object()})
    assert list(tmp_path.iterdir()) == []


def test_an_older_draft_is_replaced_whole(target, head, folder):
    other = tiny_head(target, seed=9)
    save_draft(head, folder, metadata={}, card="# old")
    (folder / "tuning.json").write_text("of the old weights")
    save_draft(other, folder, metadata={"step": 3})
    assert same(load_draft(folder), other)
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, "eagle_kit.json", WEIGHTS]
    assert [path.name for path in folder.parent.iterdir()] == ["draft"]
    assert {path.stat().st_mode & 0o444 for path in folder.iterdir()} == {0o444}, "others may read it"


def test_a_folder_with_other_things_is_not_replaced(head, folder, tmp_path):
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds other things than a draft .thesis.tex"):
        save_draft(head, folder, metadata={})
    assert (folder / "thesis.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        save_draft(head, tmp_path / "file", metadata={})


def test_saving_changes_nothing_in_the_head(head, tmp_path):
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    save_draft(head, tmp_path / "draft", metadata={}, dtype=torch.bfloat16)
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())


def test_two_drafts_of_one_head_are_the_same_bytes(head, tmp_path):
    for name in ("a", "b"):
        save_draft(head, tmp_path / name, metadata={})
    for file in (WEIGHTS, CONFIG):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_an_interrupt_between_the_renames_keeps_the_older_draft(head, folder, tmp_path, monkeypatch):
    def interrupted(self, target):
        assert not target.exists(), "the older draft is aside"
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_draft(head, folder, metadata={"tokens_seen": 13})
    assert read_metadata(folder) == {"tokens_seen": 12} and same(load_draft(folder), head)
    assert list(tmp_path.iterdir()) == [folder]
