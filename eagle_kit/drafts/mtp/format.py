"""DeepSeek's MTP modules for SGLang and vLLM, in a folder of their own.

Ours are ``model.layers.0`` and on, as SGLang reads one module. vLLM looks for it after as many layers as
``num_hidden_layers`` says. Both always use the target's embedding and output layer. For every step after the
first SGLang hands on the normed state, as we do, and vLLM the state before that norm.
"""

from typing import Any

from eagle_kit.drafts.base.kind import HeadKind
from eagle_kit.drafts.files.draft_files import OWN, DraftFiles, without_keys
from eagle_kit.drafts.files.formats import DraftFormat, Format, Served, refuse, with_dtype
from eagle_kit.models.config import TargetConfig

DEEPSEEK = ("deepseek_v2", "deepseek_v3")
QUANTISED = "quantization_config"


class MTPFormat(DraftFormat):
    """Between our layout of modules and the others'."""

    kind: HeadKind[Any, Any, Any]

    def layout(self, files: DraftFiles) -> tuple[Format, str]:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`."""
        return "sglang", "DeepSeek's NextN modules, as SGLang has them"

    def write(self, files: DraftFiles, peer: Format, served: Served) -> DraftFiles:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`."""
        config = self.kind.read_config(files)
        layer = config.layer
        count = config.num_modules
        if peer in ("speculators", "eagle"):
            refuse(peer, "it has no class for DeepSeek's MTP modules", "Export them for sglang or vllm.")
        if layer.model_type not in DEEPSEEK:
            refuse(
                peer,
                f"it reads the module of a {layer.model_type} out of the target's own checkpoint",
                "Serve it here.",
            )
        if config.own_head:
            refuse(peer, "it uses the target's output layer, and these modules have their own")
        if layer.moe is None:
            refuse(peer, "its MTP modules are mixtures of experts, and these have an MLP")
        if peer == "sglang" and count != 1:
            refuse(peer, f"it serves one module for all steps, and these are {count}")
        if peer == "vllm" and layer.mla is not None and not layer.mla.interleaved:
            refuse(peer, "its latent attention rotates pairs that lie side by side (rope_interleave)")
        own = {**files.own, "format": peer}
        first = count if peer == "vllm" else 0
        tensors = {}
        for name, tensor in files.tensors.items():
            _, _, number, rest = name.split(".", 3)
            tensors[f"model.layers.{int(number) + first}.{rest}"] = tensor
        return DraftFiles({**files.config, OWN: own}, tensors, files.metadata)

    def read(self, files: DraftFiles, peer: Format, target: TargetConfig | None) -> DraftFiles:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`."""
        config = self.kind.read_config(files)
        self.kind.weights(files, config)
        own = files.own
        is_ours = own.pop("format", None) is not None
        ours: dict[str, Any] = self.kind.write_config(config)
        kept = {key: value for key, value in files.config.items() if is_ours or key == QUANTISED}
        ours = without_keys(kept, ours) | ours
        ours[OWN] = {**own, **ours[OWN]}
        tensors = {name: files.tensors[theirs] for name, theirs in self.kind.names(files).items()}
        first = next(tensor for name, tensor in tensors.items() if name.endswith("enorm.weight"))
        return DraftFiles(with_dtype(ours, first), tensors, files.metadata, files.where)
