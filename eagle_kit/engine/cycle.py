"""Decode cycle: propose -> verify -> accept -> commit -> draft-extend.

:func:`cycle` is the whole of it. Its parts, in order:

* :func:`propose`: the drafter makes the window to verify (``drafts/base``);
* :func:`run_target`: the target runs over all nodes of the window;
* :func:`accept_and_commit`: the verifier accepts a path, and its keys go from the scratch to the pool;
* :func:`draft_extend`: the draft runs over the emitted tokens, and makes the next draft state;
* :func:`commit_states`: the accepted path changes the states of recurrent layers.

What comes before :func:`commit_states` may run again over the same state, as when the GPU lacks memory in it.

:func:`cycle` maps device tensors of fixed shapes to device tensors. It writes the key-value stores and the
recurrent states and nothing else, and no tensor is read on the host (on a CPU only lengths are, through
guards). So the same code runs eagerly and as one CUDA graph. Ordinary decoding is a window of one node.

Legend: B requests, N window nodes, S steps, V vocabulary.
"""

from typing import NamedTuple

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.distributed.collectives import Ranks
from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.drafter import CandidateSpec, Drafter, PendingTokens
from eagle_kit.engine.tensor_parallel.agreement import agree_most_likely, agree_path, agree_tree
from eagle_kit.kv.dp_latents import DataParallelLatents, ShardRequests
from eagle_kit.kv.recurrent_states import StatePool, StateWindow
from eagle_kit.kv.store import PagedStore
from eagle_kit.models.blocks.layers import Attend
from eagle_kit.models.targets.target import Target, TargetOutput
from eagle_kit.ops.accept import Accepted, Outcome, accept_greedy, outcome
from eagle_kit.ops.backend import uses_triton
from eagle_kit.ops.sampling import SamplingBatch, counts_after, token_logprobs
from eagle_kit.ops.tree_build import Tree
from eagle_kit.verify.accept_window import accept_window
from eagle_kit.verify.proposal import Deterministic, DraftOutput
from eagle_kit.verify.verifiers import TargetOnly, Verifier


class CycleModels(NamedTuple):
    """Models of a cycle, with their stores.

    Attributes:
        target: the model that verifies.
        kv: the target's key-value store.
        drafter: the draft model with its store; None in ordinary decoding.
        recurrent_states: states of the target's recurrent layers; None if it has none.
    """

    target: Target
    kv: PagedStore
    drafter: Drafter | None = None
    recurrent_states: StatePool | None = None


class CycleSettings(NamedTuple):
    """Constants of a cycle, known to the host before it runs; a graph is captured for each value.

    Attributes:
        shape: draft and window; without a draft it must be a window of one.
        num_columns: bound on the keys that a window node attends to. It is at least ``seq_lens`` plus the
            largest of ``tokens``, ``1 + (steps - 1) * topk`` of a growing tree, and ``steps + 2`` plus the
            rows that draft-extend appends.
        num_logprobs: alternatives to report for every emitted token; None reports no log-probabilities.
        verifier: verifier of the drafts of requests that sample, sound for the drafter's proposals.
        candidate_spec: candidates of the draft state that the cycle makes; None takes those of ``shape``.
        needs_confidence: True if the cycle emits the draft's confidence.
    """

    shape: SpecShape
    num_columns: int
    num_logprobs: int | None = None
    verifier: Verifier = TargetOnly()
    candidate_spec: CandidateSpec | None = None
    needs_confidence: bool = False


class Logprobs(NamedTuple):
    """Log-probabilities of the emitted tokens under the target.

    Attributes:
        chosen: fp32 ``[B, S + 1]``, those of the emitted tokens.
        ids: int64 ``[B, S + 1, top]``, the most likely tokens.
        values: fp32 ``[B, S + 1, top]``, the log-probabilities of ``ids``.
    """

    chosen: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


class Emitted(NamedTuple):
    """Tokens that a cycle emits.

    Attributes:
        tokens: int64 ``[B, S + 1]``, of which the first ``num_emitted`` are new.
        num_emitted: int64 ``[B]``, accepted draft tokens and the bonus token; 0 for padding.
        logprobs: log-probabilities of the tokens; None if no request asked for them.
        is_finite: bool ``[B]``, False if the target's logits on the accepted path are not all finite. The
            tokens of such a request are meaningless.
        confidence: fp32 ``[B]`` or ``[B, D]``, see :meth:`Drafter.confidence`: the draft's confidence in the
            tokens of its next proposal. None if it is not asked for, or the cycle did not run the draft.
    """

    tokens: torch.Tensor
    num_emitted: torch.Tensor
    logprobs: Logprobs | None
    is_finite: torch.Tensor
    confidence: torch.Tensor | None = None


