"""Loss of training-time test: output layer and loss in blocks of rows.

The teacher of a block is made once and used by all K steps.

Legend: T packed tokens, K steps, R_k rows of step k, H hidden, Vd draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from eagle_kit.config.training import RegressionConfig
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.targets.target import LogitForm
from eagle_kit.objective.dpace import step_factors
from eagle_kit.objective.regression import regression_loss
from eagle_kit.objective.row_plan import LossBlock, RowPlan
from eagle_kit.objective.target_features import TargetFeatures
from eagle_kit.objective.teacher import draft_vocab_mass, draft_vocab_probs, text_probs
from eagle_kit.ops.draft_loss import NEEDS_MASS, linear_draft_loss
from eagle_kit.ops.soft_cross_entropy import SoftCrossEntropy, Teacher, WeightGrads, Weights, carried

LOSS_BLOCK, LOSS_BLOCK_ON_GPU = 256, 2048
"""Rows of step 0 whose teacher distributions exist together. Fewer blocks are better where there is memory:
each adds to the gradient of the whole output weight."""
LOGITS, LOGITS_ON_GPU = 640, 4096
"""Rows of all steps whose logits exist together where weights follow the draft's confidence."""


@dataclass(frozen=True)
class TTTBatch:
    """One packed row of training-time test, with the frozen weights of the target that it needs.

    Attributes:
        ids: int64 ``[T]``.
        plan: rows that carry loss.
        row_weights: fp32 ``[R_k]`` for every step: step weight times normalisation.
        features: the target's states, which the head learns from.
        embed_weight: the target's embedding ``[V, H]``.
        target_head: the target's output rows of the draft vocabulary ``[Vd, H_target]``.
        inputs: states that the head reads in place of ``features`` (noise); None reads ``features``.
        group: int64 ``[T]``, what each row is counted as, below ``num_groups``; None counts all as one.
    """

    ids: torch.Tensor
    plan: RowPlan
    row_weights: list[torch.Tensor]
    features: TargetFeatures
    embed_weight: torch.Tensor
    target_head: torch.Tensor
    inputs: TargetFeatures | None = None
    group: torch.Tensor | None = None
    num_groups: int = 1


@dataclass(frozen=True)
class Objective:
    """Loss to minimise.

    Attributes:
        loss: of :func:`~eagle_kit.ops.draft_loss.linear_draft_loss`, one or several with weights or none.
        text_weight: of the cross-entropy with the text's tokens, beside ``loss``.
        eta: of ``lk-hybrid``.
        target_head: the target's whole output layer ``[V, H_target]``, for losses in the acceptance rate when
            the draft vocabulary is a part of the target's; None otherwise.
        regression: EAGLE-1's loss with these weights, in place of ``loss``.
        detach_steps: no gradient flows through the state that a step hands to the next.
        dpace_alpha: weigh the steps of each row by the draft's confidence, see
            :mod:`eagle_kit.objective.dpace`; None leaves ``row_weights`` as they are.
        confidence_weight: of the cross-entropy between the head's confidence in a row and the row's
            acceptance rate, as it is now; 0 for heads without.
        form: of the target's logits.
    """

    loss: str | Mapping[str, float] = "ce"
    eta: float = 3.0
    text_weight: float = 0.0
    target_head: torch.Tensor | None = None
    regression: RegressionConfig | None = None
    detach_steps: bool = False
    dpace_alpha: float | None = None
    confidence_weight: float = 0.0
    form: LogitForm = field(default_factory=LogitForm)

    @classmethod
    def of(
        cls,
        loss: str | Mapping[str, float],
        eta: float,
        head: DraftHead,
        head_weight: torch.Tensor,
        confidence_weight: float = 0.0,
    ) -> "Objective":
        """Objective for the training of ``head``; ``head_weight [V, H_target]``."""
        mix = {loss: 1.0} if isinstance(loss, str) else dict(loss)
        text_weight = mix.pop("hard-ce", 0.0)
        needs_rate = confidence_weight > 0 or any(name in NEEDS_MASS for name in mix)
        whole = head_weight if needs_rate and head.token_map is not None else None
        return cls(mix, eta, text_weight, whole, confidence_weight=confidence_weight)

    @property
    def needs_target(self) -> bool:
        """True unless rows learn from the text alone."""
        return bool(self.loss) or self.confidence_weight > 0 or self.regression is not None


