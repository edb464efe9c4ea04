"""GGUF files as targets, read by transformers.

What its reader leaves out of a file of the architectures in :data:`CHECKED` (RoPE scaling, windows, tensors)
is put into the config or refused by name, since the logits would silently be others. For other architectures
a warning says that the keys were not compared.
"""

import math
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from eagle_kit.core.errors import UserError, cut, first_line, shown

READ_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
    }
)
"""Keys that the reader takes, and whose wrong values would not fit the tensors."""
EQUAL_KEYS = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
    "rope.dimension_count": "head_dim",
}
"""Keys whose value must be that of an attribute of the config."""
OWN_RULES = frozenset(
    {
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
    }
)
"""Keys that have a rule of their own. ``rope.scaling.finetuned`` says how the model was made and changes no
logits."""
CHECKED = ("gemma2", "gemma3", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3moe")
"""Architectures whose keys all have a rule here."""
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the models of the attention scale ``(hidden_size / num_heads) ** -0.5``, which a file
does not state."""
LLAMA3_FREQUENCIES = "rope_freqs.weight"
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all Llama 3.1 and later ones; a file has only what frequencies are divided by."""
DIGITS = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
"""Pre-tokenizers of GPT-2's rules behind a cut at every digit, which the reader leaves out."""
GPT2_RULES = ("gpt-2", "phi-2")
BLOCK = re.compile(r"blk\.(\d+)\.")
GIVE_FOLDER = "Give the model's Hugging Face folder or hub id."


def open_gguf(path: Path) -> Any:
    """Open a file as ``gguf.GGUFReader``.

    Raises:
        UserError: the package gguf is missing, or ``path`` is no whole GGUF of a known quantisation.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(
            "The package gguf is not installed.", "Install it with pip install 'eagle_kit[demo]'."
        ) from None

    class WholeReader(GGUFReader):
        """Refuses a length behind the end of the file, up to which the reader would count to itself."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) != count:
                raise ValueError("it ends before a length that it states")
            return found

    try:
        reader = WholeReader(str(path))
    except Exception as error:  # broken files raise errors of many kinds
        raise refused(path, error) from error
    if _value(reader, "split.count") not in (None, 0, 1):
        raise UserError(
            f"The file {path} is a part of a split GGUF.",
            "Join the parts with llama.cpp's llama-gguf-split --merge, and give that file.",
        )
    return reader


def refused(path: Path, error: Exception) -> UserError:
    """The reader's error as a UserError of one sentence."""
    reason = first_line(error).rstrip(".")
    return UserError(f"The file {path} cannot be read as a GGUF model ({cut(reason)}).", GIVE_FOLDER)


def read_gguf_config(path: Path, reader: Any) -> Any:
    """The config that transformers reads of a file, with what its reader leaves out.

    Raises:
        UserError: an architecture that transformers does not read, or a key that has no place in the config.
    """
    from transformers import AutoConfig

    _check_layers(path, reader)
    try:
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
    except Exception as error:  # the reader raises errors of many kinds
        raise refused(path, error) from error
    try:
        _complete(path, config, reader)
    except (ArithmeticError, AttributeError, TypeError) as error:  # a value of another type
        raise refused(path, error) from error
    return config


def _complete(path: Path, config: Any, reader: Any) -> None:
    """Put what transformers' reader leaves out of a file into ``config``, and check what it took."""
    name = str(_value(reader, "general.architecture"))
    keys = {key.removeprefix(f"{name}."): key for key in reader.fields if key.startswith(f"{name}.")}
    stated = {short: _value(reader, key) for short, key in keys.items()}

    # What the config has no value of, or another one.
    if "attention.key_length" in stated:
        config.head_dim = stated["attention.key_length"]
    if name in ("gemma2", "gemma3"):
        is_27b = config.num_hidden_layers == GEMMA_27B_LAYERS[name]
        per_head = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = per_head if is_27b else config.head_dim
    _set_window(path, config, stated)
    if "attention.sliding_window_pattern" in stated:
        pattern = reader.get_field(keys["attention.sliding_window_pattern"]).contents()
        _set_layer_types(path, config, pattern)
    _set_rope(path, config, stated)
    _set_llama3_rope(path, config, reader)

    # Every other key must be in the config as it is.
    if name not in CHECKED:
        warnings.warn(
            f"The keys of {path} were not compared with the config that transformers' GGUF reader makes of "
            f"them, since there are no rules for the architecture {name} here.",
            stacklevel=2,
        )
        return
    for key in stated.keys() - READ_KEYS - OWN_RULES:
        known = getattr(config, EQUAL_KEYS.get(key, ""), None)
        if EQUAL_KEYS.get(key) == "head_dim" and known is None:
            known = config.hidden_size // config.num_attention_heads
        if not _is_equal(stated[key], known):
            raise UserError(
                f"The file {path} sets {keys[key]}={shown(stated[key])}, which transformers' GGUF reader "
                "leaves out.",
                GIVE_FOLDER,
            )


def _check_layers(path: Path, reader: Any) -> None:
    """Raise UserError unless the file has tensors of as many layers as it states."""
    blocks = [BLOCK.match(tensor.name) for tensor in reader.tensors]
    found = {int(block[1]) for block in blocks if block is not None}
    stated = _value(reader, f"{_value(reader, 'general.architecture')}.block_count")
    if stated not in range(1, len(found) + 1):
        raise UserError(
            f"The file {path} states {shown(stated)} layers, and has tensors of {len(found)}.", GIVE_FOLDER
        )


def check_whole(path: Path, reader: Any, num_layers: int, weights: dict[str, torch.Tensor]) -> None:
    """Raise UserError unless ``weights`` have as many values as the file, but for layers behind the last
    (multi-token prediction) and factors of RoPE."""
    num_values = sum(weight.numel() for weight in weights.values())
    num_stored = 0
    for tensor in reader.tensors:
        block = BLOCK.match(tensor.name)
        if tensor.name != LLAMA3_FREQUENCIES and (block is None or int(block[1]) < num_layers):
            num_stored += int(tensor.n_elements)
    if num_values != num_stored:
        raise UserError(
            f"The file {path} has {num_stored} weights, and transformers' GGUF reader reads {num_values}.",
            GIVE_FOLDER,
        )


def restore_pre_tokenizer(tokenizer: Any, path: Path, reader: Any) -> None:
    r"""Restore the cut at every digit that the reader leaves out of some tokenizers of GPT-2's rules.

    Without it ``"\n\n1."`` starts with two tokens ``\n`` where SmolLM has learned one ``\n\n``, so prompts
    with numbered lists or indented numbers would be foreign to it.

    Raises:
        UserError: rules of splitting that neither the reader knows nor this function.
    """
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    rules = _value(reader, "tokenizer.ggml.pre")
    if _value(reader, "tokenizer.ggml.model") != "gpt2" or rules in (*GPT2_RULES, *GGUF_PRE_TOKENIZER_SPLITS):
        return
    if rules not in DIGITS:
        raise UserError(
            f"The tokenizer of {path} splits texts by the rules {shown(rules)}, which transformers' GGUF "
            "reader does not know.",
            GIVE_FOLDER,
        )
    parts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)


