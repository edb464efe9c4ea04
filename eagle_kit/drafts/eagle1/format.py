"""EAGLE-1/2 heads for SGLang, vLLM and EAGLE's repository; speculators has dropped its class for them.

The classes do not agree on biases. SGLang's ``fc`` always has one, vLLM's never, EAGLE's unless ``bias`` is
false. SGLang and vLLM take ``bias`` for biases of attention; SGLang has those of queries, keys, values and
output together or not at all. Zeros make up for a bias that a class wants and the head does not have: the
logits are the same, and the zeros are left out again on the way back (they are named under ``zeros``).
"""

import warnings
from typing import Any

import torch

from eagle_kit.drafts.base.kind import HeadKind
from eagle_kit.drafts.eagle1.head import Eagle1Config
from eagle_kit.drafts.files.draft_files import OUTPUT, OWN, DraftFiles, without_keys
from eagle_kit.drafts.files.formats import (
    DraftFormat,
    Format,
    Served,
    refuse,
    with_dtype,
    zeros_for,
)
from eagle_kit.models.config import TargetConfig

ARCHITECTURE = "LlamaForCausalLMEagle"
"""SGLang's class, by which ours are called."""
LAYER = "layers.0."
FC_BIAS = "fc.bias"
BIAS_KEYS = ("bias", "qkv_bias", "attention_bias")


class Eagle1Format(DraftFormat):
    """Between our layout of EAGLE-1 heads and the others'."""

    kind: HeadKind[Any, Any, Any]

    def layout(self, files: DraftFiles) -> tuple[Format, str]:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`."""
        name = files.architecture
        if name == ARCHITECTURE:
            return "sglang", "EAGLE-1, as SGLang names it"
        if name.startswith("Eagle"):
            return "vllm", "EAGLE-1, as vLLM names it"
        return "eagle", f"EAGLE-1, as EAGLE's repository has it ({name} with an fc)"

    def write(self, files: DraftFiles, peer: Format, served: Served) -> DraftFiles:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`."""
        config = self.kind.read_config(files)
        raw = without_keys(files.config, BIAS_KEYS)
        tensors = dict(files.tensors)
        zeros: dict[str, torch.Tensor] = {}

        # What each class calls it, wants of biases, and cannot serve.
        match peer:
            case "speculators":
                refuse(peer, "it has dropped its class for EAGLE-1 heads", "Export it for sglang or eagle.")
            case "sglang":
                raw["architectures"] = [ARCHITECTURE]
                raw["attention_bias"] = config.attention_bias or config.attention_out_bias
                zeros = _missing_biases(config, tensors, fc=True, attention=raw["attention_bias"])
            case "vllm":
                raw["architectures"] = ["EagleLlamaForCausalLM"]
                raw |= {"attention_bias": config.attention_out_bias, "qkv_bias": config.attention_bias}
                if OUTPUT in tensors:
                    refuse(peer, f"its EAGLE class has no place for {OUTPUT}")
                if config.fc_bias:
                    refuse(peer, "the fc of its EAGLE class has no bias", "Export it for sglang or eagle.")
            case "eagle":
                if config.attention_out_bias:
                    refuse(peer, "its head has no bias after its attention")
                if config.rope_scaling:
                    refuse(peer, f"its RoPE has no scaling of the kind {config.rope_scaling['rope_type']}")
                if config.head_dim * config.num_heads != config.hidden_size:
                    refuse(peer, "its heads together are as wide as the hidden size, and this head's are not")
                raw |= {"architectures": ["LlamaForCausalLM"], "bias": config.fc_bias}
                raw |= {"qkv_bias": True} if config.attention_bias else {}
        if config.logit_scale != 1.0 and peer != "vllm":
            warnings.warn(
                f"{peer} does not read logit_scale ({config.logit_scale:g}): its trees and sampled drafts "
                "will be those of other probabilities.",
                stacklevel=2,
            )

        # What the way back needs.
        own: dict[str, Any] = {**files.own, "format": peer}
        if zeros:
            own["zeros"] = sorted(zeros)
        return DraftFiles({**raw, OWN: own}, tensors | zeros, files.metadata)

    def read(self, files: DraftFiles, peer: Format, target: TargetConfig | None) -> DraftFiles:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`; copies of the target's matrices are
        kept."""
        own = files.own
        is_ours = own.pop("format", None) is not None
        zeros = own.pop("zeros", [])
        tensors = {
            plain: tensor
            for name, tensor in files.tensors.items()
            if (plain := name.removeprefix("model.")) not in zeros or bool(tensor.any())
        }
        raw = without_keys(files.config, BIAS_KEYS)  # the tensors know better
        plain_files = DraftFiles(raw | {OWN: own}, tensors, files.metadata, files.where)
        config = self.kind.read_config(plain_files)
        self.kind.weights(plain_files, config)
        ours: dict[str, Any] = self.kind.write_config(config)
        if is_ours:
            ours = without_keys(raw, ours) | ours
            ours[OWN] = {**own, **ours[OWN]}
        return DraftFiles(with_dtype(ours, tensors["fc.weight"]), tensors, files.metadata, files.where)


def _missing_biases(
    config: Eagle1Config, tensors: dict[str, torch.Tensor], *, fc: bool, attention: bool
) -> dict[str, torch.Tensor]:
    """Zeros for the biases that a class has and the head does not have."""
    kv = config.num_kv_heads * config.head_dim
    wanted = {FC_BIAS: config.hidden_size} if fc else {}
    if attention:
        rows = {"q": config.num_heads * config.head_dim, "k": kv, "v": kv, "o": config.hidden_size}
        wanted |= {f"{LAYER}self_attn.{part}_proj.bias": count for part, count in rows.items()}
    zeros: dict[str, torch.Tensor] = {}
    for name, rows_of_it in wanted.items():
        if name not in tensors:
            zeros |= zeros_for(tensors, name, rows_of_it)
    return zeros
