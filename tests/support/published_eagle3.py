"""The published EAGLE-3 forward written a second time, from a checkpoint folder alone.

It follows the description of the layout word by word, without any import of ours: q, k and v apart, dense
scores, one row after another.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


class PublishedEagle3:
    """A head as SGLang and vLLM read it. ``calls`` keeps keys and values, one entry per token seen."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        variance = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(variance + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        size = x.shape[-1]
        out = torch.empty_like(x)
        for pair in range(size // 2):
            angle = torch.tensor(position * self.config["rope_theta"] ** (-2.0 * pair / size)).double()
            a, b = x[:, pair], x[:, pair + size // 2]
            out[:, pair] = a * angle.cos() - b * angle.sin()
            out[:, pair + size // 2] = b * angle.cos() + a * angle.sin()
        return out

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.weights[f"midlayer.{name}.weight"] @ x

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """``[3 * H_target]`` -> ``[H]``."""
        if self.config["fc_norm"]:
            parts = aux.split(self.config["target_hidden_size"])
            aux = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        return self.weights["fc.weight"] @ aux

    def step(
        self, hidden: torch.Tensor, embed: torch.Tensor, position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token: ``hidden`` and ``embed [H]`` -> what is fed back ``[H]``, target logits ``[V]``."""
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size = self.config["head_dim"]
        normed = self.norm(hidden, "midlayer.hidden_norm")
        x = torch.cat((self.norm(embed, "midlayer.input_layernorm"), normed))
        residual = normed if self.config["norm_before_residual"] else hidden
        q = self.rotate(self.project("self_attn.q_proj", x).view(heads, size), position)
        self.keys.append(self.rotate(self.project("self_attn.k_proj", x).view(kv_heads, size), position))
        self.values.append(self.project("self_attn.v_proj", x).view(kv_heads, size))
        attended = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            keys = torch.stack([key[group] for key in self.keys])
            values = torch.stack([value[group] for value in self.values])
            attended.append(torch.softmax(keys @ q[head] / size**0.5, 0) @ values)
        h = residual + self.project("self_attn.o_proj", torch.cat(attended))
        x = self.norm(h, "midlayer.post_attention_layernorm")
        gate, up = self.project("mlp.gate_proj", x), self.project("mlp.up_proj", x)
        h = h + self.project("mlp.down_proj", gate / (1 + torch.exp(-gate)) * up)
        normed = self.norm(h, "norm")
        hot = self.weights["lm_head.weight"] @ normed
        logits = torch.full((self.config["vocab_size"],), float("-inf"), dtype=torch.float64)
        for draft_id, logit in enumerate(hot):
            logits[draft_id + int(self.weights["d2t"][draft_id])] = logit
        return (normed if self.config["norm_output"] else h), logits
