"""A GGUF file as a target: transformers' logits and tokenizer, and what its reader leaves out."""

import shutil
import struct
from pathlib import Path

import pytest
import torch

from eagle_kit.cli.serve import names_of
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.files.findings import target_name
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer, resolve_target
from eagle_kit.server.api.startup import ServedModel
from tests.support.tiny_run import TEMPLATE

gguf = pytest.importorskip("gguf")
VALUE_TYPES = {
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
}
"""Keys of sizes, and attributes of transformers' configs."""
WINDOW = 8
LOCAL_BASE = 700.0


def tiny_model():
    """A Qwen3 of two layers whose head size is not the default's."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).eval()


def tiny_gemma3():
    """A Gemma 3 of seven layers, the third and the last without a window."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    rope = {"full_attention": 5000.0, "sliding_attention": LOCAL_BASE}
    config = Gemma3TextConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        max_position_embeddings=256,
        initializer_range=0.2,
        layer_types=["full_attention" if layer in (2, 6) else "sliding_attention" for layer in range(7)],
        rope_parameters={name: {"rope_type": "default", "rope_theta": base} for name, base in rope.items()},
    )
    return Gemma3ForCausalLM(config).eval()


def write_gguf(
    path: Path, model, *, arch="qwen3", more=(), tensors=(), pre="qwen2", left_out=(), sizes=()
) -> Path:
    """Write ``model`` as gguf-py does, in F32, with keys of ``more`` and tensors besides."""
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(str(path), arch)
    stated = {key: getattr(model.config, attribute) for key, attribute in SIZES.items()}
    for key, value in (stated | dict(sizes)).items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{arch}.rope.freq_base", 5000.0)
    for key, value in dict(more).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, VALUE_TYPES[type(value)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ĠĠ"])
    writer.add_token_types([3, 3, 3, *(1 for _ in alphabet), 1])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[arch], model.config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if arch == "gemma3" and "norm" in name:
            value = value + 1  # as llama.cpp's converter writes them
        if arch == "gemma3" and name == "lm_head.weight":
            continue  # it is the embedding
        if name not in left_out:
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), value.numpy())
    for name, value in tensors:
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_gguf_file_has_the_logits_the_tokenizer_and_the_template_of_its_model(cache):
    model = tiny_model()
    path = write_gguf(cache / "tiny.gguf", model)
    ids = torch.randint(0, 260, (40,))
    ours = load_target(path)
    out = ours(ids, torch.arange(40), ours.causal())
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    torch.testing.assert_close(ours.logits(out.hidden), expected, rtol=1e-4, atol=1e-4)
    tokenizer = load_tokenizer(resolve_target(path))
    assert len(tokenizer) == 260
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize(
    "pattern", [3, [True, True, False, True, True, True, False]], ids=["every third", "by layer"]
)
def test_windows_and_ropes_by_layer_are_those_of_the_file(cache, pattern):
    model = tiny_gemma3()
    if pattern == 3:
        model.config.layer_types[5] = "full_attention"
        model.config.layer_types[6] = "sliding_attention"
        model = type(model)(model.config).eval()
    more = {
        "gemma3.attention.sliding_window": WINDOW,
        "gemma3.attention.sliding_window_pattern": pattern,
        "gemma3.rope.freq_base_swa": LOCAL_BASE,
    }
    path = write_gguf(cache / "tiny.gguf", model, arch="gemma3", more=more)
    ours = load_target(path)
    ids = torch.randint(0, 260, (4 * WINDOW,))
    out = ours(ids, torch.arange(4 * WINDOW), ours.causal())
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    torch.testing.assert_close(ours.logits(out.hidden), expected, rtol=1e-4, atol=1e-4)


