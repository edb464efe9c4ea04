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
from eagle_kit.models.bridge.attention import ATTENTION_NAME, register
from eagle_kit.models.bridge.config import (
    BridgedConfig,
    decoder_of,
    new_model,
    norm_name,
    transformers_config,
)
from eagle_kit.models.bridge.load_check import check
from eagle_kit.models.bridge.model import BridgedModel
from eagle_kit.models.targets.target import LogitForm, Target, TargetOutput
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.linear import Linear

MAX_HEAD_SIZE = 256
"""Largest head size of the kernels on a GPU."""
MAX_NAMED = 8
"""Largest number of tensors that an error names."""
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|decoder_layers)\.(\d+)\.")
"""Tensors of a decoder layer, and its index."""
OTHER_PARTS = ("vision", "visual", "audio", "rotary_emb.inv_freq")
"""Parts of the names of tensors that are not weights of the text decoder."""
OUTPUTS = ("lm_head.weight", "embed_out.weight", "output.weight")
"""Suffixes of the output layer."""


def load_bridged(
    folder: Path, config: BridgedConfig, dtype: torch.dtype, device: torch.device | str
) -> BridgedModel:
    """Load a bridged target, and check that its forward gives what transformers' own forward gives.

    Args:
        folder: folder of the model.
        config: architecture of the target.
        dtype: dtype of the weights.
        device: device of the weights.

    Raises:
        UserError: weights that are missing or do not fit, or a model whose forward differs.
    """
    from transformers import AutoModelForCausalLM

    # transformers loads the weights.
    register()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            **_dequantization(config, folder),
        )
        model, loading_info = loaded
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError) as error:
        reason = first_line(error)
        raise UserError(
            f"The weights in {folder} cannot be loaded ({reason}).",
            "Copy or download the model again.",
        ) from error

    # It must have found all of them, and layers must have no others.
    missing = list(loading_info["missing_keys"])
    missing += [str(each) for each in loading_info.get("mismatched_keys", ())]
    if missing:
        listed = ", ".join(missing[:MAX_NAMED])
        if len(missing) > MAX_NAMED:
            listed += f" and {len(missing) - MAX_NAMED} more"
        raise UserError(
            f"The weights in {folder} do not fit their config: {listed} are missing or have other shapes.",
            "Use a complete, matching checkpoint.",
        )
    extra = [name for name in loading_info["unexpected_keys"] if _is_in_layer(name, config.num_layers)]
    if extra:
        raise UserError(
            f"The weights in {folder} have tensors that their config does not name: "
            f"{', '.join(extra[:MAX_NAMED])}.",
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
    """Make a bridged target on the meta device. Raises UserError as
    :func:`~eagle_kit.models.bridge.config.new_model`."""
    assert config.source is not None
    model = new_model(transformers_config(config.source, where), where).to(dtype)
    with torch.device("meta"):
        target = BridgedModel(config, model)
    target.records = list(config.records)
    return target.requires_grad_(False)


def _is_in_layer(name: str, num_layers: int) -> bool:
    """True for a tensor of one of the text decoder's ``num_layers`` layers."""
    found = LAYER.search(name)
    if found is None or any(part in name for part in OTHER_PARTS):
        return False
    return int(found[1]) < num_layers


def _dequantization(config: BridgedConfig, folder: Path) -> dict[str, Any]:
    """Arguments with which transformers dequantises published MXFP4 or fp8 weights.

    Raises:
        UserError: weights that are quantised in another way.
    """
    from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

    source = config.source or {}
    method = source.get("quantization_config") or source.get("text_config", {}).get("quantization_config")
    if not method:
        return {}
    if isinstance(method, dict):
        method = method.get("quant_method")
    if method == "mxfp4":
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    if method == "fp8":
        return {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    raise UserError(
        f"The target in {folder} is quantised by {method}, which is not supported.",
        "Use its weights in bf16, fp8 or MXFP4.",
    )


class BridgedEnds(Target):
    """Embedding, final norm and output layer of a target, for training on captured hidden states.

    Args:
        config: architecture of the target.
        embedding: ``[V, H]``.
        output: weight of the output layer ``[V, H]``; ``embedding`` itself if they are tied.
        norm: final norm.
    """

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
        if output is embedding:
            self.lm_head.weight = self.embed_tokens.weight
        else:
            self.lm_head.weight = nn.Parameter(output)

    @property
    def variants(self) -> list[AttentionVariant]:
        """See :class:`~eagle_kit.models.targets.target.Target`."""
        return [record.variant for record in self.config.records]

    def place_layers(self, devices: Sequence[torch.device] | None) -> None:
        """See :class:`~eagle_kit.models.targets.target.Target`. There are no layers to place."""

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
    """Make a target without layers.

    Args:
        folder: folder of the model, for messages.
        config: architecture of the target.
        tensors: published tensors that are outside of the layers.
        dtype: dtype of the weights.

    Raises:
        UserError: embedding, final norm or output layer are missing, or there are several.
    """
    # Matrices of the size of an embedding: the embedding, and the output layer unless they are tied.
    shape = (config.vocab_size, config.hidden_size)
    matrices = {name: tensor for name, tensor in tensors.items() if tuple(tensor.shape) == shape}
    outputs = [name for name in matrices if name.endswith(OUTPUTS)]
    inputs = [name for name in matrices if name not in outputs]
    num_outputs = 0 if config.tie_word_embeddings else 1
    if len(inputs) != 1 or len(outputs) != num_outputs:
        raise UserError(
            f"The weights in {folder} have the matrices {', '.join(matrices) or 'none'} outside of the "
            "layers, which are not one embedding and its output layer.",
            "Train with the whole target.",
        )
    embedding = matrices[inputs[0]].to(dtype)
    output = embedding
    if outputs:
        output = matrices[outputs[0]].to(dtype)
    norm = _final_norm(folder, config, tensors, dtype)
    return BridgedEnds(config, embedding, output, norm).eval().requires_grad_(False)


def _final_norm(
    folder: Path, config: BridgedConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> nn.Module:
    """Make the final norm with its weights; arguments as in :func:`load_ends`.

    Raises:
        UserError: a weight is missing, or there are several.
    """
    assert config.source is not None
    model = new_model(transformers_config(config.source, str(folder)), str(folder))
    decoder = decoder_of(model)
    name = norm_name(decoder)
    norm: nn.Module = getattr(decoder, name)
    for leaf, parameter in list(norm.named_parameters()):
        found: list[torch.Tensor] = []
        for tensor_name, tensor in tensors.items():
            if tensor_name.endswith(f"{name}.{leaf}") and tensor.shape == parameter.shape:
                found.append(tensor)
        if len(found) != 1:
            raise UserError(
                f"The weights in {folder} have {len(found)} tensors {name}.{leaf} outside of the layers.",
                "Train with the whole target.",
            )
        setattr(norm, leaf, nn.Parameter(found[0].to(dtype)))
    return norm


def bridge(model: Any, config: BridgedConfig) -> BridgedModel:
    """Make a target from a causal language model that was loaded with our attention function.

    Raises:
        UserError: its packed forward differs from transformers' own forward over single texts.
    """
    target = BridgedModel(config, model)
    target.eval().requires_grad_(False)
    target.record_layers()
    check(target)
    return target
