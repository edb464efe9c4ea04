"""Recording of what a draft proposes at every position of the target's own responses.

Responses are decoded one token a cycle, each after a whole draft whose candidates are kept, so that
:class:`~eagle_kit.autotune.acceptance.DraftRecording` can say what any smaller shape accepts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from eagle_kit.autotune.acceptance import DraftRecording, Drafts, ReadyCandidates
from eagle_kit.autotune.policy import ShapePolicy
from eagle_kit.config.engine import ResolvedConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import MAX_WINDOW, SpecShape
from eagle_kit.drafts.base.autoregressive import AutoregressiveDrafter
from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.base.drafter import Drafter
from eagle_kit.drafts.base.one_pass import OnePassDrafter
from eagle_kit.engine.cycle import root_only
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.request import Request
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.sampling import SamplingBatch
from eagle_kit.verify.proposal import Deterministic, DraftOutput

RECORDED = SpecShape(8, 8, 64)
"""Shape of the recorded drafts: every shape up to its depth and width can be predicted."""


def record_drafts(
    target: Target,
    draft: DraftModel,
    config: ResolvedConfig,
    requests: Sequence[Request],
    *,
    shape: SpecShape = RECORDED,
    on_finish: Callable[[], None] = lambda: None,
) -> DraftRecording:
    """Decode ``requests`` -> what the draft proposed at every position of their responses.

    Args:
        config: of the engine whose drafts are recorded; its pool is given the size that the requests need.
        shape: depth and width to record, reduced to what the draft has.
        on_finish: called when a response ends.

    Raises:
        UserError: drafts are static or sampled, or the responses are too short.
    """
    if config.tree == "static" or config.sampled_drafts:
        raise UserError("Static and sampled drafts are not recorded.", "Leave these options out.")
    topk = min(shape.topk, draft.draft_vocab_size)
    batch_size = min(config.max_batch_size, len(requests))
    longest = max(len(request.prompt_ids) + request.params.max_tokens for request in requests)
    num_tokens = longest + config.num_lookahead_tokens(shape.steps) + config.page_size
    num_padded = -(-batch_size // config.num_shards) * config.num_shards
    config = config.replace(
        graph_mode="off",
        prefix_cache=False,
        lag=0,
        max_batch_size=batch_size,
        batch_sizes=tuple(sorted({min(size, batch_size) for size in config.batch_sizes})),
        kv_memory=None,
        kv_tokens=num_padded * num_tokens,
        draft_scratch=max(MAX_WINDOW, shape.num_draft_nodes),
    )
    engine = Engine(target, draft, config)
    drafter = engine.runner.drafter
    assert drafter is not None
    steps = min(shape.steps, drafter.most_steps(draft))
    recorder = _Recorder(drafter)
    engine.runner.drafter = cast(Drafter, recorder)
    whole = SpecShape(steps, topk, min(shape.tokens, 1 + topk + (steps - 1) * topk**2))
    engine.use_shape(ShapePolicy({1: [whole]}, whole))  # as where a policy reads confidences
    drafts: dict[Request, list[_Draft]] = {request: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        owners = {request.sequence.allocation.table[0]: request for request in engine.scheduler.running}
        for request in engine.step():
            if request.finish_reason is not None:
                on_finish()
        for made in recorder.take():
            drafts[owners[made.first_page]].append(made)
    return _recording(drafts, steps, topk)


class _Draft(NamedTuple):
    """Draft of a request that has ``first_page``, behind the root at ``position``: its candidates, and the
    probability by which the engine would have called it sure."""

    first_page: int
    position: int
    candidates: tuple[torch.Tensor, ...]
    confidence: torch.Tensor


def _recording(drafts: dict[Request, list[_Draft]], steps: int, topk: int) -> DraftRecording:
    truth: list[list[int]] = []
    kept: list[_Draft] = []
    lengths = []
    for request, mine in drafts.items():
        text = [*request.prompt_ids, *request.token_ids, *[-1] * (steps + 1)]
        mine = [each for each in mine if each.position + 1 < len(request.prompt_ids) + len(request.token_ids)]
        lengths.append(len(mine))
        truth += [text[each.position + 1 : each.position + 1 + steps] for each in mine]
        kept += mine
    if not kept:
        raise UserError("The responses are too short to record any draft.", "Give other prompts.")
    parts = [torch.stack(part) for part in zip(*(each.candidates for each in kept), strict=True)]
    candidates = cast(Drafts, type(kept[0].candidates)(*parts))
    confidence = torch.stack([each.confidence for each in kept])
    return DraftRecording(steps, topk, candidates, confidence, torch.tensor(truth), lengths)


class _Recorder:
    """A drafter whose candidates are kept, and of which only the root is verified."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._kept: list[_Draft] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(
        self,
        state: CycleState,
        shape: SpecShape,
        num_columns: int,
        sampling: SamplingBatch | None = None,
    ) -> DraftOutput:
        """See :class:`Drafter`."""
        assert state.draft is not None
        made: Drafts
        if isinstance(self._drafter, OnePassDrafter):
            made = ReadyCandidates(*state.draft[:2])
        else:
            assert isinstance(self._drafter, AutoregressiveDrafter)
            made = self._drafter.grow_candidates(state, shape, num_columns)
        confidence = self._drafter.confidence(state.draft)
        assert confidence is not None
        first = confidence.view(len(state.roots), -1)[:, 0].cpu()
        first_pages = state.page_table[:, 0].tolist()
        positions = state.seq_lens.tolist()
        for row, active in enumerate(state.active.tolist()):
            if active:
                mine = type(made)(*(part[row].cpu() for part in made))
                self._kept.append(_Draft(first_pages[row], positions[row], mine, first[row]))
        return DraftOutput(root_only(state.roots), Deterministic())

    def take(self) -> list[_Draft]:
        """Return the drafts since the last call."""
        kept = self._kept
        self._kept = []
        return kept
