"""The published forwards of DFlash (arXiv 2602.06036, section 3) and DSpark (arXiv 2607.05147) in fp64, from
a checkpoint folder alone: dense scores over the context and all blocks, q, k and v apart, no import of
ours."""

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
        tokens = torch.full(
            (len(anchors), size), {**self.c, **self.c.get("dflash_config", {})}["mask_token_id"]
        )
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
            if kind == "sliding_attention":  # a row counts itself
                behind = positions[len(text) :, None] - positions
                seen = seen & (behind < self.c["sliding_window"])
                if not self.c["sliding_window_non_causal"]:
                    seen &= behind >= 0
            h = self.layer(f"layers.{i}", h, context, seen, positions)
        self.rows = self.norm(h, "norm").unflatten(0, (-1, size))
        return self.rows @ self.w.get("lm_head.weight", self.output).T

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


class PublishedDSpark(PublishedDFlash):
    """The same of a DSpark head in DeepSpec's layout, whose tokens before each row are given."""

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

    def values(self, row, token, state):
        """``m [A, r]`` of one row of every block, and the state behind it, as in the paper's appendix."""
        e, form = self.w["markov_head.markov_w1.weight"][token], self.c["markov_head_type"]
        if form == "gated":
            return torch.sigmoid(self.linear(torch.cat((row, e), -1), "markov_head.gate_proj")) * e, state
        if form == "rnn":
            a, c, o = self.linear(torch.cat((state, e, row), -1), "markov_head.joint_proj").chunk(3, -1)
            return o.tanh(), torch.sigmoid(a) * state + torch.sigmoid(-a) * c.tanh()
        return e, state

    def corrected(self, logits, before, first: int = 0):
        """Logits ``[A, S, V]`` of the rows from ``first`` on, and of their acceptance ``[A, S]``; ``before``
        int64 ``[A, S]`` are the tokens before those that they draft."""
        rows, logits = self.rows[:, first:], logits[:, first:]
        state = rows.new_zeros(len(rows), self.c["markov_rank"])
        out, sure = [], []
        for k in range(before.shape[1]):
            m, state = self.values(rows[:, k], before[:, k], state)
            out.append(logits[:, k] + m @ self.w["markov_head.markov_w2.weight"].T)
            e = self.w["markov_head.markov_w1.weight"][before[:, k]]
            read = torch.cat((rows[:, k], e), -1) if self.c["confidence_head_with_markov"] else rows[:, k]
            sure.append(self.linear(read, "confidence_head.proj")[:, 0])
        return torch.stack(out, 1), torch.stack(sure, 1)

    def rolled_out(self, logits, anchors, steps: int, words=None, first: int = 0):
        """The greedy chain int64 ``[A, S]`` behind the tokens ``anchors`` int64 ``[A]``; ``words`` int64
        ``[Vd]`` are the target's ids of a reduced vocabulary."""
        tokens = anchors[:, None]
        for _ in range(steps):
            best = self.corrected(logits, tokens, first)[0][:, -1:].argmax(-1)
            tokens = torch.cat((tokens, best if words is None else words[best]), 1)
        return tokens[:, 1:]
