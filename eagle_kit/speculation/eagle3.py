"""Drafting with an EAGLE-3 head: chains (K = 1) and dynamic trees (K > 1), and the draft-extend that feeds
them.

Legend: B requests, K top-k, S steps, N nodes, H hidden, Vd draft vocabulary.

The draft's key-value entry made of (f_i, x_{i+1}) lives at the slot of the token it embeds, i + 1, and has
the RoPE position i. Entries in the pool are made from target states only; those of drafted nodes live in the
scratch and are forgotten with the cycle.
"""

from typing import NamedTuple

import torch

from eagle_kit.core.shape import MAX_WINDOW, SpecShape
from eagle_kit.kernels.accept import Accepted
from eagle_kit.kernels.tree_build import Tree, chain_build, top_scores, tree_build
from eagle_kit.kernels.window_attention import ancestor_bits, chain_bits
from eagle_kit.models.eagle3 import Eagle3Head
from eagle_kit.models.llama import LlamaModel
from eagle_kit.speculation.paged_kv import PagedKV


class DraftState(NamedTuple):
    """What draft-extend leaves for the next proposal: the candidates of depth 1 as target ids ``tokens``
    int64 ``[B, K]``, their log-probabilities ``scores [B, K]``, and the state ``hidden [B, H]`` they came
    from.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    hidden: torch.Tensor


class Eagle3Proposer:
    """An EAGLE-3 head with its key-value store. Mutates only the store."""

    def __init__(self, head: Eagle3Head, target: LlamaModel, kv: PagedKV) -> None:
        self.head, self.target, self.kv = head, target, kv

    @staticmethod
    def make_kv(head: Eagle3Head, *, num_pages: int, page_size: int, max_batch_size: int) -> PagedKV:
        """A store for ``head``: one layer, nothing at slot 0, the largest window."""
        config, weight = head.config, head.fc.weight
        return PagedKV(
            1,
            config.num_kv_heads,
            config.head_dim,
            num_pages=num_pages,
            page_size=page_size,
            max_batch_size=max_batch_size,
            window=MAX_WINDOW,
            first_slot=1,
            dtype=weight.dtype,
            device=weight.device,
        )

    def propose(
        self,
        state: DraftState,
        roots: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        shape: SpecShape,
        num_columns: int,
    ) -> Tree:
        """Grow a draft behind ``roots [B]``, the token at position ``seq_lens [B]``; keep its best nodes."""
        if shape.topk == 1:
            return self._propose_chain(state, roots, seq_lens, page_table, shape, num_columns)
        b, topk = roots.shape[0], shape.topk
        tokens, scores = state.tokens, state.scores
        hidden = state.hidden[:, None].expand(b, topk, -1).reshape(b * topk, -1)
        all_tokens, all_scores, all_parents = [tokens], [scores], [torch.full_like(tokens, -1)]
        beam_ids = torch.arange(topk, device=roots.device).expand(b, topk)
        beam_parents = torch.zeros_like(beam_ids)
        scratch_parents = beam_ids
        for step in range(1, shape.steps):
            num_keys = step * topk
            scratch_parents = beam_ids if step == 1 else torch.cat((scratch_parents, beam_parents), 1)
            bits = ancestor_bits(scratch_parents, step)[:, num_keys - topk :]
            attend = self.kv.window_attend(page_table, seq_lens + 1, bits, num_keys, num_columns)
            positions = (seq_lens + step - 1)[:, None].expand(b, topk).reshape(-1)
            embeds = self.target.embed(tokens.reshape(-1))
            out = self.head(hidden, embeds, positions, attend)
            next_tokens, next_scores = self._candidates(out, topk)
            next_tokens = next_tokens.view(b, topk * topk)
            next_scores = (scores[:, :, None] + next_scores.view(b, topk, topk)).view(b, topk * topk)
            all_tokens.append(next_tokens)
            all_scores.append(next_scores)
            all_parents.append(beam_ids.repeat_interleave(topk, 1))
            best = top_scores(next_scores, topk)
            scores, tokens = next_scores.gather(1, best), next_tokens.gather(1, best)
            beam_parents = (step - 1) * topk + best // topk
            rows = (best // topk + torch.arange(b, device=best.device)[:, None] * topk).reshape(-1)
            hidden = out[rows]
            beam_ids = topk + (step - 1) * topk**2 + best
        return tree_build(
            roots, torch.cat(all_tokens, 1), torch.cat(all_scores, 1), torch.cat(all_parents, 1), shape
        )

    def _propose_chain(
        self,
        state: DraftState,
        roots: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        shape: SpecShape,
        num_columns: int,
    ) -> Tree:
        """:meth:`propose` without anything to rank: the best token of every step."""
        tokens, hidden, drafted = state.tokens, state.hidden, [state.tokens]
        for step in range(1, shape.steps):
            bits = chain_bits(step, roots.device)[step - 1 :].expand(roots.shape[0], 1)
            attend = self.kv.window_attend(page_table, seq_lens + 1, bits, step, num_columns)
            hidden = self.head(hidden, self.target.embed(tokens[:, 0]), seq_lens + step - 1, attend)
            tokens, _ = self._candidates(hidden, 1)
            drafted.append(tokens)
        return chain_build(roots, torch.cat(drafted, 1))

    def extend(
        self,
        aux: torch.Tensor,
        accepted: Accepted,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        topk: int,
        num_columns: int,
    ) -> DraftState:
        """Enter the emitted tokens into the draft's store, from the target states that predicted them.

        Args:
            aux: captured target states of the window, ``[B, N, 3 H]``.
            accepted: the path and the emitted tokens ``[B, S + 1]``.
            seq_lens: ``[B]``, the root's position.
        """
        b, length = accepted.tokens.shape
        states = aux.gather(1, accepted.path[:, :, None].expand(-1, -1, aux.shape[2]))
        bits = chain_bits(length, aux.device).expand(b, length)
        attend = self.kv.window_attend(page_table, seq_lens + 1, bits, length, num_columns)
        offset = torch.arange(length, device=aux.device)
        positions = (seq_lens[:, None] + offset).view(-1)
        embeds = self.target.embed(accepted.tokens.reshape(-1))
        out = self.head(self.head.fuse(states.flatten(0, 1)), embeds, positions, attend)
        self.kv.commit_window(page_table, offset.expand(b, length), seq_lens + 1, accepted.num_accepted + 1)
        last = torch.arange(b, device=aux.device) * length + accepted.num_accepted
        return self._state(out[last], topk)

    def prefill(
        self, aux: torch.Tensor, next_tokens: torch.Tensor, start: int, page_table: torch.Tensor, topk: int
    ) -> DraftState:
        """Enter prompt rows start, start + 1, ... of one request.

        Args:
            aux: their captured target states ``[T, 3 H]``.
            next_tokens: int64 ``[T]``, the token after each.
        """
        rows = torch.arange(start, start + next_tokens.shape[0], device=aux.device)
        attend = self.kv.prefill_attend(page_table, start + 1, start + 1 + next_tokens.shape[0])
        out = self.head(self.head.fuse(aux), self.target.embed(next_tokens), rows, attend)
        return self._state(out[-1:], topk)

    def _state(self, hidden: torch.Tensor, topk: int) -> DraftState:
        tokens, scores = self._candidates(hidden, topk)
        return DraftState(tokens, scores, hidden)

    def _candidates(self, out: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, H]`` -> the best tokens as target ids and their log-probabilities, ``[T, K]`` each.

        A chain ranks nothing, so with K = 1 the probabilities are left at 0.
        """
        logits = self.head.logits(out)
        if topk == 1:
            ids = logits.argmax(-1, keepdim=True)
            return self.head.to_target(ids), torch.zeros_like(ids, dtype=torch.float32)
        logits = logits.float()
        values, ids = logits.topk(topk, -1)
        return self.head.to_target(ids), values - logits.logsumexp(-1, keepdim=True)
