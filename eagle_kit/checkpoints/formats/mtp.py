"""DeepSeek's MTP modules for SGLang and vLLM, in a folder of their own.

Ours are ``model.layers.0`` and on, as SGLang reads one module. vLLM looks behind as many layers as
``num_hidden_layers`` says. Both always use the target's embedding and output layer. For every step behind the
first SGLang hands on the normed state, as we do, and vLLM the state before that norm.
"""

import re
from pathlib import Path
from typing import Any

from eagle_kit.checkpoints.formats.files import OWN, DraftFiles, Format, Served, refuse, without_keys
from eagle_kit.checkpoints.mtp import config_to_dict, first_layer, read_mtp, read_mtp_config
from eagle_kit.models.config import TargetConfig

LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.*)")
QUANTISED = "quantization_config"


def write(files: DraftFiles, peer: Format, served: Served) -> DraftFiles:
    """Our layout -> that of ``peer``. Raises UserError for what it cannot hold or would not use."""
    config = read_mtp_config(files.where)
    layer, count = config.layer, config.num_modules
    if peer in ("speculators", "eagle"):
        refuse(peer, "it has no class for DeepSeek's MTP modules", "Export them for sglang or vllm.")
    if config.own_head:
        refuse(peer, "it uses the target's output layer, and these modules have their own")
    if layer.moe is None:
        refuse(peer, "its MTP modules are mixtures of experts, and these have an MLP")
    if peer == "sglang" and count != 1:
        refuse(peer, f"it serves one module for all steps, and these are {count}")
    if peer == "vllm" and layer.mla is not None and not layer.mla.interleaved:
        refuse(peer, "its latent attention rotates pairs that lie side by side (rope_interleave)")
    own = {**(files.config.get(OWN) or {}), "format": peer}
    first = count if peer == "vllm" else 0
    tensors = {}
    for name, tensor in files.tensors.items():
        match = LAYER.fullmatch(name)
        assert match is not None, name
        tensors[f"model.layers.{int(match[1]) + first}.{match[2]}"] = tensor
    return DraftFiles({**files.config, OWN: own}, tensors, files.metadata)


def read(files: DraftFiles, peer: Format, target: TargetConfig | None) -> DraftFiles:
    """The layout of ``peer`` -> ours. Raises UserError when the config or the tensors are no modules'."""
    read_mtp(files.where)  # every tensor accounted for
    config = read_mtp_config(files.where)
    own = dict(files.config.get(OWN) or {})
    is_ours = own.pop("format", None) is not None
    ours: dict[str, Any] = config_to_dict(config)
    kept = {key: value for key, value in files.config.items() if is_ours or key == QUANTISED}
    ours = without_keys(kept, ours) | ours
    ours[OWN] = {**own, **ours[OWN]}
    tensors = {ours_name: files.tensors[name] for ours_name, name in _names(files).items()}
    kind = next(str(t.dtype).removeprefix("torch.") for n, t in tensors.items() if n.endswith("enorm.weight"))
    return DraftFiles({"dtype": kind, "torch_dtype": kind} | ours, tensors, files.metadata, files.where)


def _names(files: DraftFiles) -> dict[str, str]:
    """Our names of the modules' tensors -> theirs; tensors of other layers are not modules'."""
    config = read_mtp_config(files.where)
    first, names = first_layer(Path(files.where), config), {}
    for name in files.tensors:
        match = LAYER.fullmatch(name)
        if match is not None and first <= int(match[1]) < first + config.num_modules:
            names[f"model.layers.{int(match[1]) - first}.{match[2]}"] = name
    return names


def tensor_names(files: DraftFiles, ours: DraftFiles) -> dict[str, str]:
    """Our name of every tensor in ``files`` that ``ours`` kept -> the name it has there."""
    return _names(files)