class TTTOutput(NamedTuple):
    """Loss of one packed row, and its figures.

    Attributes:
        loss: to differentiate, fp32; without a graph when no row learns.
        sums: fp64 ``[4, K]``, where the loss is, sums over the rows of each step, by name below.
        leading_of: fp64 ``[G]``, the sum of ``leading`` over the steps in each group.
    """

    loss: torch.Tensor
    sums: torch.Tensor
    leading_of: torch.Tensor

    @classmethod
    def nothing(cls, loss: torch.Tensor, steps: int, num_groups: int = 1) -> "TTTOutput":
        """Output of a row without loss."""
        zeros = torch.zeros(4 * steps + num_groups, dtype=torch.float64, device=loss.device)
        return cls.unpack(loss, zeros, steps)

    @classmethod
    def unpack(cls, loss: torch.Tensor, figures: torch.Tensor, steps: int) -> "TTTOutput":
        """Output of :attr:`figures`."""
        return cls(loss, figures[: 4 * steps].view(4, steps), figures[4 * steps :])

    @property
    def figures(self) -> torch.Tensor:
        """All sums, fp64 ``[4 K + G]``."""
        return torch.cat((self.sums.flatten(), self.leading_of))

    @property
    def losses(self) -> torch.Tensor:
        """Unweighted losses of the rows that carry loss."""
        return self.sums[0]

    @property
    def matches(self) -> torch.Tensor:
        """Number of rows whose most likely draft token is the target's."""
        return self.sums[1]

    @property
    def leading(self) -> torch.Tensor:
        """Number of rows that match at this step and at all before; an estimate where rows were dropped."""
        return self.sums[2]

    @property
    def learned(self) -> torch.Tensor:
        """Number of rows that carry loss: supervised, and the target's token is in the draft vocabulary."""
        return self.sums[3]


def ttt_loss(
    head: DraftHead, outputs: list[torch.Tensor], batch: TTTBatch, objective: Objective
) -> TTTOutput:
    """Weighted loss over all steps.

    A row whose target token (the text's, where rows learn from that alone) is outside the draft vocabulary
    carries no loss and counts as a miss. On a CPU it
    is left out; on a GPU, where the host would have to wait for how many there are, it has the weight 0,
    and zeros in place of the states of head and target.

    Args:
        outputs: the head's states at the rows of each step, K tensors ``[R_k, H]``.
    """
    plan, argmax = batch.plan, batch.features.argmax
    normed = [head.norm_for_head(out) for out in outputs]
    zero = outputs[0].new_zeros((), dtype=torch.float32)
    total, sums, leading_of = TTTOutput.nothing(zero, len(plan.rows), batch.num_groups)
    group = torch.zeros_like(batch.ids) if batch.group is None else batch.group
    output = head.output_weights
    is_learning = torch.is_grad_enabled()
    grads = tuple(torch.zeros_like(w) if w.requires_grad and is_learning else None for w in output)
    on_gpu = argmax.is_cuda
    for block in plan.blocks(block_rows(objective, len(plan.rows), on_gpu=on_gpu)):
        states, weights, token = block.of(normed), block.of(batch.row_weights), argmax[block.teachers]
        wanted, index = block.wanted, block.which
        sayable = head.t2d[token if objective.needs_target else batch.ids[block.teachers + 1]]
        if on_gpu:  # the host would have to wait for the number of rows that remain
            weights, states = weights * sayable, states.masked_fill(~sayable[:, None], 0.0)
            learned = torch.arange(len(token), device=token.device)
            unsayable = ~head.t2d[argmax[wanted]]  # 0 times what is not finite would be NaN
            hidden = batch.features.hidden[wanted].masked_fill(unsayable[:, None], 0.0)
        else:
            learned = torch.nonzero(sayable)[:, 0]
            if learned.numel() == 0:
                continue
            states, weights, token = states[learned], weights[learned], token[learned]
            wanted, index = torch.unique(block.teachers[learned], return_inverse=True)
            hidden = batch.features.hidden[wanted]
        factors = None
        if objective.dpace_alpha is not None:
            rows = [mine[a:b] for mine, (a, b) in zip(plan.rows, block.pieces, strict=True)]
            factors = step_factors(rows, len(plan.needed), learned, sayable, objective.dpace_alpha)
        teacher = text = None
        if objective.needs_target:
            probs, mass = draft_vocab_probs(hidden, batch.target_head, objective.form), None
            if objective.target_head is not None:
                mass = draft_vocab_mass(hidden, batch.target_head, objective.target_head, objective.form)
            teacher = Teacher(probs, index, weights, mass, factors)
        if objective.text_weight:
            probs = text_probs(batch.ids[wanted + 1], head.t2d, head.token_map)
            text = Teacher(probs, index, weights * probs.sum(-1)[index], None, factors)
        part = _block_loss(objective, output, states, hidden, (teacher, text), grads)
        total = total + part.loss
        if part.acceptance is not None:
            before = batch.ids[block.teachers[learned]]  # the token before the one that a row drafts
            total = total + _confidence_loss(head, states, before, part.acceptance, weights, objective)
        is_match, row_losses = head.to_target(part.best) == token, part.row_losses
        if not on_gpu:
            is_match = torch.zeros_like(sayable).index_copy_(0, learned, is_match)
            row_losses = row_losses.new_zeros(sayable.shape).index_copy_(0, learned, row_losses)
        still = _count(sums, block, plan, (is_match, row_losses, sayable))
        leading_of.index_add_(0, group, still)
    for weight, grad in zip(output, grads, strict=True):
        if grad is not None and total.requires_grad:
            total = total + carried(weight, grad)
    return TTTOutput(total, sums, leading_of)


