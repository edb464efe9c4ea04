"""DeepSeek's MTP modules on disk: inside a target's folder, or in a folder of their own.

Module i of a target of L layers is ``model.layers.{L + i}.*``: a decoder layer with ``enorm``, ``hnorm``,
``eh_proj``, ``shared_head.norm`` and, as copies of the target's, ``embed_tokens`` and ``shared_head.head``. A
folder of its own (``DeepseekV3ForCausalLMNextN``) keeps these names, or begins at ``model.layers.0`` when its
config counts the modules as its layers; ours do.
"""

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eagle_kit.checkpoints.copies import is_copy
from eagle_kit.checkpoints.layout import mla_to_dict, rope_to_dict
from eagle_kit.core.errors import UserError
from eagle_kit.models.blocks.layers import Rope
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.heads.mtp import MTPConfig, MTPHead
from eagle_kit.models.loading.loader import check_activation, check_tensors, fill, read_json, read_published
from eagle_kit.models.loading.published import Part, expected_shapes, published_parts, read_fp8_block
from eagle_kit.models.targets.llama import LlamaModel

ARCHITECTURE = "DeepseekV3ForCausalLMNextN"
EMBEDDING, OUTPUT = "embed_tokens.weight", "shared_head.head.weight"
COUNT = "num_nextn_predict_layers"
FAMILIES = ("deepseek_v2", "deepseek_v3")


def is_mtp_config(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of modules in a folder of their own."""
    return (config.get("architectures") or ["?"])[0] == ARCHITECTURE


def check_family(config: TargetConfig) -> None:
    """Raises UserError for targets that have no published form of MTP modules."""
    if config.model_type not in FAMILIES:
        raise UserError(
            f"MTP modules are for DeepSeek's targets, and this one is of the family {config.model_type}.",
            "Use an EAGLE-3 head.",
        )


def read_mtp_config(folder: str | Path) -> MTPConfig:
    """The modules of a folder of their own, or of a target's.

    Raises:
        UserError: there are none, or the config cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"The draft folder {folder} does not exist.", "Give a folder with config.json and weights."
        )
    raw = read_json(folder / "config.json")
    check_activation(raw, str(folder))
    own = raw.get("eagle_kit") or {}
    if is_mtp_config(raw):
        raw = raw | {"architectures": ["DeepseekV3ForCausalLM"]}
    try:
        layer = TargetConfig.from_dict(raw)
    except KeyError as key:
        raise UserError(
            f"The draft's config.json in {folder} has no {key}.", "Copy it from its source."
        ) from None
    if not layer.num_mtp_layers:
        raise UserError(
            f"The model in {folder} has no MTP module ({COUNT} is 0).",
            "Give a draft, or choose NGRAM, which needs none.",
        )
    return MTPConfig(
        layer=layer,
        num_modules=layer.num_mtp_layers,
        own_head=bool(own.get("own_head", False)),
        target=own.get("target", ""),
        template_hash=own.get("template_hash", ""),
    )


def load_mtp(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    target: LlamaModel | None = None,
) -> MTPHead:
    """Load the modules of a folder of their own, or of a target's, every tensor accounted for.

    The embedding is the target's. So is the output layer, unless the folder brings one that differs.

    Args:
        dtype: of the weights in memory, those in blocks of fp8 too; biases of gates stay fp32.
        target: whose output layer is used; without it, the head must be bound before it runs.

    Raises:
        UserError: a corrupt file; missing, unexpected or misshapen tensors by name.
    """
    found = read_mtp(folder, target)
    head, layer = found.head, found.head.config.layer
    head.rope = Rope(layer.rope_dim, layer.rope_theta, layer.rope_scaling).to(device)
    head.t2d = torch.ones(layer.vocab_size, dtype=torch.bool, device=device)
    fill(head, found.parts, found.published, found.block, dtype, device)
    return head if target is None else head.bind(target.lm_head)


class MTPFiles(NamedTuple):
    """A checked checkpoint: the ``head`` without weights, the ``published`` ones, which ``parts`` of them
    each parameter is made of, and the ``block`` of those in fp8."""

    head: MTPHead
    published: dict[str, torch.Tensor]
    parts: dict[str, list[Part]]
    block: tuple[int, int] | None


def read_mtp(folder: str | Path, target: LlamaModel | None = None) -> MTPFiles:
    """Read modules and account for every tensor. Raises UserError as :func:`load_mtp` does."""
    folder = Path(folder)
    config = read_mtp_config(folder)
    block = read_fp8_block(read_json(folder / "config.json"), str(folder))
    published = read_modules(folder, config)
    copies = _take_copies(published, config, folder)
    if target is not None:
        _compare_embeddings(copies[EMBEDDING], target, folder)
    config, output = _own_output(config, copies[OUTPUT], target, folder)
    with torch.device("meta"):
        head = MTPHead(config)
    if output is not None:
        published["lm_head.weight"] = output
    parts = published_parts(head.named_parameters(), config.layer, published)
    every = (part for group in parts.values() for part in group)
    check_tensors(published, expected_shapes(every, published, block), str(folder))
    return MTPFiles(head, published, parts, block)


def has_modules(folder: str | Path) -> bool:
    """Whether a target's folder brings the modules that its config speaks of; ``transformers`` leaves them
    out when it saves a model."""
    config = read_mtp_config(folder)
    wanted = f"layers.{config.layer.num_layers}.eh_proj.weight"
    return bool(read_published(Path(folder), lambda name: name.removeprefix("model.") == wanted))