class CycleOutput(NamedTuple):
    """Result of a cycle.

    Attributes:
        state: state at the start of the next cycle.
        emitted: the emitted tokens.
        counts: int32 ``[B, V]``, token counts of ``SamplingBatch`` after them; None without penalties.
        pending: the emitted tokens, if the cycle did not run the draft over them; else None.
    """

    state: CycleState
    emitted: Emitted
    counts: torch.Tensor | None
    pending: PendingTokens | None = None


class WindowOutput(NamedTuple):
    """Output of the target over the nodes of a window.

    Attributes:
        out: hidden states of all nodes, ``B * N`` rows.
        attend: attention of the window.
        logits: ``[B * N, V]``; with tensor parallelism this rank's columns.
    """

    out: TargetOutput
    attend: Attend
    logits: torch.Tensor


class Verified(NamedTuple):
    """Result of verification.

    Attributes:
        out: the target's output over the window, ``B * N`` rows.
        accepted: the accepted path.
        outcome: sequence lengths and roots after it.
        emitted, counts: see :class:`CycleOutput`.
    """

    out: TargetOutput
    accepted: Accepted
    outcome: Outcome
    emitted: Emitted
    counts: torch.Tensor | None


def cycle(
    models: CycleModels, state: CycleState, settings: CycleSettings, sampling: SamplingBatch | None = None
) -> CycleOutput:
    """Run a cycle for every request of the batch; all of them are greedy if ``sampling`` is None."""
    window = propose(models.drafter, state, settings, sampling, models.target.ranks)
    return finish_cycle(models, state, window, settings, sampling)


def propose(
    drafter: Drafter | None,
    state: CycleState,
    settings: CycleSettings,
    sampling: SamplingBatch | None,
    ranks: Ranks | None = None,
) -> DraftOutput:
    """Make the window to verify; without a draft model it is the root alone.

    Args:
        ranks: with tensor parallelism all ranks take the window of the first one.
    """
    if drafter is None or state.draft is None or not settings.shape.steps:
        return DraftOutput(root_only(state.roots), Deterministic())
    window = drafter.propose(state, settings.shape, settings.num_columns, sampling)
    return window._replace(tree=agree_tree(window.tree, ranks))


def finish_cycle(
    models: CycleModels,
    state: CycleState,
    window: DraftOutput,
    settings: CycleSettings,
    sampling: SamplingBatch | None = None,
    allowed: torch.Tensor | None = None,
) -> CycleOutput:
    """Run the part of a cycle that follows the proposal.

    Args:
        allowed: bool ``[B, N, V]``, tokens that a grammar allows after each node.
    """
    # Verify, accept and commit.
    output = run_target(models, state, window.tree, settings)
    verified = accept_and_commit(models, state, window, output, settings, sampling, allowed)
    emitted = verified.emitted

    # A cycle without a draft may leave its tokens to the draft for later.
    drafter = models.drafter
    pending = None
    if drafter is not None and defers_draft(drafter, settings):
        hidden_states = drafter.model.target_hidden_states(verified.out)
        pending = PendingTokens(hidden_states[:, None], emitted.tokens, emitted.num_emitted)
        drafter = None

    # Run the draft over the emitted tokens.
    next_state = draft_extend(drafter, state, verified, settings)
    if settings.needs_confidence and drafter is not None and next_state.draft is not None:
        emitted = emitted._replace(confidence=drafter.confidence(next_state.draft))
    commit_states(output, verified)
    return CycleOutput(next_state, emitted, verified.counts, pending)


def defers_draft(drafter: Drafter, settings: CycleSettings) -> bool:
    """Return True if a cycle does not run the draft, and leaves its tokens pending for a later one."""
    return drafter.supports_deferred_draft and not settings.shape.steps


def verify_and_commit(
    models: CycleModels,
    state: CycleState,
    window: DraftOutput,
    settings: CycleSettings,
    sampling: SamplingBatch | None = None,
    allowed: torch.Tensor | None = None,
) -> Verified:
    """Run the target over the window, accept a path, and commit it."""
    output = run_target(models, state, window.tree, settings)
    verified = accept_and_commit(models, state, window, output, settings, sampling, allowed)
    commit_states(output, verified)
    return verified


def run_target(models: CycleModels, state: CycleState, tree: Tree, settings: CycleSettings) -> WindowOutput:
    """Run the target over the nodes of the windows."""
    out, attend = _forward(models, tree, state, settings.num_columns)
    return WindowOutput(out, attend, models.target.local_logits(out.hidden))


