"""Loss of training-time test (EAGLE-3, section 3.2): output layer and loss in blocks of rows.

Every step learns the target's distribution over the draft vocabulary. EAGLE-3 has no loss of features:
that of EAGLE-1 is :mod:`eagle_kit.objective.regression`. The supervised rows of all steps in one range of
row indices are a block; within it each teacher distribution is computed once and used by all steps.

Legend: T packed tokens, K steps (``ttt_length``), R_k supervised rows of step k, M of them in a block, N
of these with loss (their target token is in the draft vocabulary), P distinct teacher positions of a block,
G groups, H hidden, H_target hidden of the target, V / Vd target / draft vocabulary.
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
from eagle_kit.ops.soft_cross_entropy import SoftCrossEntropy, Teacher, WeightGrads, Weights, attach_gradient

LOSS_BLOCK = 256
"""Computed rows of step 0 in a block, on a CPU."""
LOSS_BLOCK_ON_GPU = 2048
"""The same on a GPU. Larger blocks need more memory, and fewer of them add to the output layer's gradient."""
DPACE_ROWS = 640
"""Rows of all steps in a block with D-PACE, which needs their logits at the same time, on a CPU."""
DPACE_ROWS_ON_GPU = 4096
"""The same on a GPU."""


@dataclass(frozen=True)
class TTTBatch:
    """One packed sequence of training-time test, with the frozen weights of the target that it needs.

    Attributes:
        ids: int64 ``[T]``.
        plan: the supervised rows of each step.
        row_weights: fp32 ``[R_k]`` for every step: step weight times normalisation.
        features: the target's states, of which the teacher is made.
        embed_weight: the target's embedding ``[V, H]``.
        target_rows: rows of the target's output layer for the draft vocabulary, ``[Vd, H_target]``.
        inputs: states with noise that the head reads; None if it reads ``features``.
        group: int64 ``[T]``, group of each token in the statistics, below ``num_groups``; None is one group.
    """

    ids: torch.Tensor
    plan: RowPlan
    row_weights: list[torch.Tensor]
    features: TargetFeatures
    embed_weight: torch.Tensor
    target_rows: torch.Tensor
    inputs: TargetFeatures | None = None
    group: torch.Tensor | None = None
    num_groups: int = 1