def first_layer(folder: Path, config: MTPConfig) -> int:
    """The number that the first module has in the names of tensors: 0 in folders of ours and of SGLang's,
    else that of the layer behind the last one."""
    layers = config.layer.num_layers
    if layers != config.num_modules or not is_mtp_config(read_json(folder / "config.json")):
        return layers
    behind = f"layers.{layers}.eh_proj.weight"  # there when vLLM is meant
    return layers if read_published(folder, lambda name: name.removeprefix("model.") == behind) else 0


def read_modules(folder: Path, config: MTPConfig) -> dict[str, torch.Tensor]:
    """The tensors of the modules as ``layers.{i}.*``, i from 0. Raises UserError when there are none."""
    first, count = first_layer(folder, config), config.num_modules
    pattern = re.compile(r"(?:model\.)?layers\.(\d+)\.")

    def is_wanted(name: str) -> bool:
        match = pattern.match(name)
        return match is not None and first <= int(match[1]) < first + count

    found = {}
    for name, tensor in read_published(folder, is_wanted).items():
        _, number, rest = name.split(".", 2)
        found[f"layers.{int(number) - first}.{rest}"] = tensor
    if not found:
        raise UserError(
            f"The config in {folder} speaks of MTP modules, but there are no weights of any.",
            "Use the published checkpoint; transformers leaves them out when it saves one.",
        )
    return found


def _take_copies(
    published: dict[str, torch.Tensor], config: MTPConfig, folder: Path
) -> dict[str, torch.Tensor | None]:
    """Remove embeddings and output layers from ``published`` -> one of each, None where there is none."""
    copies: dict[str, torch.Tensor | None] = {}
    shape = (config.vocab_size, config.hidden_size)
    for name in (EMBEDDING, OUTPUT):
        names = [f"layers.{i}.{name}" for i in range(config.num_modules)]
        found = {full: published.pop(full) for full in names if full in published}
        check_tensors(found, dict.fromkeys(found, shape), str(folder))
        brought = list(found.values())
        if any(not is_copy(tensor, brought[0]) for tensor in brought[1:]):
            raise UserError(
                f"The modules in {folder} do not share one {name}.", "Use modules that share the target's."
            )
        copies[name] = brought[0] if brought else None
    return copies


def _compare_embeddings(copy: torch.Tensor | None, target: LlamaModel, folder: Path) -> None:
    if copy is not None and not is_copy(copy, target.embed_tokens.weight):
        warnings.warn(
            f"The {EMBEDDING} in {folder} is not the target's, so the modules were trained for other "
            "weights. The target's is used, and fewer tokens may be accepted.",
            stacklevel=3,
        )


def _own_output(
    config: MTPConfig, copy: torch.Tensor | None, target: LlamaModel | None, folder: Path
) -> tuple[MTPConfig, torch.Tensor | None]:
    """Whether the output layer is the head's own, and then its weight."""
    if copy is None:
        if config.own_head:
            raise UserError(
                f"The output layer {OUTPUT} is missing in {folder}.", "Use a complete checkpoint."
            )
        return config, None
    is_targets = target is not None and is_copy(copy, target.head_weight)
    return replace(config, own_head=not is_targets), None if is_targets else copy


def to_published(head: MTPHead, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor of a folder of its own by its published name, on the CPU, in ``dtype``; an output layer
    only when it is the head's own."""
    parts = published_parts(head.named_parameters(), head.config.layer, ())
    out: dict[str, torch.Tensor] = {}
    for name, parameter in head.named_parameters():
        if name == "lm_head.weight":
            out["model.layers.0." + OUTPUT] = parameter.detach().to("cpu", dtype)
            continue
        kind = parameter.dtype if name.endswith("e_score_correction_bias") else dtype
        value = parameter.detach().cpu().to(kind).reshape(-1, *parts[name][0].shape[1:])
        pieces = value.split([part.shape[0] for part in parts[name]])
        for part, piece in zip(parts[name], pieces, strict=True):
            out[f"model.{part.name}"] = piece.clone()
    return out


def config_to_dict(config: MTPConfig) -> dict[str, Any]:
    """``config.json`` of modules in a folder of their own, in DeepSeek's keys."""
    layer = config.layer
    assert layer.mla is not None
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "deepseek_v3",
        "num_hidden_layers": config.num_modules,
        COUNT: config.num_modules,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_heads,
        **mla_to_dict(layer.mla),
        **_moe_to_dict(layer),
        "hidden_act": "silu",
        "attention_bias": layer.attention_bias,
        "mlp_bias": layer.mlp_bias,
        "rms_norm_eps": layer.rms_norm_eps,
        **rope_to_dict(layer.rope_theta, layer.rope_scaling),
        "max_position_embeddings": layer.max_position_embeddings,
        "vocab_size": layer.vocab_size,
        "tie_word_embeddings": False,
        "eagle_kit": {
            "target": config.target,
            "template_hash": config.template_hash,
            "own_head": config.own_head,
        },
    }


def _moe_to_dict(layer: TargetConfig) -> dict[str, Any]:
    """The mixture of a module; without one, none of its keys."""
    moe = layer.moe
    if moe is None:
        return {}
    method = "greedy" if moe.num_groups == 1 else "group_limited_greedy"
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "n_shared_experts": moe.shared_intermediate_size // moe.intermediate_size,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "scoring_func": moe.scoring,
        "topk_method": "noaux_tc" if moe.has_bias else method,
        "n_group": moe.num_groups,
        "topk_group": moe.num_kept_groups,
        "norm_topk_prob": moe.normalises,
        "routed_scaling_factor": moe.scale,
    }