def block_rows(objective: Objective, steps: int, *, on_gpu: bool) -> int:
    """Rows of step 0 in a block: fewer with weights by confidence, which need all logits of a row's steps."""
    if objective.dpace_alpha is None:
        return LOSS_BLOCK_ON_GPU if on_gpu else LOSS_BLOCK
    return max(1, (LOGITS_ON_GPU if on_gpu else LOGITS) // steps)


def _block_loss(
    objective: Objective,
    output: Weights,
    states: torch.Tensor,
    hidden: torch.Tensor,
    teachers: tuple[Teacher | None, Teacher | None],
    grads: WeightGrads,
) -> SoftCrossEntropy:
    """Loss of a block's rows: ``states [M, H]`` learn from ``teachers``, the target's distributions, made of
    its ``hidden [P, H]``, and the text's tokens, in a pass for each that there is. Gradients of the weights
    of ``output`` that learn are added to ``grads``."""
    teacher, text = teachers
    if objective.regression is not None and teacher is not None:
        (weight,) = output
        return regression_loss(states, weight, hidden, teacher, objective.regression, objective.form.scale)
    parts = []
    if teacher is not None:
        soft = partial(linear_draft_loss, loss=objective.loss, eta=objective.eta, weight_grad=grads)
        parts.append(soft(states, output, teacher, tells_acceptance=objective.confidence_weight > 0))
    if text is not None:
        hard = linear_draft_loss(states, output, text, loss={"ce": objective.text_weight}, weight_grad=grads)
        has_token = text.probs.sum(-1)[text.index]  # or its row says nothing
        parts.append(hard._replace(row_losses=hard.row_losses * has_token))
    first, *others = parts
    for part in others:
        first = first._replace(loss=first.loss + part.loss, row_losses=first.row_losses + part.row_losses)
    return first


def _confidence_loss(
    head: DraftHead,
    states: torch.Tensor,
    before: torch.Tensor,
    acceptance: torch.Tensor,
    row_weights: torch.Tensor,
    objective: Objective,
) -> torch.Tensor:
    """Weighted cross-entropy of the head's confidence in rows ``states [M, H]`` behind the tokens ``before``
    with their ``acceptance`` rates (DSpark, arXiv 2607.05147)."""
    logits = head.confidence_logits(states, before)
    assert logits is not None, "the head does not tell its confidence"
    rows = binary_cross_entropy_with_logits(logits.float(), acceptance, reduction="none")
    return objective.confidence_weight * (rows * row_weights).sum()


def _count(
    sums: torch.Tensor,
    block: LossBlock,
    plan: RowPlan,
    figures: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Add the figures of a block to ``sums [4, K]``: whether a row matches, its loss and whether it
    learns, all ``[M]``. Returns the number of leading steps that match at every position, fp64 ``[T]``. A
    row that was kept at a step counts for those that were dropped there."""
    rows, num_tokens = plan.rows, len(plan.needed)
    is_match, row_losses, learns = figures
    sizes = [b - a for a, b in block.pieces]
    alive = torch.ones(num_tokens, dtype=torch.bool, device=is_match.device)
    leading = torch.zeros(num_tokens, dtype=torch.float64, device=is_match.device)
    losses = row_losses.double().masked_fill(~learns, 0.0)
    pieces = zip(is_match.split(sizes), losses.split(sizes), learns.split(sizes), strict=True)
    for step, (hits, mine, learned) in enumerate(pieces):
        a, b = block.pieces[step]
        still = torch.zeros_like(alive)
        still[rows[step][a:b]] = hits & alive[rows[step][a:b]]
        alive = still
        leading += alive / plan.shares[step]
        matching = alive.sum() / plan.shares[step]
        sums[:, step] += torch.stack((mine.sum(), hits.sum(), matching, learned.sum()))
    return leading
