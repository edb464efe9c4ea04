"""Targets of GLM and Qwen with an MTP module beside them, in published files; and the module's published
forward around the decoder layer of transformers."""

import copy
import importlib
import json

import torch
from families import family_config, family_model
from safetensors.torch import load_file, save_file

PREFIXES = {"glm4_moe": "Glm4Moe", "qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5"}
PREFIXES["qwen3_5_moe_text"] = "Qwen3_5Moe"
QWEN_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "last": "norm",
}


class PublishedModule(torch.nn.Module):
    """``last(layer(eh_proj([enorm(embedding); hnorm(hidden)])))`` over a whole text, causal."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        config = copy.deepcopy(family_config(kind))
        config._attn_implementation = "eager"
        if kind != "glm4_moe":
            config.layer_types = [*config.layer_types, "full_attention"]
        folder = kind.removesuffix("_text")
        modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        make = {name: getattr(modeling, PREFIXES[kind] + name) for name in ("DecoderLayer", "RMSNorm")}
        rotary = PREFIXES[kind] + ("TextRotaryEmbedding" if "3_5" in kind else "RotaryEmbedding")
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.last = (make["RMSNorm"](size, eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.layer = make["DecoderLayer"](config, config.num_hidden_layers)
        self.rope = getattr(modeling, rotary)(config)

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """``hidden`` and ``embeds [T, H]``, row i of position i -> the normed output ``[T, H]``."""
        x = self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(hidden)), -1))[None]
        positions = torch.arange(len(hidden))[None]
        mask = torch.full((len(hidden), len(hidden)), float("-inf")).triu(1)[None, None]
        # transformers 5.17 wants positions in three dimensions for rotation in sections.
        sections = positions.expand(3, 1, -1) if hasattr(self.rope, "mrope_section") else positions
        table = self.rope(x, sections)
        out = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=table)
        return self.last(out[0] if isinstance(out, tuple) else out).view_as(hidden)

    def published(self, kind: str, number: int) -> dict[str, torch.Tensor]:
        """Its tensors by published names."""
        tensors = {}
        for name, tensor in self.state_dict().items():
            part, _, leaf = name.partition(".")
            if part == "rope":
                continue
            if kind == "glm4_moe":
                names = {"last": "shared_head.norm.", "layer": ""}
                name = f"model.layers.{number}.{names.get(part, part + '.')}{leaf}"
            else:
                name = f"mtp.layers.0.{leaf}" if part == "layer" else f"mtp.{QWEN_NAMES[part]}.{leaf}"
            if name.endswith("experts.gate_up_proj"):
                for i, both in enumerate(tensor):
                    for side, value in zip(("gate", "up"), both.chunk(2), strict=True):
                        tensors[name.replace("gate_up_proj", f"{i}.{side}_proj.weight")] = value
            elif name.endswith("experts.down_proj"):
                for i, value in enumerate(tensor):
                    tensors[name.replace("down_proj", f"{i}.down_proj.weight")] = value
            else:
                tensors[name] = tensor
        return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def save_with_module(kind: str, folder, seed: int = 10) -> PublishedModule:
    """Save a random target with a random module beside it -> the module."""
    model = family_model(kind)
    model.save_pretrained(folder)
    module = PublishedModule(kind).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        is_norm = (tensor.ndim == 1 and "norm" in name) or name.startswith("last")
        tensor.copy_((tensor + 0.3 * noise) if is_norm else 0.2 * noise)
    file = folder / "model.safetensors"
    tensors = load_file(file) | module.published(kind, model.config.num_hidden_layers)
    save_file(tensors, file, metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["num_nextn_predict_layers" if kind in ("glm4_moe", "qwen3_next") else "mtp_num_hidden_layers"] = 1
    if kind == "qwen3_next":
        del raw["num_nextn_predict_layers"]  # as published
    (folder / "config.json").write_text(json.dumps(raw))
    return module
