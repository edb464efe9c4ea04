"""Checks and additions for GGUF files that transformers reads as targets.

transformers' reader ignores some keys and tensors (RoPE scaling, windows), which would silently change the
logits. For the architectures in :data:`CHECKED` every ignored key is put into the config, or the file is
refused. For others a warning says that the keys were not compared.
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
"""Keys that the reader takes. Wrong values would not fit the tensors."""
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
"""Keys whose value must equal an attribute of the config that the reader makes."""
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
"""Keys that this module handles. ``rope.scaling.finetuned`` tells how the model was trained and changes no
logits."""
CHECKED = ("gemma2", "gemma3", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3moe")
"""Architectures whose keys are all compared."""
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the models whose attention scale is ``(hidden_size / num_heads) ** -0.5``. A file
does not state the scale."""
LLAMA3_FREQUENCIES = "rope_freqs.weight"
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of Llama 3.1 and all later ones. A file has only the divisors of the frequencies."""
SPLIT_DIGITS = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
"""Pre-tokenizers that split texts at every digit and then by GPT-2's rules. The reader ignores the former."""
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
        """Reader that refuses a length beyond the end of the file, up to which GGUFReader would loop."""

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
    """Make a UserError of one sentence from an error of the reader."""
    reason = first_line(error).rstrip(".")
    return UserError(f"The file {path} cannot be read as a GGUF model ({cut(reason)}).", GIVE_FOLDER)


def read_gguf_config(path: Path, reader: Any) -> Any:
    """Read the config of a file with transformers, and add the keys that its reader ignores.

    Raises:
        UserError: an architecture that transformers does not read, or a key that the config cannot hold.
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
    """Add the keys that transformers' reader ignores to ``config``, and compare the others."""
    # Values by key without the prefix of the architecture.
    name = str(_value(reader, "general.architecture"))
    prefix = f"{name}."
    keys = {key.removeprefix(prefix): key for key in reader.fields if key.startswith(prefix)}
    stated = {short: _value(reader, key) for short, key in keys.items()}

    # Values that the config lacks or has wrong.
    if "attention.key_length" in stated:
        config.head_dim = stated["attention.key_length"]
    if name in ("gemma2", "gemma3"):
        config.query_pre_attn_scalar = config.head_dim
        if config.num_hidden_layers == GEMMA_27B_LAYERS[name]:
            config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    _set_window(path, config, stated)
    if "attention.sliding_window_pattern" in stated:
        pattern = reader.get_field(keys["attention.sliding_window_pattern"]).contents()
        _set_layer_types(path, config, pattern)
    _set_rope(path, config, stated)
    _set_llama3_rope(path, config, reader)

    # All other values must be those of the config.
    if name not in CHECKED:
        warnings.warn(
            f"The keys of {path} were not compared with the config that transformers' GGUF reader makes of "
            f"them, since there are no rules for the architecture {name} here.",
            stacklevel=2,
        )
        return
    for key in stated.keys() - READ_KEYS - OWN_RULES:
        attribute = EQUAL_KEYS.get(key, "")
        known = getattr(config, attribute, None)
        if attribute == "head_dim" and known is None:
            known = config.hidden_size // config.num_attention_heads
        if not _is_equal(stated[key], known):
            raise UserError(
                f"The file {path} sets {keys[key]}={shown(stated[key])}, which transformers' GGUF reader "
                "leaves out.",
                GIVE_FOLDER,
            )


def _check_layers(path: Path, reader: Any) -> None:
    """Raise UserError unless the file has tensors of as many layers as it states."""
    layers: set[int] = set()
    for tensor in reader.tensors:
        block = BLOCK.match(tensor.name)
        if block is not None:
            layers.add(int(block[1]))
    architecture = _value(reader, "general.architecture")
    stated = _value(reader, f"{architecture}.block_count")
    if stated not in range(1, len(layers) + 1):
        raise UserError(
            f"The file {path} states {shown(stated)} layers, and has tensors of {len(layers)}.", GIVE_FOLDER
        )


