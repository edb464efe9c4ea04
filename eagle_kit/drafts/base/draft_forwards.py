"""Forwards of a draft model over emitted tokens and over prompts, which store its keys and values.

For drafters whose entries are made of a feature and a token (EAGLE, P-EAGLE) or of a token (whole models).
The table of :mod:`eagle_kit.drafts.base.cycle_state` shows where these entries lie.

Legend: B requests, L tokens of each, T prompt rows, R rows of the draft, n rows of output.
"""

from collections.abc import Sequence
from functools import partial

import torch

from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import StepRows
from eagle_kit.drafts.base.drafter import Drafter, PaddedPromptBatch, PendingTokens, PromptBatch
from eagle_kit.kv.keys_values import PagedKV
from eagle_kit.kv.store import PaddedSegments, Segment
from eagle_kit.models.draft_head import StepOutput
from eagle_kit.ops.transfer import to_device


def run_over_tokens(
    drafter: Drafter,
    state: CycleState,
    pending: PendingTokens,
    output_rows: torch.Tensor,
    num_columns: int,
) -> StepOutput:
    """Run the draft over the tokens that follow ``state``, and commit their keys to the draft's pool.

    Args:
        pending: the tokens, and the target's states that predicted them.
        output_rows: int64 ``[n]``, rows to return, of the ``B * L``.
        num_columns: bound on the keys that a token attends to.

    Returns:
        The output of the draft at ``output_rows``.
    """
    model = drafter.model
    page_table = state.page_table
    seq_lens = state.seq_lens
    hidden_states, tokens, num_committed = pending
    b, length = tokens.shape

    # The tokens are a chain after the root, whose entry is in the draft's pool: token j has the position
    # ``seq_lens + 1 + j``.
    prefix_lens = seq_lens + 1
    bits = drafter.chain_bits[:length].expand(b, length)
    attend = drafter.kv.window_attend(page_table, prefix_lens, bits, length, num_columns)
    first_offset = 1 - model.first_position
    rope_positions = seq_lens[:, None] + drafter.arange[first_offset : first_offset + length]

    # One forward, which writes their keys into the scratch.
    features = model.features(hidden_states.flatten(0, 1))
    rows = StepRows(features, tokens.reshape(-1), rope_positions.view(-1))
    out = model.step(rows, attend, output_rows=output_rows)

    # Commit the emitted tokens, the bonus token included: it is the next root, of which the draft has an
    # entry before the target has.
    nodes = drafter.arange[:length].expand(b, length)
    drafter.kv.commit_window(page_table, nodes, prefix_lens, num_committed)
    return out


def run_over_prompts(drafter: Drafter, batch: PromptBatch) -> StepOutput:
    """Run the draft over prompt rows, store its keys, and return its output at the rows ``last``."""
    model = drafter.model
    features = model.features(model.target_hidden_states(batch.out))
    arange = partial(torch.arange, device=features.device)
    first_position = model.first_position

    # Rows of the draft: for each row of the target, the token after it.
    feature_rows = []
    tokens = []
    rope_positions = []
    segments = []
    row_start = 0
    for table, start, stop, *_ in batch.segments:
        row_stop = row_start + stop - start
        first = start + 1
        # A whole model has an entry of the first token of the prompt as well.
        if start == 0 and first_position == 0:
            first = 0
            feature_rows.append(arange(row_start, row_start + 1))
            tokens.append(batch.ids[row_start : row_start + 1])
        feature_rows.append(arange(row_start, row_stop))
        tokens.append(batch.next_ids[row_start:row_stop])
        rope_positions.append(arange(first - first_position, stop + 1 - first_position))
        segments.append(Segment(table, first, stop + 1, first))
        row_start = row_stop

    # One forward. If no prompt ends, it returns a row that nobody reads: some layers do not take none.
    attend = drafter.kv.prefill_attend(segments)
    rows = StepRows(features, torch.cat(tokens), torch.cat(rope_positions), torch.cat(feature_rows))
    output_rows = drafter.arange[:1]
    if len(batch.last):
        output_rows = _draft_rows_of_last(segments, batch)
    return model.step(rows, attend, output_rows=output_rows)


def run_over_padded_prompts(drafter: Drafter, batch: PaddedPromptBatch) -> StepOutput:
    """Run the draft over prompt rows of a fixed shape, and store its keys.

    Returns:
        The output of the draft at the rows ``last``.
    """
    model = drafter.model
    features = model.features(batch.states)
    segments = batch.segments.following
    tokens = batch.next_ids

    # A whole model has an entry of the first token of a prompt as well.
    if model.first_position == 0:
        assert model.is_whole_model
        first_rows = batch.segments.cu_rows[:-1].clamp(max=len(batch.ids) - 1)
        tokens = torch.cat((tokens, batch.ids[first_rows]))
        features = features.new_empty(len(tokens), 0)
        segments = _with_first_rows(segments, batch.segments.starts == 0)

    # One forward.
    assert isinstance(drafter.kv, PagedKV)
    attend = drafter.kv.padded_prefill_attend(segments)
    rope_positions = segments.positions - model.first_position
    rows = StepRows(features, tokens, rope_positions)
    return model.step(rows, attend, output_rows=batch.last)


def _with_first_rows(segments: PaddedSegments, begins: torch.Tensor) -> PaddedSegments:
    """Append a segment of one row for each segment: the first token of a request.

    Args:
        begins: bool ``[B]``, False where the segment does not begin the request, whose row is padding.
    """
    count = len(begins)
    num_rows = len(segments.segments)
    new = torch.arange(count, device=begins.device)
    zeros = torch.zeros_like(new)
    return PaddedSegments(
        page_tables=torch.cat((segments.page_tables, segments.page_tables)),
        starts=torch.cat((segments.starts, zeros.masked_fill(~begins, -1))),
        cu_rows=torch.cat((segments.cu_rows, num_rows + 1 + new)),
        segments=torch.cat((segments.segments, count + new)),
        positions=torch.cat((segments.positions, zeros)),
        is_stored=torch.cat((segments.is_stored, begins)),
    )


def _draft_rows_of_last(draft_segments: Sequence[Segment], batch: PromptBatch) -> torch.Tensor:
    """Rows int64 ``[n]`` of the draft that belong to the rows ``last`` of the target. The draft may have one
    row more per request."""
    num_extra_rows = 0
    shift = []
    for drafted, segment in zip(draft_segments, batch.segments, strict=True):
        num_extra_rows += (drafted.stop - drafted.start) - (segment.stop - segment.start)
        shift.append(num_extra_rows)
    return batch.last + to_device(shift, batch.last.device)[batch.requests_of_last()]
