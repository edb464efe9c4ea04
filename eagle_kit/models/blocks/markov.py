"""Markov head of a draft block (DSpark, arXiv 2607.05147): a low-rank correction of each row's logits by the
token before it.

The correction is ``W2 m``: ``m`` are r values, made of the embedding ``W1 x`` of the token before and, in two
of the three forms, of the row h, normed for the output layer:

    vanilla   m = W1 x
    gated     m = g * W1 x,  g = sigmoid(G [h, W1 x] + b)
    rnn       f, c, o = J [s, W1 x, h] + b,  s' = sigmoid(f) s + (1 - sigmoid(f)) tanh(c),  m = tanh(o),
              with a state s of r values, 0 in front of a block's first row that drafts.

So a chain is rolled out through S small matmuls behind the body's one pass.

Legend: A blocks, S drafted rows of a block, R rows, H hidden, r rank, V / Vd target / draft vocabulary.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import nn

from eagle_kit.ops.linear import Linear

MarkovForm = Literal["vanilla", "gated", "rnn"]
MARKOV_FORMS = get_args(MarkovForm)
FIRST_EMBEDDING = 0.01
"""Standard deviation of the first embeddings of tokens, so that a new correction says little."""


class MarkovStep(NamedTuple):
    """Result of a row: ``values [R, r]``, and the ``state`` behind it, ``[R, r]`` (``[R, 0]`` where there is
    none)."""

    values: torch.Tensor
    state: torch.Tensor


class MarkovHead(nn.Module):
    """Correction of a row's logits by the token before.

    Args:
        size: H.
        rank: r.
        words: V and Vd.
    """

    def __init__(self, size: int, rank: int, form: MarkovForm, words: tuple[int, int]) -> None:
        super().__init__()
        self.form, self.rank = form, rank
        self.markov_w1 = nn.Embedding(words[0], rank)
        nn.init.normal_(self.markov_w1.weight, std=FIRST_EMBEDDING)
        self.markov_w2 = Linear(rank, words[1], bias=False)
        if form == "gated":
            self.gate_proj = Linear(size + rank, rank)
        if form == "rnn":
            self.joint_proj = Linear(2 * rank + size, 3 * rank)

    def first_state(self, rows: torch.Tensor) -> torch.Tensor:
        """State ``[R, r]`` in front of blocks, for the ``rows [R, H]`` that are their first."""
        return rows.new_zeros(len(rows), self.rank if self.form == "rnn" else 0)

    def step(self, rows: torch.Tensor, before: torch.Tensor, state: torch.Tensor) -> MarkovStep:
        """Values of the ``rows [R, H]`` with the tokens ``before`` int64 ``[R]`` (target ids), behind
        ``state``."""
        embedded = self.markov_w1(before)
        if self.form == "vanilla":
            return MarkovStep(embedded, state)
        if self.form == "gated":
            gate = self.gate_proj(torch.cat((rows, embedded), -1)).sigmoid()
            return MarkovStep(gate * embedded, state)
        keep, new, out = self.joint_proj(torch.cat((state, embedded, rows), -1)).chunk(3, -1)
        keep = keep.sigmoid()
        return MarkovStep(out.tanh(), keep * state + (1.0 - keep) * new.tanh())

    def of_blocks(self, blocks: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Values ``[A, S, r]`` of whole blocks ``[A, S, H]`` whose tokens ``before`` int64 ``[A, S]`` are
        known."""
        if self.form != "rnn":
            rows = self.step(blocks.flatten(0, 1), before.flatten(), blocks[:0, 0, :0])
            return rows.values.unflatten(0, before.shape)
        state, values = self.first_state(blocks[:, 0]), []
        for row, token in zip(blocks.unbind(1), before.unbind(1), strict=True):
            made, state = self.step(row, token, state)
            values.append(made)
        return torch.stack(values, 1)
