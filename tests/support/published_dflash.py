"""The published forward of DFlash (arXiv 2602.06036, section 3) in fp64, from a checkpoint folder alone:
dense scores over the context and all blocks, q, k and v apart, no import of ours."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional as F


class PublishedDFlash:
    """A head in its authors' layout; ``embedding [V, H]`` and ``output [V, H]`` are the target's."""

    def __init__(self, folder: Path, embedding: torch.Tensor, output: torch.Tensor) -> None:
        self.c = json.loads((folder / "config.json").read_text())
        self.w = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
        self.embedding, self.output = embedding.double(), output.double()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.c["rms_norm_eps"])

    def heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """``[R, H]`` -> ``[heads, R, D]``."""
        y = x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)
        return y.unflatten(1, (-1, self.c["head_dim"])).transpose(0, 1)

    def turned(self, y: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = self.c["head_dim"] // 2
        freq = self.c["rope_theta"] ** -(torch.arange(half).double() / half)
        turned = torch.complex(y[..., :half], y[..., half:]) * torch.exp(1j * positions[:, None] * freq)
        return torch.cat((turned.real, turned.imag), -1)

    def __call__(self, aux, ids, doc_start, anchors, size: int | None = None) -> torch.Tensor:
        """Logits ``[A, B, V]`` of all rows of all blocks.

        Args:
            aux: ``[T, m Ht]``; ``ids`` and ``doc_start`` int64 ``[T]``; ``anchors`` int64 ``[A]``.
            size: B; default that of the config.
        """
        size = size or self.c["block_size"]
        context = self.norm(aux.double() @ self.w["fc.weight"].T, "hidden_norm")
        tokens = torch.full((len(anchors), size), self.c["dflash_config"]["mask_token_id"])
        tokens[:, 0] = ids[anchors]
        offset = torch.arange(size).expand(len(anchors), size).flatten()
        block = torch.arange(len(anchors)).repeat_interleave(size)
        text = torch.arange(len(aux))
        positions = torch.cat((text - doc_start, (anchors - doc_start[anchors])[block] + offset)).double()
        in_text = (text < anchors[block, None]) & (doc_start == doc_start[anchors][block, None])
        in_block = block == block[:, None]
        h = self.embedding[tokens.flatten()]
        for i, kind in enumerate(self.c["layer_types"]):
            seen = torch.cat((in_text, in_block), 1)
            if kind == "sliding_attention":  # causal in a block; a row counts itself
                behind = positions[len(text) :, None] - positions
                seen = seen & (behind >= 0) & (behind < self.c["sliding_window"])
            h = self.layer(f"layers.{i}", h, context, seen, positions)
        output = self.w.get("lm_head.weight", self.output)
        return (self.norm(h, "norm") @ output.T).unflatten(0, (-1, size))

    def layer(self, name: str, h, context, seen, positions) -> torch.Tensor:
        x = self.norm(h, f"{name}.input_layernorm")
        both = torch.cat((context, x))
        q = self.norm(self.heads(x, f"{name}.self_attn.q_proj"), f"{name}.self_attn.q_norm")
        k = self.norm(self.heads(both, f"{name}.self_attn.k_proj"), f"{name}.self_attn.k_norm")
        v = self.heads(both, f"{name}.self_attn.v_proj")
        q, k = self.turned(q, positions[len(context) :]), self.turned(k, positions)
        k, v = (part.repeat_interleave(len(q) // len(part), 0) for part in (k, v))
        scores = (q @ k.transpose(1, 2) / self.c["head_dim"] ** 0.5).masked_fill(~seen, float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        out = f"{name}.self_attn.o_proj"
        h = h + attended @ self.w[f"{out}.weight"].T + self.w.get(f"{out}.bias", 0)
        x = self.norm(h, f"{name}.post_attention_layernorm")
        gate, up = (x @ self.w[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return h + (F.silu(gate) * up) @ self.w[f"{name}.mlp.down_proj.weight"].T
