"""One decode cycle: propose -> verify -> accept -> commit -> draft-extend.

A pure function of fixed shapes from device tensors to device tensors: nothing is read by the host, so the
same code runs eagerly on a CPU and can be captured whole as one CUDA graph. Its only side effects are the
writes into the key-value stores. Ordinary decoding is a window of one node.

Legend: B requests, N window nodes, S steps, V vocabulary.
"""

from typing import NamedTuple

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.accept import Accepted
from eagle_kit.kernels.sampling import SamplingBatch, counts_after, token_logprobs
from eagle_kit.kernels.tree_build import Tree
from eagle_kit.kv.store import PagedStore
from eagle_kit.models.targets.llama import LlamaModel, TargetOutput
from eagle_kit.speculation.propose.drafter import Drafter, DraftOutput, DraftState
from eagle_kit.speculation.verify.decide import decide
from eagle_kit.speculation.verify.proposal import Deterministic, TargetOnly, Verifier


class CycleState(NamedTuple):
    """Where every request of the batch stands.

    ``page_table`` int64 ``[B, P]``; ``seq_lens`` int64 ``[B]``, tokens in the pool; ``roots`` int64 ``[B]``,
    the last emitted token, whose position is ``seq_lens`` and whose key is not in the target's pool yet;
    ``active`` bool ``[B]``, False for padding, which changes nothing; ``draft``, the candidates behind the
    root (None without a draft model).
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    roots: torch.Tensor
    active: torch.Tensor
    draft: DraftState | None


class Logprobs(NamedTuple):
    """Of the emitted tokens under the target: ``chosen`` fp32 ``[B, S + 1]``; the most likely ``ids`` int64
    and their ``values`` fp32 ``[B, S + 1, top]``."""

    chosen: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


class CycleOutput(NamedTuple):
    """``state`` of the next cycle; ``tokens`` int64 ``[B, S + 1]``, of which the first ``num_emitted [B]``
    are new; ``counts`` of ``SamplingBatch`` after them; ``logprobs`` when asked for."""

    state: CycleState
    tokens: torch.Tensor
    num_emitted: torch.Tensor
    counts: torch.Tensor | None
    logprobs: Logprobs | None


class CycleSettings(NamedTuple):
    """What the host knows of a cycle before it runs, and a captured graph is made for.

    Attributes:
        shape: how much to draft and to verify; without a draft it must be a window of one.
        num_columns: a bound on ``seq_lens + tokens`` and ``seq_lens + steps + 1 + modules`` of the draft.
        num_logprobs: alternatives to report for every emitted token; None reports nothing.
        verifier: what decides on drafts of requests that sample; it must fit the drafter's distribution.
        num_candidates: tokens of depth 1 that the draft keeps for the next cycle, whatever its shape.
    """

    shape: SpecShape
    num_columns: int
    num_logprobs: int | None = None
    verifier: Verifier = TargetOnly()
    num_candidates: int | None = None


def cycle(
    target: LlamaModel,
    kv: PagedStore,
    drafter: Drafter | None,
    state: CycleState,
    settings: CycleSettings,
    sampling: SamplingBatch | None = None,
) -> CycleOutput:
    """Decode once for every request of the batch; ``sampling`` None is greedy for all of them."""
    draft = propose(drafter, state, settings, sampling)
    return verify_cycle(target, kv, drafter, state, draft, settings, sampling)


def propose(
    drafter: Drafter | None, state: CycleState, settings: CycleSettings, sampling: SamplingBatch | None
) -> DraftOutput:
    """The part of a cycle that makes the window; without a draft model it is the root alone."""
    if drafter is None or state.draft is None or not settings.shape.steps:
        return DraftOutput(root_only(state.roots), Deterministic())
    _, seq_lens, roots, _, _ = state
    return drafter.propose(
        state.draft, roots, seq_lens, state.page_table, settings.shape, settings.num_columns, sampling
    )


class Verified(NamedTuple):
    """What verification leaves for the draft: the target's ``out`` over the window, the ``accepted`` path;
    ``num_emitted [B]``, ``counts`` and ``logprobs`` as in ``CycleOutput``."""

    out: TargetOutput
    accepted: Accepted
    num_emitted: torch.Tensor
    counts: torch.Tensor | None
    logprobs: Logprobs | None


def verify_cycle(
    target: LlamaModel,
    kv: PagedStore,
    drafter: Drafter | None,
    state: CycleState,
    proposed: DraftOutput,
    settings: CycleSettings,
    sampling: SamplingBatch | None = None,
    allowed: torch.Tensor | None = None,
) -> CycleOutput:
    """The part of a cycle that follows the draft.

    Args:
        allowed: bool ``[B, N, V]``, tokens that a grammar allows after each node.
    """
    verified = verify(target, kv, drafter, state, proposed, settings, sampling, allowed)
    next_state = draft_extend(drafter, state, verified, settings)
    accepted, num_emitted, counts, logprobs = verified[1:]
    return CycleOutput(next_state, accepted.tokens, num_emitted, counts, logprobs)


def verify(
    target: LlamaModel,
    kv: PagedStore,
    drafter: Drafter | None,
    state: CycleState,
    proposed: DraftOutput,
    settings: CycleSettings,
    sampling: SamplingBatch | None = None,
    allowed: torch.Tensor | None = None,
) -> Verified:
    """The target over the window, its choice, and the commit of what it keeps."""
    page_table, seq_lens, _, active, _ = state
    tree, proposal = proposed
    b, n = tree.tokens.shape
    out = _forward(target, kv, tree, state, settings.num_columns, drafter)
    logits = target.logits(out.hidden).view(b, n, -1)
    steps, verifier = settings.shape.steps, settings.verifier
    accepted = decide(logits, tree, proposal, verifier, seq_lens, sampling, allowed, steps)
    num_emitted = (accepted.num_accepted + 1) * active
    kv.commit_window(page_table, accepted.path, seq_lens, num_emitted)
    counts = None
    if sampling is not None and sampling.counts is not None:
        counts = counts_after(sampling.counts, accepted.tokens, num_emitted)
    logprobs = None
    if settings.num_logprobs is not None:
        logprobs = _logprobs(logits, accepted, settings.num_logprobs)
    return Verified(out, accepted, num_emitted, counts, logprobs)


def draft_extend(
    drafter: Drafter | None, state: CycleState, verified: Verified, settings: CycleSettings
) -> CycleState:
    """The part of a cycle that readies the next: the draft reads what was emitted."""
    page_table, seq_lens, _, active, draft = state
    out, accepted, num_emitted = verified[:3]
    num_emitted = num_emitted * active  # a graph of this part alone is captured with dummies in these rows
    if drafter is not None and draft is not None:
        topk, columns = settings.num_candidates or settings.shape.topk, settings.num_columns
        draft = drafter.draft_extend(out, accepted, seq_lens, page_table, num_emitted, draft, topk, columns)
    roots = accepted.tokens.gather(1, accepted.num_accepted[:, None])[:, 0]
    return CycleState(page_table, seq_lens + num_emitted, roots, active, draft)


def _forward(
    target: LlamaModel,
    kv: PagedStore,
    tree: Tree,
    state: CycleState,
    num_columns: int,
    drafter: Drafter | None,
) -> TargetOutput:
    """The target over the window's nodes, ``[B * N]`` rows, with the states that the draft captures."""
    n = tree.tokens.shape[1]
    attend = kv.window_attend(state.page_table, state.seq_lens, tree.ancestors, n, num_columns)
    positions = (state.seq_lens[:, None] + tree.depths).view(-1)
    return target(tree.tokens.view(-1), positions, attend, drafter.capture if drafter is not None else ())


def root_only(roots: torch.Tensor) -> Tree:
    """The window of ordinary decoding."""
    zero = torch.zeros_like(roots)[:, None]
    return Tree(roots[:, None], zero, zero, zero + 1)


def _logprobs(logits: torch.Tensor, accepted: Accepted, top: int) -> Logprobs:
    b, _, v = logits.shape
    rows = logits.gather(1, accepted.path[:, :, None].expand(-1, -1, v))
    chosen, ids, values = token_logprobs(rows.reshape(-1, v), accepted.tokens.reshape(-1), top)
    length = accepted.path.shape[1]
    return Logprobs(chosen.view(b, length), ids.view(b, length, top), values.view(b, length, top))
