"""Loading of bridged targets."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from eagle_kit.core.errors import UserError, first_line
from eagle_kit.models.blocks.layers import Attend
from eagle_kit.models.bridge.attention import NAME, register
from eagle_kit.models.bridge.config import (
    BridgedConfig,
    decoder_of,
    new_model,
    norm_name,
    transformers_config,
)
from eagle_kit.models.bridge.gate import check
from eagle_kit.models.bridge.model import BridgedModel
from eagle_kit.models.targets.target import LogitForm, Target, TargetOutput
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.linear import Linear

MAX_HEAD_SIZE = 256
LAYER = re.compile(r"(^|\.)(?:layers|h|blocks|decoder_layers)\.(\d+)\.")
OUTPUTS = "lm_head.weight", "embed_out.weight", "output.weight"


def load_bridged(
    folder: Path, config: BridgedConfig, dtype: torch.dtype, device: torch.device | str
) -> BridgedModel:
    """Load a target's weights and check that its forward is transformers' own.

    Raises:
        UserError: weights that are missing or do not fit, or a model whose forward differs.
    """
    from transformers import AutoModelForCausalLM

    register()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            **_unpacked(config, folder),
        )
        model, about = loaded
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError) as error:
        reason = first_line(error)
        raise UserError(
            f"The weights in {folder} cannot be loaded ({reason}).",
            "Copy or download the model again.",
        ) from error
    missing = [*about["missing_keys"], *(str(each) for each in about.get("mismatched_keys", ()))]
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise UserError(
            f"The weights in {folder} do not fit their config: {shown} are missing or have other shapes.",
            "Use a complete, matching checkpoint.",
        )
    extra = [name for name in about["unexpected_keys"] if _is_of_a_layer(name, config.num_layers)]
    if extra:
        raise UserError(
            f"The weights in {folder} have tensors that their config does not name: {', '.join(extra[:8])}.",
            "Use a complete, matching checkpoint.",
        )
    if torch.device(device).type == "cuda" and config.cache.head_dim > MAX_HEAD_SIZE:
        raise UserError(
            f"The target in {folder} has keys of {config.cache.head_dim}, and kernels take at most "
            f"{MAX_HEAD_SIZE}.",
            "Run it on a CPU.",
        )
    return bridge(model.to(device), config)


def empty_bridged(config: BridgedConfig, where: str, dtype: torch.dtype) -> BridgedModel:
    """Make a bridged target without weights, on the meta device. Raises UserError as :func:`new_model`."""
    assert config.source is not None
    model = new_model(transformers_config(config.source, where), where).to(dtype)
    with torch.device("meta"):
        target = BridgedModel(config, model)
    target.records = list(config.records)
    return target.requires_grad_(False)


def _is_of_a_layer(name: str, num_layers: int) -> bool:
    """Return True for a tensor of one of the decoder's layers, and not of a module behind them."""
    found = LAYER.search(name)
    is_text = not any(part in name for part in ("vision", "visual", "audio", "rotary_emb.inv_freq"))
    return is_text and found is not None and int(found[2]) < num_layers


def _unpacked(config: BridgedConfig, folder: Path) -> dict[str, Any]:
    """Arguments that have published 4-bit or fp8 weights unpacked.

    Raises:
        UserError: weights quantised in another way.
    """
    from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

    source = config.source or {}
    packed = source.get("quantization_config") or source.get("text_config", {}).get("quantization_config")
    if not packed:
        return {}
    method = packed.get("quant_method") if isinstance(packed, dict) else packed
    if method == "mxfp4":
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    if method == "fp8":
        return {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    raise UserError(
        f"The target in {folder} is quantised by {method}, which is not supported.",
        "Use its weights in bf16, fp8 or MXFP4.",
    )


class BridgedEnds(Target):
    """Embedding and output layer of a target, for training on states that were captured before."""

    def __init__(
        self, config: BridgedConfig, embedding: torch.Tensor, output: torch.Tensor, norm: nn.Module
    ) -> None:
        super().__init__()
        self.norm = norm
        self.config: BridgedConfig = config
        self.logit_form = LogitForm(config.logit_scale, config.soft_cap)
        self.layers = nn.ModuleList()
        self.embed_tokens = nn.Embedding.from_pretrained(embedding)
        with torch.device("meta"):
            self.lm_head = Linear(output.shape[1], output.shape[0], bias=False)
        self.lm_head.weight = self.embed_tokens.weight if output is embedding else nn.Parameter(output)

    @property
    def variants(self) -> list[AttentionVariant]:
        """See :class:`~eagle_kit.models.targets.target.Target`."""
        return [record.variant for record in self.config.records]

    def place_layers(self, devices: Sequence[torch.device] | None) -> None:
        """See :class:`~eagle_kit.models.targets.target.Target`; there are none."""

    def final_norm(self, states: torch.Tensor) -> torch.Tensor:
        """See :class:`~eagle_kit.models.targets.target.Target`."""
        states = self.norm(states)
        assert isinstance(states, torch.Tensor)
        return states

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, capture: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Raise an error: there are no layers."""
        raise AssertionError("the target was loaded without its layers")


def load_ends(
    folder: Path, config: BridgedConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> BridgedEnds:
    """Make a target without layers of those of its ``tensors`` that are outside of them.

    Raises:
        UserError: no embedding, or no output layer, or several.
    """
    shape = config.vocab_size, config.hidden_size
    matrices = {name: tensor for name, tensor in tensors.items() if tuple(tensor.shape) == shape}
    outputs = [name for name in matrices if name.endswith(OUTPUTS)]
    inputs = [name for name in matrices if name not in outputs]
    if len(inputs) != 1 or len(outputs) != (not config.tie_word_embeddings):
        raise UserError(
            f"The weights in {folder} have the matrices {', '.join(matrices) or 'none'} outside of the "
            "layers, which are not one embedding and its output layer.",
            "Train with the whole target.",
        )
    embedding = matrices[inputs[0]].to(dtype)
    output = matrices[outputs[0]].to(dtype) if outputs else embedding
    norm = _norm(folder, config, tensors, dtype)
    return BridgedEnds(config, embedding, output, norm).eval().requires_grad_(False)


def _norm(
    folder: Path, config: BridgedConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> nn.Module:
    """The final norm, with its weights out of ``tensors``."""
    assert config.source is not None
    decoder = decoder_of(new_model(transformers_config(config.source, str(folder)), str(folder)))
    name = norm_name(decoder)
    norm: nn.Module = getattr(decoder, name)
    for leaf, parameter in list(norm.named_parameters()):
        shape = tuple(parameter.shape)
        found = [
            t for key, t in tensors.items() if key.endswith(f"{name}.{leaf}") and tuple(t.shape) == shape
        ]
        if len(found) != 1:
            raise UserError(
                f"The weights in {folder} have {len(found)} tensors {name}.{leaf} outside of the layers.",
                "Train with the whole target.",
            )
        setattr(norm, leaf, nn.Parameter(found[0].to(dtype)))
    return norm


def bridge(model: Any, config: BridgedConfig) -> BridgedModel:
    """Make a target of a causal language model that was loaded with our attention.

    Raises:
        UserError: its forward differs from its own over single texts.
    """
    target = BridgedModel(config, model)
    target.eval().requires_grad_(False)
    target.learn()
    check(target)
    return target