def test_a_gguf_file_is_converted_again_only_after_a_change(cache, capsys):
    path = write_gguf(cache / "tiny.gguf", tiny_model())
    folder = resolve_target(path)
    assert resolve_target(str(path)) == folder
    assert capsys.readouterr().err.count("(once)") == 1
    write_gguf(path, tiny_model())
    assert resolve_target(path) == folder
    assert capsys.readouterr().err.count("(once)") == 1


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"more": {"qwen3.attention.scale": 0.5}}, "attention.scale"),
        ({"more": {"qwen3.rope.scaling.type": "longrope"}}, "longrope"),
        ({"more": {"split.count": 2}}, "split"),
        ({"more": {"qwen3.rope.freq_base_swa": 7.0}}, "RoPE of its own"),
        ({"more": {"qwen3.attention.sliding_window_pattern": [True, False, True]}}, "which of 3 layers"),
        ({"tensors": [("blk.0.attn_q.bias", torch.ones(128))]}, "weights"),
        ({"tensors": [("rope_freqs.weight", torch.full((16,), 3.0))]}, "RoPE factors"),
        ({"left_out": ["model.norm.weight"]}, "weights"),
        ({"pre": "viking"}, "viking"),
        ({"sizes": {"block_count": 10**9}}, "states 1000000000 layers"),
        ({"sizes": {"block_count": 0}}, "states 0 layers"),
        ({"more": {"split.count": "x"}}, "split"),
        ({"more": {"qwen3.attention.sliding_window": "x"}}, "cannot be read as a GGUF model"),
        (
            {"more": {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": float("nan")}},
            "RoPE scaling",
        ),
    ],
)
def test_what_the_reader_would_leave_out_is_refused_by_name(cache, change, cause):
    path = write_gguf(cache / "tiny.gguf", tiny_model(), **change)
    with pytest.raises(UserError, match=cause):
        resolve_target(path)


def test_yarn_of_a_gguf_file_is_that_of_the_config(cache):
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    more = {f"qwen3.rope.scaling.{key}": value for key, value in yarn.items()}
    path = write_gguf(cache / "tiny.gguf", tiny_model(), more=more)
    assert load_target(path).config.rope_scaling["factor"] == 4.0


@pytest.mark.parametrize("content", [b"", b"GGUF", b"something else" * 9])
def test_a_file_that_is_no_gguf_is_one_sentence(cache, content):
    path = cache / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as a GGUF"):
        resolve_target(path)


NUM_BYTES = 2**40


@pytest.mark.parametrize(
    "entry",
    [
        struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8, NUM_BYTES),
        struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING, NUM_BYTES),
        struct.pack("<IQ", gguf.GGUFValueType.STRING, 2**63),
    ],
    ids=["array", "strings", "string"],
)
def test_a_length_behind_the_end_of_the_file_is_not_counted_to(cache, monkeypatch, entry):
    """A file of 40 bytes that states an array of 2**40."""
    get = gguf.GGUFReader._get
    calls = []

    def counted(*args, **named):
        calls.append(args)
        assert len(calls) < 1000
        return get(*args, **named)

    monkeypatch.setattr(gguf.GGUFReader, "_get", counted)
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    (cache / "tiny.gguf").write_bytes(header + struct.pack("<Q", 1) + b"a" + entry)
    with pytest.raises(UserError, match="ends before a length"):
        resolve_target(cache / "tiny.gguf")


def test_an_architecture_that_transformers_does_not_read_is_one_sentence(cache):
    path = write_gguf(cache / "tiny.gguf", tiny_model())
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"qwenX"))
    with pytest.raises(UserError, match="qwenX"):
        resolve_target(path)


def test_a_converted_file_keeps_its_name(cache):
    path = write_gguf(cache / "tiny.gguf", tiny_model())
    assert target_name(resolve_target(path)) == "tiny.gguf"


def test_a_folder_of_gguf_files_names_one(cache):
    path = write_gguf(cache / "tiny.gguf", tiny_model())
    folder = cache / "repository"
    folder.mkdir()
    shutil.copy(path, folder / "model.Q4.gguf")
    with pytest.raises(UserError, match="GGUF files") as error:
        resolve_target(folder)
    assert "model.Q4.gguf" in error.value.remedy


def test_a_server_names_a_converted_file_as_the_file(cache):
    path = write_gguf(cache / "tiny.gguf", tiny_model())
    folder = str(resolve_target(path))
    assert names_of(ServedModel(str(path), None)) == ("tiny.gguf", str(path))
    assert names_of(ServedModel(folder, None)) == ("tiny.gguf", folder)