def check_whole(path: Path, reader: Any, num_layers: int, weights: dict[str, torch.Tensor]) -> None:
    """Raise UserError unless ``weights`` have as many values as the file. Layers after the last of
    ``num_layers`` (multi-token prediction) and factors of RoPE are not counted."""
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
    r"""Restore the split at every digit, which the reader ignores in some tokenizers with GPT-2's rules.

    Without it ``"\n\n1."`` starts with two tokens ``\n`` where SmolLM was trained with one ``\n\n``, so it
    would not know prompts with numbered lists or indented numbers.

    Raises:
        UserError: rules that neither the reader nor this function knows.
    """
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    rules = _value(reader, "tokenizer.ggml.pre")
    is_gpt2 = _value(reader, "tokenizer.ggml.model") == "gpt2"
    if not is_gpt2 or rules in GPT2_RULES or rules in GGUF_PRE_TOKENIZER_SPLITS:
        return
    if rules not in SPLIT_DIGITS:
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
    """Value of a key; the length of an array; None if the key is missing."""
    field = reader.get_field(key)
    if field is None:
        return None
    if field.types and field.types[0].name == "ARRAY":
        return len(field.data)
    return field.contents()


def _is_equal(stated: Any, known: Any) -> bool:
    """True if two values are equal; the floats of a file have 32 bits."""
    if isinstance(stated, float) and isinstance(known, int | float):
        return math.isclose(stated, known, rel_tol=1e-6)
    return stated == known


def _set_window(path: Path, config: Any, stated: dict[str, Any]) -> None:
    """Set the sliding window. The reader takes it for Gemma only, and leaves a default elsewhere.

    Raises:
        UserError: the config has no window.
    """
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
    """Set the layers with a window: by a flag for each, or all but every ``pattern``-th. Raises UserError
    if the config has no types of layers."""
    num_layers = config.num_hidden_layers
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if not hasattr(config, "layer_types") or len(pattern) != num_layers:
        raise UserError(
            f"The file {path} says which of {len(pattern)} layers have a window, which transformers' "
            f"{type(config).__name__} cannot hold.",
            GIVE_FOLDER,
        )
    layer_types: list[str] = []
    for has_window in pattern:
        layer_types.append("sliding_attention" if has_window else "full_attention")
    config.layer_types = layer_types


def _set_rope(path: Path, config: Any, stated: dict[str, Any]) -> None:
    """Set base and scaling of RoPE. Raises UserError for a scaling that is neither linear nor YaRN."""
    # Base of layers with a window, which may have a RoPE of their own.
    parameters = getattr(config, "rope_parameters", None) or {}
    local_base = stated.get("rope.freq_base_swa")
    if local_base is not None:
        if "sliding_attention" not in parameters:
            raise UserError(
                f"The file {path} has a RoPE of its own for layers with a window, which transformers' "
                f"{type(config).__name__} has not.",
                GIVE_FOLDER,
            )
        _set_base(parameters["sliding_attention"], local_base)

    # Base of the other layers.
    parameters = parameters.get("full_attention", parameters)
    if "rope.freq_base" in stated:
        _set_base(parameters, stated["rope.freq_base"])

    # Scaling.
    rope_type = stated.get("rope.scaling.type")
    if rope_type in (None, "none"):
        return
    factor = stated.get("rope.scaling.factor")
    scaling = {"rope_type": rope_type, "factor": factor}
    if rope_type == "yarn":
        scaling["original_max_position_embeddings"] = stated.get("rope.scaling.original_context_length")
    is_factor = isinstance(factor, float) and math.isfinite(factor) and factor > 0
    if rope_type not in ("linear", "yarn") or not is_factor or None in scaling.values():
        raise UserError(
            f"The file {path} asks for the RoPE scaling {shown(rope_type)}, which cannot be read of a GGUF.",
            GIVE_FOLDER,
        )
    parameters.update(scaling)


def _set_base(parameters: dict[str, Any], base: Any) -> None:
    """Set the base of RoPE, unless it is equal but for the precision of the file."""
    if not _is_equal(base, parameters.get("rope_theta")):
        parameters["rope_theta"] = base


def _set_llama3_rope(path: Path, config: Any, reader: Any) -> None:
    """Set Llama 3's scaling if the divisors of the frequencies are those of Llama 3. Raises UserError for
    others."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = {tensor.name: tensor for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    if not factors:
        return
    if factors.keys() == {LLAMA3_FREQUENCIES}:
        divisors = torch.tensor(factors[LLAMA3_FREQUENCIES].data)
        num_pairs = len(divisors)
        scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3_ROPE}
        config.rope_parameters.update(scaling)
        expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        exponents = torch.arange(num_pairs, dtype=torch.float32) / num_pairs
        unscaled = config.rope_parameters["rope_theta"] ** -exponents
        if len(expected) == num_pairs and torch.allclose(unscaled / divisors, expected, rtol=1e-4):
            return
    raise UserError(
        f"The file {path} has RoPE factors ({', '.join(sorted(factors))}) that are not Llama 3's.",
        GIVE_FOLDER,
    )