@dataclass(frozen=True)
class Objective:
    """Loss to minimise.

    Attributes:
        loss: losses of :func:`~eagle_kit.ops.draft_loss.linear_draft_loss`: a name, or names with weights.
            Their formulas are in ``ops/soft_cross_entropy/reference.py`` (``ce``, the published one, and
            ``kl``) and in ``ops/draft_loss/reference.py``.
        text_weight: weight of the cross-entropy with the text's tokens, which is added to ``loss``.
        eta: parameter of the loss ``lk-hybrid``.
        target_head: the whole output layer of the target ``[V, H_target]``; None unless a loss needs the
            acceptance rate and the draft vocabulary is smaller than the target's.
        regression: weights of EAGLE-1's loss, which replaces ``loss``; None for other heads.
        detach_steps: stop gradients between steps.
        dpace_alpha: alpha of :mod:`eagle_kit.objective.dpace`, which weighs the steps of a row; None is off.
        confidence_weight: weight of the loss of the head's confidence in its acceptance rate (DSpark); 0 for
            heads without a confidence output.
        form: scale and soft cap of the target's logits.
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
        losses = {loss: 1.0} if isinstance(loss, str) else dict(loss)
        text_weight = losses.pop("hard-ce", 0.0)

        # The acceptance rate needs the target's probabilities of all tokens.
        target_head = None
        needs_rate = confidence_weight > 0 or any(name in NEEDS_MASS for name in losses)
        if needs_rate and head.token_map is not None:
            target_head = head_weight
        return cls(losses, eta, text_weight, target_head, confidence_weight=confidence_weight)

    @property
    def needs_target(self) -> bool:
        """True unless rows learn from the text alone."""
        return bool(self.loss) or self.confidence_weight > 0 or self.regression is not None


class TTTOutput(NamedTuple):
    """Loss of one packed sequence, and its statistics.

    Attributes:
        loss: fp32 scalar to differentiate. It has no graph if no row learns.
        sums: fp64 ``[4, K]``, sums over the rows of each step, named by the properties below.
        leading_of: fp64 ``[G]``, the sum of :attr:`leading` over all steps, for each group.
    """

    loss: torch.Tensor
    sums: torch.Tensor
    leading_of: torch.Tensor

    @classmethod
    def zeros(cls, loss: torch.Tensor, steps: int, num_groups: int = 1) -> "TTTOutput":
        """Output of a packed sequence without supervised rows: ``loss`` and statistics of 0."""
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
        """Sums of the unweighted losses of the rows with loss."""
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
        """Number of rows with loss: supervised, and the target token is in the draft vocabulary."""
        return self.sums[3]


class _BlockRows(NamedTuple):
    """Rows of a block with loss, and the states of their teachers. On a GPU N is M.

    Attributes:
        in_draft_vocab: bool ``[M]``, True for rows whose target token is in the draft vocabulary.
        row_index: int64 ``[N]``, index of each row among the M rows of the block.
        states: ``[N, H]``, input of the output layer.
        weights: fp32 ``[N]``.
        tokens: int64 ``[N]``, the target's most likely token.
        teachers: int64 ``[P]``, distinct teacher positions.
        teacher_index: int64 ``[N]``, index of each row's teacher in ``teachers``.
        teacher_hidden: ``[P, H_target]``, final hidden states of the target at ``teachers``.
    """

    in_draft_vocab: torch.Tensor
    row_index: torch.Tensor
    states: torch.Tensor
    weights: torch.Tensor
    tokens: torch.Tensor
    teachers: torch.Tensor
    teacher_index: torch.Tensor
    teacher_hidden: torch.Tensor


def ttt_loss(
    head: DraftHead, outputs: list[torch.Tensor], batch: TTTBatch, objective: Objective
) -> TTTOutput:
    """Weighted loss over all steps.

    A supervised row whose target token is outside the draft vocabulary has no loss, as in the published code,
    and counts as a miss. The target token is the target's most likely one, or the text's if rows learn from
    the text alone.

    Args:
        outputs: the head's outputs at the supervised rows of each step, K tensors ``[R_k, H]``.
    """
    plan = batch.plan
    on_gpu = batch.features.argmax.is_cuda
    normed = [head.norm_for_lm_head(out) for out in outputs]  # K of [R_k, H]

    # Sums over blocks. Gradients of the output layer are added up block by block.
    zero = outputs[0].new_zeros((), dtype=torch.float32)
    result = TTTOutput.zeros(zero, len(plan.rows), batch.num_groups)
    total = result.loss
    group = torch.zeros_like(batch.ids) if batch.group is None else batch.group
    output = head.output_weights
    grads: list[torch.Tensor | None] = []
    for weight in output:
        is_trained = weight.requires_grad and torch.is_grad_enabled()
        grads.append(torch.zeros_like(weight) if is_trained else None)

    for block in plan.blocks(block_rows(objective, len(plan.rows), on_gpu=on_gpu)):
        rows = _select_rows(head, block, normed, batch, objective)
        if rows.row_index.numel() == 0:
            continue

        # Loss against the target's distributions, the text, or both.
        teachers = _make_teachers(head, block, rows, batch, objective)
        part = _block_loss(objective, output, rows.states, rows.teacher_hidden, teachers, tuple(grads))
        total = total + part.loss

        # Loss of the head's confidence (DSpark).
        if part.acceptance is not None:
            previous_tokens = batch.ids[block.teachers[rows.row_index]]
            total = total + _confidence_loss(
                head, rows.states, previous_tokens, part.acceptance, rows.weights, objective
            )

        # Statistics of all M rows.
        is_match = head.to_target(part.best) == rows.tokens
        row_losses = part.row_losses
        if not on_gpu:
            is_match = torch.zeros_like(rows.in_draft_vocab).index_copy_(0, rows.row_index, is_match)
            row_losses = row_losses.new_zeros(rows.in_draft_vocab.shape)
            row_losses.index_copy_(0, rows.row_index, part.row_losses)
        leading = _count(result.sums, block, plan, is_match, row_losses, rows.in_draft_vocab)
        result.leading_of.index_add_(0, group, leading)

    # The gradients of the output layer enter the graph.
    for weight, grad in zip(output, grads, strict=True):
        if grad is not None and total.requires_grad:
            total = total + attach_gradient(weight, grad)
    return result._replace(loss=total)


def _select_rows(
    head: DraftHead, block: LossBlock, normed: list[torch.Tensor], batch: TTTBatch, objective: Objective
) -> _BlockRows:
    """Select the rows of a block whose target token is in the draft vocabulary.

    On a CPU the other rows are left out. On a GPU they stay, because the host would have to wait for
    their number. Their weight is 0, and their states are zeros, because 0 times NaN is NaN.

    Args:
        normed: inputs of the output layer, K tensors ``[R_k, H]``.
    """
    argmax = batch.features.argmax
    states = block.select(normed)  # [M, H]
    weights = block.select(batch.row_weights)  # [M]
    tokens = argmax[block.teachers]  # [M], the target's most likely ones
    learned_tokens = tokens if objective.needs_target else batch.ids[block.teachers + 1]
    in_draft_vocab = head.t2d[learned_tokens]  # [M]

    # All rows, on a GPU.
    if argmax.is_cuda:
        is_outside = ~head.t2d[argmax[block.unique_teachers]]  # [P]
        hidden = batch.features.hidden[block.unique_teachers].masked_fill(is_outside[:, None], 0.0)
        return _BlockRows(
            in_draft_vocab=in_draft_vocab,
            row_index=torch.arange(len(tokens), device=tokens.device),
            states=states.masked_fill(~in_draft_vocab[:, None], 0.0),
            weights=weights * in_draft_vocab,
            tokens=tokens,
            teachers=block.unique_teachers,
            teacher_index=block.teacher_index,
            teacher_hidden=hidden,
        )

    # The rows with loss, on a CPU.
    row_index = torch.nonzero(in_draft_vocab)[:, 0]  # [N]
    teachers, teacher_index = torch.unique(block.teachers[row_index], return_inverse=True)  # [P], [N]
    return _BlockRows(
        in_draft_vocab=in_draft_vocab,
        row_index=row_index,
        states=states[row_index],
        weights=weights[row_index],
        tokens=tokens[row_index],
        teachers=teachers,
        teacher_index=teacher_index,
        teacher_hidden=batch.features.hidden[teachers],
    )


def _make_teachers(
    head: DraftHead, block: LossBlock, rows: _BlockRows, batch: TTTBatch, objective: Objective
) -> tuple[Teacher | None, Teacher | None]:
    """Teachers of a block's rows: the target's distributions, and the text's tokens, each None if the
    objective does not use it."""
    # Weights of the steps (D-PACE).
    factors = None
    if objective.dpace_alpha is not None:
        plan = batch.plan
        step_rows = []
        for indices, (start, stop) in zip(plan.rows, block.bounds, strict=True):
            step_rows.append(indices[start:stop])
        factors = step_factors(
            step_rows, len(plan.is_teacher), rows.row_index, rows.in_draft_vocab, objective.dpace_alpha
        )

    # The target's distributions.
    target_teacher = None
    if objective.needs_target:
        hidden = rows.teacher_hidden
        probs = draft_vocab_probs(hidden, batch.target_rows, objective.form)  # [P, Vd]
        mass = None
        if objective.target_head is not None:
            mass = draft_vocab_mass(hidden, batch.target_rows, objective.target_head, objective.form)
        target_teacher = Teacher(probs, rows.teacher_index, rows.weights, mass, factors)

    # The text's tokens.
    text_teacher = None
    if objective.text_weight:
        probs = text_probs(batch.ids[rows.teachers + 1], head.t2d, head.token_map)  # [P, Vd]
        weights = rows.weights * probs.sum(-1)[rows.teacher_index]  # 0 outside the draft vocabulary
        text_teacher = Teacher(probs, rows.teacher_index, weights, None, factors)
    return target_teacher, text_teacher


def block_rows(objective: Objective, steps: int, *, on_gpu: bool) -> int:
    """Computed rows of step 0 in a block of ``steps`` steps."""
    if objective.dpace_alpha is None:
        return LOSS_BLOCK_ON_GPU if on_gpu else LOSS_BLOCK
    num_rows = DPACE_ROWS_ON_GPU if on_gpu else DPACE_ROWS
    return max(1, num_rows // steps)


def _block_loss(
    objective: Objective,
    output: Weights,
    states: torch.Tensor,
    hidden: torch.Tensor,
    teachers: tuple[Teacher | None, Teacher | None],
    grads: WeightGrads,
) -> SoftCrossEntropy:
    """Loss of a block's rows. One pass for each teacher; their losses are added.

    Args:
        output: weights of the output layer.
        states: its input ``[N, H]``.
        hidden: final hidden states of the target ``[P, H_target]``, for EAGLE-1's loss.
        teachers: of the target and of the text.
        grads: gradients of ``output``, which are added to in place; None for a frozen weight.
    """
    teacher, text = teachers
    if objective.regression is not None and teacher is not None:
        (weight,) = output
        return regression_loss(states, weight, hidden, teacher, objective.regression, objective.form.scale)

    # The target's distributions, and the text's tokens.
    parts = []
    if teacher is not None:
        soft = partial(linear_draft_loss, loss=objective.loss, eta=objective.eta, weight_grad=grads)
        parts.append(soft(states, output, teacher, returns_acceptance=objective.confidence_weight > 0))
    if text is not None:
        hard = linear_draft_loss(states, output, text, loss={"ce": objective.text_weight}, weight_grad=grads)
        has_token = text.probs.sum(-1)[text.index]  # 0 for a token outside the draft vocabulary
        parts.append(hard._replace(row_losses=hard.row_losses * has_token))

    # Their sum, with the statistics of the first.
    first, *others = parts
    for part in others:
        first = first._replace(loss=first.loss + part.loss, row_losses=first.row_losses + part.row_losses)
    return first


def _confidence_loss(
    head: DraftHead,
    states: torch.Tensor,
    previous_tokens: torch.Tensor,
    acceptance: torch.Tensor,
    row_weights: torch.Tensor,
    objective: Objective,
) -> torch.Tensor:
    """Weighted cross-entropy between the head's confidence and the acceptance rate (DSpark, arXiv
    2607.05147).

    Args:
        states: inputs of the output layer ``[N, H]``.
        previous_tokens: int64 ``[N]``, the token before the one that each row drafts.
        acceptance: fp32 ``[N]``, probability that the row's draft is accepted.
        row_weights: fp32 ``[N]``.
    """
    logits = head.confidence_logits(states, previous_tokens)
    assert logits is not None, "the head has no confidence output"
    rows = binary_cross_entropy_with_logits(logits.float(), acceptance, reduction="none")
    return objective.confidence_weight * (rows * row_weights).sum()


def _count(
    sums: torch.Tensor,
    block: LossBlock,
    plan: RowPlan,
    is_match: torch.Tensor,
    row_losses: torch.Tensor,
    learns: torch.Tensor,
) -> torch.Tensor:
    """Add the statistics of a block to ``sums``.

    A row that conditional drop kept at a step stands for the dropped ones: it counts 1 / keep rate.

    Args:
        sums: fp64 ``[4, K]``, see :class:`TTTOutput`; changed in place.
        is_match: bool ``[M]``, True for rows whose most likely token is the target's.
        row_losses: fp32 ``[M]``, loss of each row.
        learns: bool ``[M]``, True for rows with loss.

    Returns:
        Number of leading steps that match at every token position, fp64 ``[T]``.
    """
    num_tokens = len(plan.is_teacher)
    losses = row_losses.double().masked_fill(~learns, 0.0)

    # The figures of each step.
    sizes = [stop - start for start, stop in block.bounds]
    steps = zip(is_match.split(sizes), losses.split(sizes), learns.split(sizes), strict=True)

    # A row leads at a step if it matches there and has matched at all steps before.
    leads = torch.ones(num_tokens, dtype=torch.bool, device=is_match.device)
    num_leading = torch.zeros(num_tokens, dtype=torch.float64, device=is_match.device)
    for step, (step_matches, step_losses, step_learns) in enumerate(steps):
        start, stop = block.bounds[step]
        rows = plan.rows[step][start:stop]
        leads_here = torch.zeros_like(leads)
        leads_here[rows] = step_matches & leads[rows]
        leads = leads_here
        num_leading += leads / plan.keep_rates[step]
        leading = leads.sum() / plan.keep_rates[step]
        sums[:, step] += torch.stack((step_losses.sum(), step_matches.sum(), leading, step_learns.sum()))
    return num_leading
