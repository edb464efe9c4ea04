"""EAGLE-1 as published, over whole documents at once and in fp64: the head's definition (EAGLE's ``cnets1``)
and the training step (``train/main.py``; HASS's ``main_hass.py``), with nothing of ours but the weights.

q, k, v and gate, up are cut apart; keys are repeated for their group; masks are added; shifted sequences.
"""

import torch
from torch.nn.functional import silu, smooth_l1_loss


class PublishedEagle1(torch.nn.Module):
    """The head in fp64. Parameters have the published names, with ``_`` for ``.``."""

    def __init__(self, tensors: dict[str, torch.Tensor], heads: int, kv_heads: int, theta=1e4, eps=1e-5):
        super().__init__()
        self.heads, self.kv_heads, self.theta, self.eps = heads, kv_heads, theta, eps
        for name, tensor in tensors.items():
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor.double().clone()))

    def w(self, name: str) -> torch.Tensor:
        return getattr(self, name.replace(".", "_"))

    def project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """``[T, H]`` -> ``[heads, T, D]``."""
        y = x @ self.w(f"layers.0.self_attn.{name}_proj.weight").T
        count = self.heads if name == "q" else self.kv_heads
        y = y.view(len(x), count, -1).transpose(0, 1)
        return y if name == "q" else y.repeat_interleave(self.heads // self.kv_heads, 0)

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        angle = positions.double()[:, None] * self.theta ** (-torch.arange(half).double() / half)
        y = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((y.real, y.imag), -1)

    def forward(self, features: list[torch.Tensor], embeds: torch.Tensor, allowed: list[torch.Tensor]):
        """The last of ``features``, each ``[T, H]``, asks; all answer, each where ``allowed [T, T]`` says.

        Row r has the token r + 1 whatever the step, as in HASS.
        """
        fused = [torch.cat((embeds, f), -1) @ self.w("fc.weight").T for f in features]
        if hasattr(self, "fc_bias"):
            fused = [x + self.w("fc.bias") for x in fused]
        x, positions = fused[-1], torch.arange(len(embeds))
        q = self.turned(self.project(x, "q"), positions)
        k = torch.cat([self.turned(self.project(y, "k"), positions) for y in fused], 1)
        v = torch.cat([self.project(y, "v") for y in fused], 1)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~torch.cat(allowed, 1), float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        h = x + attended @ self.w("layers.0.self_attn.o_proj.weight").T
        normed = h / (h.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
        normed = normed * self.w("layers.0.post_attention_layernorm.weight")
        gate, up = (normed @ self.w(f"layers.0.mlp.{n}_proj.weight").T for n in ("gate", "up"))
        return h + (silu(gate) * up) @ self.w("layers.0.mlp.down_proj.weight").T


def published_losses(
    head: PublishedEagle1, hidden, read, embeds, output, response, steps, weights, detach: bool
) -> list[tuple[torch.Tensor, int]]:
    """Sum of the losses of every step over the rows that we supervise, and how many match the target.

    Args:
        hidden, read: fp64 ``[T, H]``, the target's states of one document, and what the head sees of them.
        embeds: fp64 ``[T, H]`` of the document's tokens.
        weights: of the regression, of the cross-entropy, of its best K, and K.
        detach: HASS's ``q_hidden_states.detach()``.
    """
    t = len(hidden)
    target, inputs = hidden[1:], torch.cat((embeds[1:], embeds[-1:]))
    distribution = (target @ output.T).softmax(-1)
    rows = torch.arange(t)
    features, results = [read], []
    for step in range(steps):
        # Diagonal j of the mask belongs to the features of step - j; everything further back to the target's.
        ages = rows[:, None] - rows[None]
        allowed = [ages == step - s for s in range(1, step + 1)]
        first = ages >= step
        out = head(features, inputs, [first, *allowed])
        shifted = torch.cat((features[-1][:1], out[:-1]))
        features.append(shifted.detach() if detach else shifted)
        total, hits = out.new_zeros(()), 0
        for row in range(step, t - 2):
            i = row - step  # the row that the round began at
            if response[i + 1] >= 0 and response[i + 1] == response[row + 2]:
                p, log_q = distribution[row], (out[row] @ output.T).log_softmax(-1)
                best = p.topk(weights[3]).indices
                total = total + weights[0] * smooth_l1_loss(out[row], target[row])
                total = total - weights[1] * (p * log_q).sum() - weights[2] * (p[best] * log_q[best]).sum()
                hits += int(log_q.argmax() == p.argmax())
        results.append((total, hits))
    return results