def _value(reader: Any, key: str) -> Any:
    """Value of a key that is no array, or the array's length; None where it is missing."""
    field = reader.get_field(key)
    if field is None:
        return None
    return len(field.data) if field.types and field.types[0].name == "ARRAY" else field.contents()


def _is_equal(stated: Any, known: Any) -> bool:
    """Whether two values are the same; files have floats of 32 bits."""
    if isinstance(stated, float) and isinstance(known, int | float):
        return math.isclose(stated, known, rel_tol=1e-6)
    return stated == known


def _set_window(path: Path, config: Any, stated: dict[str, Any]) -> None:
    """Set the sliding window, which the reader takes of Gemma alone and leaves at a default elsewhere."""
    window = stated.get("attention.sliding_window")
    has_window = hasattr(config, "sliding_window") and getattr(config, "use_sliding_window", True)
    if has_window and (window is not None or config.model_type == "mistral"):
        config.sliding_window = window
    elif window is not None and not has_window and window < config.max_position_embeddings:
        raise UserError(
            f"The file {path} asks for a window of {window}, which transformers' {type(config).__name__} "
            "has not.",
            GIVE_FOLDER,
        )


def _set_layer_types(path: Path, config: Any, pattern: Any) -> None:
    """Set which layers have the window: by a flag for each, or all but every ``pattern``-th. Raises UserError
    where the config has no such choice."""
    num_layers = config.num_hidden_layers
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if not hasattr(config, "layer_types") or len(pattern) != num_layers:
        raise UserError(
            f"The file {path} says which of {len(pattern)} layers have a window, which transformers' "
            f"{type(config).__name__} cannot hold.",
            GIVE_FOLDER,
        )
    config.layer_types = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]


def _set_rope(path: Path, config: Any, stated: dict[str, Any]) -> None:
    """Set base and scaling of RoPE. Raises UserError for a scaling that is neither linear nor YaRN."""
    parameters = getattr(config, "rope_parameters", None) or {}
    local_base = stated.get("rope.freq_base_swa")
    if local_base is not None and "sliding_attention" not in parameters:
        raise UserError(
            f"The file {path} has a RoPE of its own for layers with a window, which transformers' "
            f"{type(config).__name__} has not.",
            GIVE_FOLDER,
        )
    if local_base is not None and not _is_equal(
        local_base, parameters["sliding_attention"].get("rope_theta")
    ):
        parameters["sliding_attention"]["rope_theta"] = local_base
    parameters = parameters.get("full_attention", parameters)
    if "rope.freq_base" in stated and not _is_equal(stated["rope.freq_base"], parameters.get("rope_theta")):
        parameters["rope_theta"] = stated["rope.freq_base"]
    kind = stated.get("rope.scaling.type")
    if kind in (None, "none"):
        return
    scaling = {"rope_type": kind, "factor": stated.get("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = stated.get("rope.scaling.original_context_length")
    factor = scaling["factor"]
    is_number = isinstance(factor, float) and math.isfinite(factor) and factor > 0
    if kind not in ("linear", "yarn") or not is_number or None in scaling.values():
        raise UserError(
            f"The file {path} asks for the RoPE scaling {shown(kind)}, which cannot be read of a GGUF.",
            GIVE_FOLDER,
        )
    parameters.update(scaling)


def _set_llama3_rope(path: Path, config: Any, reader: Any) -> None:
    """Set Llama 3's scaling where the factors of the frequencies are those of it; any other is refused."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = {tensor.name: tensor for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    if not factors:
        return
    if factors.keys() == {LLAMA3_FREQUENCIES}:
        given = torch.tensor(factors[LLAMA3_FREQUENCIES].data)
        scaling = {"rope_type": "llama3", "factor": float(given.max()), **LLAMA3_ROPE}
        config.rope_parameters.update(scaling)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        exponents = torch.arange(len(given), dtype=torch.float32) / len(given)
        plain = config.rope_parameters["rope_theta"] ** -exponents
        if len(scaled) == len(given) and torch.allclose(plain / given, scaled, rtol=1e-4):
            return
    raise UserError(
        f"The file {path} has RoPE factors ({', '.join(sorted(factors))}) that are not Llama 3's.",
        GIVE_FOLDER,
    )