def accept_and_commit(
    models: CycleModels,
    state: CycleState,
    window: DraftOutput,
    output: WindowOutput,
    settings: CycleSettings,
    sampling: SamplingBatch | None = None,
    allowed: torch.Tensor | None = None,
) -> Verified:
    """Accept a path of a window that the target has run over, and commit it to the pool."""
    out = output.out
    logits = output.logits
    steps = settings.shape.steps
    seq_lens = state.seq_lens
    ranks = models.target.ranks
    size = len(state.roots)

    # Accept. If all requests are greedy, only the most likely token after each node is needed: with several
    # ranks each sends its best one. On one GPU a kernel of `accept_window` finds them.
    is_greedy = sampling is None and allowed is None and settings.num_logprobs is None
    if is_greedy and (ranks is not None or not uses_triton(logits)):
        best = agree_most_likely(models.target, logits)
        predicted = best.tokens.unflatten(0, (size, -1))  # [B, N]
        accepted = accept_greedy(predicted, window.tree.tokens, window.tree.parents, steps)
        largest_logits = best.values.float().unflatten(0, (size, -1)).amax(-1)  # [B, N]
    else:
        logits = models.target.whole_logits(logits.unflatten(0, (size, -1)))  # [B, N, V]
        accepted = accept_window(logits, window, settings.verifier, seq_lens, sampling, allowed, steps)
        largest_logits = logits.amax(-1)  # [B, N]
    accepted = agree_path(accepted, ranks)
    after = outcome(largest_logits, accepted, state.active, seq_lens)
    num_emitted = after.num_emitted

    # Commit keys and values of the root and of the accepted drafts. They are as many nodes as tokens are
    # emitted: the root is in the place of the bonus token, which is the next root and has no entry in the
    # target's pool yet.
    if isinstance(models.kv, DataParallelLatents):
        shard = _shard_of(state)
        models.kv.shard_commit_window(shard, state.page_table, accepted.path, seq_lens, num_emitted)
    else:
        models.kv.commit_window(state.page_table, accepted.path, seq_lens, num_emitted)

    # Collect what the requests asked for.
    counts = None
    if sampling is not None and sampling.counts is not None:
        counts = counts_after(sampling.counts, accepted.tokens, num_emitted)
    logprobs = None
    if settings.num_logprobs is not None:
        logprobs = _logprobs(logits, accepted, settings.num_logprobs)
    emitted = Emitted(accepted.tokens, num_emitted, logprobs, after.is_finite)
    return Verified(out, accepted, after, emitted, counts)


def commit_states(output: WindowOutput, verified: Verified) -> None:
    """Apply the accepted path of a window to the states of the target's recurrent layers, if it has some."""
    if isinstance(output.attend, StateWindow):
        output.attend.commit(verified.accepted.path, verified.emitted.num_emitted)


def draft_extend(
    drafter: Drafter | None, state: CycleState, verified: Verified, settings: CycleSettings
) -> CycleState:
    """Run the draft over the emitted tokens, and return the state of the next cycle."""
    accepted = verified.accepted
    num_emitted = verified.emitted.num_emitted
    draft = state.draft
    if drafter is not None and draft is not None:
        candidate_spec = settings.candidate_spec or drafter.candidate_spec([settings.shape])
        draft = drafter.draft_extend(
            state, verified.out, accepted, num_emitted, candidate_spec, settings.num_columns
        )
    after = verified.outcome
    return state._replace(seq_lens=after.seq_lens, roots=after.roots, draft=draft)


def _forward(
    models: CycleModels, tree: Tree, state: CycleState, num_columns: int
) -> tuple[TargetOutput, Attend]:
    """Run the target over the nodes of the windows, ``B * N`` rows.

    Returns:
        Its output, with the inputs of the layers that the draft captures, and its attention.
    """
    n = tree.tokens.shape[1]

    # Attention over the pool and the window, and recurrent states.
    table = state.page_table
    lens = state.seq_lens
    ancestors = tree.ancestors
    attend: Attend
    if isinstance(models.kv, DataParallelLatents):
        attend = models.kv.shard_window_attend(_shard_of(state), table, lens, ancestors, num_columns)
    else:
        attend = models.kv.window_attend(table, lens, ancestors, n, num_columns)
    if models.recurrent_states is not None:
        assert state.slot_ids is not None, "recurrent layers need the slots of their states"
        attend = models.recurrent_states.window(attend, state.slot_ids, tree.ancestors)

    # The forward. A window of one node is its root, at depth 0.
    positions = state.seq_lens if n == 1 else (state.seq_lens[:, None] + tree.depths).view(-1)
    capture = models.drafter.capture if models.drafter is not None else ()
    return models.target(tree.tokens.view(-1), positions, attend, capture), attend


def _shard_of(state: CycleState) -> ShardRequests:
    assert state.shard is not None, "data-parallel attention needs the requests of this rank"
    return state.shard


def root_only(roots: torch.Tensor) -> Tree:
    """Make the window of ordinary decoding."""
    zero = torch.zeros_like(roots)[:, None]
    return Tree(roots[:, None], zero, zero, zero + 1)


def _logprobs(logits: torch.Tensor, accepted: Accepted, top: int) -> Logprobs:
    b, _, v = logits.shape
    rows = logits.gather(1, accepted.path[:, :, None].expand(-1, -1, v))
    chosen, ids, values = token_logprobs(rows.reshape(-1, v), accepted.tokens.reshape(-1), top)
    length = accepted.path.shape[1]
    return Logprobs(chosen.view(b, length), ids.view(b, length, top), values.view(b, length, top))
