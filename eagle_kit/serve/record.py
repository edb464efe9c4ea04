"""Recording of what a draft proposes at every position of the target's own replies.

Replies are decoded one token a cycle, each after a whole draft whose candidates are kept, so that
:class:`~eagle_kit.tuning.acceptance.Recording` can say what any smaller shape accepts.
"""

from collections.abc import Callable, Sequence

import torch

from eagle_kit.config.engine import ResolvedConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.sampling import SamplingBatch
from eagle_kit.kernels.tree_build import Candidates
from eagle_kit.models.targets.target import Target
from eagle_kit.serve.cycle import root_only
from eagle_kit.serve.engine import Engine
from eagle_kit.serve.request import Request
from eagle_kit.speculation.proposal import Deterministic, DraftOutput
from eagle_kit.speculation.propose.draft_model import DraftModel
from eagle_kit.speculation.propose.drafter import Drafter
from eagle_kit.speculation.state import CycleState
from eagle_kit.tuning.acceptance import Recording

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
) -> Recording:
    """Decode ``requests`` -> what the draft proposed at every position of their replies.

    Args:
        config: of the engine whose drafts are recorded; its pool is given the size that the requests need.
        shape: depth and width to record; the width is reduced to the draft's vocabulary.
        on_finish: called when a reply ends.

    Raises:
        UserError: the draft grows no trees, or the replies are too short.
    """
    steps, topk = shape.steps, min(shape.topk, draft.draft_vocab_size)
    batch_size = min(config.max_batch_size, len(requests))
    longest = max(len(request.prompt_ids) + request.params.max_tokens for request in requests)
    parts = config.num_parts
    config = config.replace(
        graph_mode="off",
        prefix_cache=False,
        lag=0,
        max_batch_size=batch_size,
        batch_sizes=tuple(sorted({min(size, batch_size) for size in config.batch_sizes})),
        kv_memory=None,
        kv_tokens=-(-batch_size // parts) * parts * (longest + config.room(steps) + config.page_size),
    )
    engine = Engine(target, draft, config)
    if type(engine.runner.drafter) is not Drafter:
        raise UserError("Only drafts that grow dynamic trees can be recorded.", "Give an EAGLE head.")
    recorder = engine.runner.drafter = _Recorder(engine.runner.drafter)
    engine.use_shape(SpecShape(steps, topk, min(shape.tokens, 1 + topk + (steps - 1) * topk**2)))
    drafts: dict[Request, list[tuple[int, Candidates]]] = {request: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        owners = {request.allocation.table[0]: request for request in engine.scheduler.running}
        for request in engine.step():
            if request.finish_reason is not None:
                on_finish()
        for first_page, position, candidates in recorder.take():
            drafts[owners[first_page]].append((position, candidates))
    return _recording(drafts, steps, topk)


def _recording(drafts: dict[Request, list[tuple[int, Candidates]]], steps: int, topk: int) -> Recording:
    truth, kept, lengths = [], [], []
    for request, mine in drafts.items():
        text = [*request.prompt_ids, *request.token_ids, *[-1] * (steps + 1)]
        mine = [pair for pair in mine if pair[0] + 1 < len(request.prompt_ids) + len(request.token_ids)]
        lengths.append(len(mine))
        for position, candidates in mine:
            truth.append(text[position + 1 : position + 1 + steps])
            kept.append(candidates)
    if not kept:
        raise UserError("The replies are too short to record any draft.", "Give other prompts.")
    candidates = Candidates(*(torch.stack(part) for part in zip(*kept, strict=True)))
    return Recording(steps, topk, candidates, torch.tensor(truth), lengths)


class _Recorder(Drafter):
    """Drafter that keeps its candidates and has only the root verified."""

    def __init__(self, drafter: Drafter) -> None:
        self.__dict__.update(drafter.__dict__)
        self._kept: list[tuple[int, int, Candidates]] = []

    def propose(
        self,
        state: CycleState,
        shape: SpecShape,
        num_columns: int,
        sampling: SamplingBatch | None = None,
    ) -> DraftOutput:
        """See :class:`Drafter`."""
        candidates = self.grow_candidates(state, shape, num_columns)
        first_pages, positions = state.page_table[:, 0].tolist(), state.seq_lens.tolist()
        for row, active in enumerate(state.active.tolist()):
            if active:
                mine = Candidates(*(part[row].cpu() for part in candidates))
                self._kept.append((first_pages[row], positions[row], mine))
        return DraftOutput(root_only(state.roots), Deterministic())

    def take(self) -> list[tuple[int, int, Candidates]]:
        """Return (first page, position of the root, candidates) of the drafts since the last call."""
        kept, self._kept = self._kept, []
        return kept
