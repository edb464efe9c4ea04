"""Markov head of a draft block (DSpark, arXiv 2607.05147): a low-rank correction of each row's logits by the
token before it.

The correction is ``W2 m``. The r values m come from the embedding ``W1 x`` of the token before and, in two
of the three forms, from the row h, which is the input of the output layer:

    vanilla   m = W1 x
    gated     m = g * W1 x,  g = sigmoid(G [h, W1 x] + b)
    rnn       f, c, o = J [s, W1 x, h] + b,  s' = sigmoid(f) s + (1 - sigmoid(f)) tanh(c),  m = tanh(o),
              with a state s of r values, 0 in front of the first drafted row of a block.

So the tokens of a block are drafted by S small matmuls after one pass of the decoder layers.

Legend: A blocks, S drafted rows of a block, R rows, H hidden, r rank, V / Vd target / draft vocabulary.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import nn

from eagle_kit.ops.linear import Linear

MarkovForm = Literal["vanilla", "gated", "rnn"]
MARKOV_FORMS = get_args(MarkovForm)
FIRST_EMBEDDING = 0.01
"""Standard deviation of the initial embeddings, so that a new correction is small."""


class MarkovStep(NamedTuple):
    """Result of a step of R blocks.

    Attributes:
        values: m of the drafted rows ``[R, r]``.
        state: state after the rows ``[R, r]``; ``[R, 0]`` in forms without a state.
    """

    values: torch.Tensor
    state: torch.Tensor


class MarkovHead(nn.Module):
    """Correction of a row's logits by the token before it.

    Args:
        hidden_size: H.
        rank: r.
        form: how the correction is computed.
        vocab_size: V.
        draft_vocab_size: Vd.
    """

    def __init__(
        self, hidden_size: int, rank: int, form: MarkovForm, vocab_size: int, draft_vocab_size: int
    ) -> None:
        super().__init__()
        self.form = form
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        nn.init.normal_(self.markov_w1.weight, std=FIRST_EMBEDDING)
        self.markov_w2 = Linear(rank, draft_vocab_size, bias=False)
        if form == "gated":
            self.gate_proj = Linear(hidden_size + rank, rank)
        if form == "rnn":
            self.joint_proj = Linear(2 * rank + hidden_size, 3 * rank)

    def first_state(self, rows: torch.Tensor) -> torch.Tensor:
        """State in front of the first drafted ``rows [R, H]`` of blocks: ``[R, r]``, or ``[R, 0]`` in forms
        without a state."""
        size = 0
        if self.form == "rnn":
            size = self.rank
        return rows.new_zeros(len(rows), size)

    def step(self, rows: torch.Tensor, before: torch.Tensor, state: torch.Tensor) -> MarkovStep:
        """Compute the values of one row of each block.

        Args:
            rows: ``[R, H]``.
            before: int64 ``[R]``, target ids of the tokens before the drafted ones.
            state: state after the rows before.
        """
        embedded = self.markov_w1(before)  # [R, r]
        if self.form == "vanilla":
            return MarkovStep(embedded, state)
        if self.form == "gated":
            gate = self.gate_proj(torch.cat((rows, embedded), -1)).sigmoid()
            return MarkovStep(gate * embedded, state)
        keep, new, out = self.joint_proj(torch.cat((state, embedded, rows), -1)).chunk(3, -1)
        keep = keep.sigmoid()
        return MarkovStep(out.tanh(), keep * state + (1.0 - keep) * new.tanh())

    def of_blocks(self, blocks: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Compute the values of whole blocks, whose tokens are known.

        Args:
            blocks: ``[A, S, H]``.
            before: int64 ``[A, S]``, target ids of the tokens before the drafted ones.

        Returns:
            ``[A, S, r]``.
        """
        # Without a state all rows are computed at once.
        if self.form != "rnn":
            no_state = blocks[:0, 0, :0]
            step = self.step(blocks.flatten(0, 1), before.flatten(), no_state)
            return step.values.unflatten(0, before.shape)

        values: list[torch.Tensor] = []
        state = self.first_state(blocks[:, 0])
        for row, token in zip(blocks.unbind(1), before.unbind(1), strict=True):
            step = self.step(row, token, state)
            values.append(step.values)
            state = step.state
        return torch.stack(values, 1)
