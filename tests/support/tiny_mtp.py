"""DeepSeek targets with MTP modules behind their layers, in published files; and the modules' published
forward around the decoder layer of transformers."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_mixtures import randomised, v3
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)


class PublishedModule(torch.nn.Module):
    """``shared_head.norm(layer(eh_proj([enorm(embedding); hnorm(hidden)])))`` over a whole text, causal."""

    def __init__(self, config, *, dense: bool = False) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = DeepseekV3RMSNorm(size, eps), DeepseekV3RMSNorm(size, eps)
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.layer = DeepseekV3DecoderLayer(config, 0 if dense else config.num_hidden_layers)
        self.norm = DeepseekV3RMSNorm(size, eps)
        self.rope = DeepseekV3RotaryEmbedding(config)

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """``hidden`` and ``embeds [T, H]``, row i of position i -> the normed output ``[T, H]``."""
        x = self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(hidden)), -1))[None]
        positions = torch.arange(len(hidden))[None]
        mask = torch.full((len(hidden), len(hidden)), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        out = self.layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rope(x, positions),
        )
        return self.norm(out[0] if isinstance(out, tuple) else out).view_as(hidden)

    def published(self) -> dict[str, torch.Tensor]:
        """Its tensors by published names, without ``model.layers.N.``."""
        names = {"norm.weight": "shared_head.norm.weight"}
        tensors = {}
        for name, tensor in self.state_dict().items():
            name = names.get(name, name.removeprefix("layer."))
            if name.startswith("rope."):
                continue
            if name == "mlp.experts.gate_up_proj":
                for i, both in enumerate(tensor):
                    gate, up = both.chunk(2)
                    tensors |= {
                        f"mlp.experts.{i}.gate_proj.weight": gate,
                        f"mlp.experts.{i}.up_proj.weight": up,
                    }
            elif name == "mlp.experts.down_proj":
                tensors |= {f"mlp.experts.{i}.down_proj.weight": one for i, one in enumerate(tensor)}
            else:
                tensors[name] = tensor
        return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def random_module(config, seed: int, *, dense: bool = False, std: float = 0.2) -> PublishedModule:
    """A module of which everything is random."""
    generator = torch.Generator().manual_seed(seed)
    module = PublishedModule(config, dense=dense).eval()
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(noise.abs() * 0.5)
            elif tensor.ndim == 1:
                tensor.copy_(1 + 0.3 * noise if "norm" in name else noise * std)
            else:
                tensor.copy_(noise * std)
    return module


def save_target(folder: Path, *, modules: int = 1, copies: bool = True, **changes) -> list[PublishedModule]:
    """Save a random DeepSeek-V3 with ``modules`` behind its last layer; ``copies`` of embedding and head
    beside them, as DeepSeek's release has them -> the modules."""
    dense = changes.get("n_routed_experts", 12) is None
    if dense:
        changes = {name: value for name, value in changes.items() if name != "n_routed_experts"}
        changes["first_k_dense_replace"] = 4
    config = v3(**changes)
    theirs = randomised(config)
    theirs.save_pretrained(folder)
    made = [random_module(config, 10 + i, dense=dense) for i in range(modules)]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for i, module in enumerate(made):
        mine = module.published()
        if copies:
            mine["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            mine["shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        number = config.num_hidden_layers + i
        tensors |= {f"model.layers.{number}.{name}": tensor for name, tensor in mine.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": modules}
    if dense:
        raw["n_routed_experts"] = None
    (folder / "config.json").write_text(json.dumps(raw))
    return made


def load_modules(folder, dtype=torch.float32, target=None):
    """MTP modules of a folder of their own, or of a target's."""
    from eagle_kit.drafts.files.draft_files import open_draft
    from eagle_kit.drafts.mtp.kind import MTP

    return MTP.read(open_draft(folder), target, dtype=dtype)
