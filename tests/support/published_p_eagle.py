"""The published forward of P-EAGLE (arXiv 2602.01469, section 3) in fp64, from a checkpoint folder alone:
dense scores over all rows of all depths, q, k and v apart, no import of ours."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional as F


class PublishedPEagle:
    """A head; ``embedding [V, H]`` is the target's."""

    def __init__(self, folder: Path, embedding: torch.Tensor) -> None:
        self.c = json.loads((folder / "config.json").read_text())
        self.w = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
        self.embedding = embedding.double()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.c["rms_norm_eps"])

    def heads(self, x: torch.Tensor, name: str, positions: torch.Tensor | None) -> torch.Tensor:
        """``[R, input]`` -> ``[heads, R, D]``, each key or value head repeated for its queries."""
        y = (x @ self.w[f"{name}.weight"].T).unflatten(1, (-1, self.c["head_dim"])).transpose(0, 1)
        norm = name.replace("proj", "norm")
        if f"{norm}.weight" in self.w:
            y = self.norm(y, norm)
        if positions is not None:
            half = self.c["head_dim"] // 2
            freq = self.c["rope_theta"] ** -(torch.arange(half).double() / half)
            turned = torch.complex(y[..., :half], y[..., half:]) * torch.exp(
                1j * positions.double()[:, None] * freq
            )
            y = torch.cat((turned.real, turned.imag), -1)
        return y.repeat_interleave(self.c["num_attention_heads"] // len(y), 0)

    def layer(self, name: str, x: torch.Tensor, residual: torch.Tensor, seen, positions) -> torch.Tensor:
        q, k = (self.heads(x, f"{name}.self_attn.{part}_proj", positions) for part in "qk")
        v = self.heads(x, f"{name}.self_attn.v_proj", None)
        number = 0 if name == "midlayer" else int(name.rpartition(".")[2])
        if self.c.get("layer_types", ["full_attention"] * (number + 1))[number] == "sliding_attention":
            seen = seen & (positions[:, None] - positions < self.c["sliding_window"])
        scores = (q @ k.transpose(1, 2) / self.c["head_dim"] ** 0.5).masked_fill(~seen, float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        h = residual + attended @ self.w[f"{name}.self_attn.o_proj.weight"].T
        x = self.norm(h, f"{name}.post_attention_layernorm")
        gate, up = (x @ self.w[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return h + (F.silu(gate) * up) @ self.w[f"{name}.mlp.down_proj.weight"].T

    def __call__(self, aux, next_ids, doc_start, rows: list[torch.Tensor]) -> torch.Tensor:
        """Logits over the draft vocabulary of all rows of all depths, one below the other.

        Args:
            aux: ``[T, 3 Ht]``; ``next_ids`` and ``doc_start`` int64 ``[T]``, the token after each row.
            rows: of each depth, the first 0..T-1.
        """
        row, depth = torch.cat(rows), torch.cat([torch.full_like(r, d) for d, r in enumerate(rows)])
        is_mask = (depth > 0)[:, None]
        mask = self.w["mask_hidden"].flatten()
        states = torch.where(is_mask, mask, aux.double()[row])
        if self.c.get("norm_before_fc"):
            states = self.norm(states, "input_norm")
        hidden = states @ self.w["fc.weight"].T
        embeds = torch.where(is_mask, self.w["mask_embedding"], self.embedding[next_ids[row]])
        before = (
            (depth[None] == 0)
            & (row[None] <= row[:, None])
            & (doc_start[row][None] == doc_start[row][:, None])
        )
        seen = before | ((row[None] == row[:, None]) & (depth[None] <= depth[:, None]))
        positions = row - doc_start[row] + depth
        normed = self.norm(hidden, "midlayer.hidden_norm")
        x = torch.cat((self.norm(embeds, "midlayer.input_layernorm"), normed), -1)
        residual = normed if self.c["norm_before_residual"] else hidden
        h = self.layer("midlayer", x, residual, seen, positions)
        for i in range(1, self.c["num_hidden_layers"]):
            h = self.layer(f"layers.{i}", self.norm(h, f"layers.{i}.input_layernorm"), h, seen, positions)
        return self.norm(h, "norm") @ self.w["lm_head.weight"].T
