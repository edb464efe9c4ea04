"""One decode cycle: propose -> verify -> accept -> commit -> observe.

A pure function of fixed shapes from device tensors to device tensors: nothing is read by the host, so the
same code runs eagerly on a CPU and can be captured whole as one CUDA graph. Its only side effects are the
writes into the key-value stores. Ordinary decoding is a window of one node.

Legend: B requests, N window nodes, S steps.
"""

from typing import NamedTuple

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.accept import accept_greedy
from eagle_kit.kernels.tree_build import Tree
from eagle_kit.models.llama import LlamaModel
from eagle_kit.speculation.eagle3 import DraftState, Eagle3Proposer
from eagle_kit.speculation.paged_kv import PagedKV


class CycleState(NamedTuple):
    """Where every request of the batch stands.

    ``page_table`` int64 ``[B, P]``; ``seq_lens`` int64 ``[B]``, tokens in the pool; ``roots`` int64 ``[B]``,
    the last emitted token, whose position is ``seq_lens`` and whose key is not in the target's pool yet;
    ``draft``, the candidates behind it (None without a draft).
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    roots: torch.Tensor
    draft: DraftState | None


class CycleOutput(NamedTuple):
    """``state`` of the next cycle; ``tokens`` int64 ``[B, S + 1]``, of which the first ``num_emitted [B]``
    are new."""

    state: CycleState
    tokens: torch.Tensor
    num_emitted: torch.Tensor


def cycle(
    target: LlamaModel,
    kv: PagedKV,
    proposer: Eagle3Proposer | None,
    state: CycleState,
    shape: SpecShape,
    num_columns: int,
) -> CycleOutput:
    """Decode once for every request of the batch.

    Args:
        shape: how much to draft and to verify; without a proposer it must be a window of one.
        num_columns: a bound on ``seq_lens + tokens`` and ``seq_lens + steps + 2`` that the host knows.
    """
    page_table, seq_lens, roots, draft = state
    if proposer is not None and draft is not None:
        tree = proposer.propose(draft, roots, seq_lens, page_table, shape, num_columns)
    else:
        tree = root_only(roots)
    predicted, aux = verify(target, kv, tree, state, num_columns, proposer)
    accepted = accept_greedy(predicted, tree.tokens, tree.parents, shape.steps)
    num_emitted = accepted.num_accepted + 1
    kv.commit_window(page_table, accepted.path, seq_lens, num_emitted)
    if proposer is not None and draft is not None:
        draft = proposer.extend(aux, accepted, seq_lens, page_table, shape.topk, num_columns)
    next_roots = accepted.tokens.gather(1, accepted.num_accepted[:, None])[:, 0]
    next_state = CycleState(page_table, seq_lens + num_emitted, next_roots, draft)
    return CycleOutput(next_state, accepted.tokens, num_emitted)


def verify(
    target: LlamaModel,
    kv: PagedKV,
    tree: Tree,
    state: CycleState,
    num_columns: int,
    proposer: Eagle3Proposer | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's most likely token after every node, int64 ``[B, N]``, and the captured states ``[B, N, 3
    H]``."""
    b, n = tree.tokens.shape
    attend = kv.window_attend(state.page_table, state.seq_lens, tree.ancestors, n, num_columns)
    positions = (state.seq_lens[:, None] + tree.depths).view(-1)
    capture = proposer.head.config.aux_layer_ids if proposer is not None else ()
    out = target(tree.tokens.view(-1), positions, attend, capture)
    return target.logits(out.hidden).argmax(-1).view(b, n), out.aux.view(b, n, -1)


def root_only(roots: torch.Tensor) -> Tree:
    """The window of ordinary decoding."""
    zero = torch.zeros_like(roots)[:, None]
    return Tree(roots[:, None], zero, zero, zero + 1)
