"""Checks of training losses: soft cross-entropy and the loss of the acceptance rate, with gradients."""

import torch

from eagle_kit.doctor.operations.inputs import error_of, largest, normal
from eagle_kit.ops.draft_loss import linear_draft_loss
from eagle_kit.ops.soft_cross_entropy import Teacher, linear_soft_cross_entropy


def soft_cross_entropy(dtype: torch.dtype) -> float:
    """Loss and both gradients, in chunks that do not divide the rows."""
    h = normal(dtype, 11, 24).requires_grad_()
    weight = normal(dtype, 33, 24, seed=1).requires_grad_()
    probs = normal(torch.float32, 7, 33, seed=2).softmax(-1)
    index = torch.arange(11) % 7
    row_weights = torch.linspace(0.1, 1.0, 11)
    teacher = Teacher(probs, index, row_weights)
    loss = linear_soft_cross_entropy(h, weight, teacher, chunk_rows=4, group_rows=8).loss
    gradients = torch.autograd.grad(loss, (h, weight))
    exact = [each.detach().double().requires_grad_() for each in (h, weight)]
    log_q = (exact[0] @ exact[1].t()).log_softmax(-1)
    expected = -(row_weights.double() * (probs.double()[index] * log_q).sum(-1)).sum()
    expected_gradients = torch.autograd.grad(expected, exact)
    errors = [error_of(*pair) for pair in zip(gradients, expected_gradients, strict=True)]
    return largest(error_of(loss.detach(), expected.detach()), *errors)


def acceptance_loss(dtype: torch.dtype) -> float:
    """The negative logarithm of the acceptance rate and its gradient, with words the draft cannot say."""
    h = normal(dtype, 11, 24).requires_grad_()
    weight = normal(dtype, 33, 24, seed=1)
    distribution = normal(torch.float32, 7, 50, seed=2).softmax(-1)
    index = torch.arange(11) % 7
    mass = distribution[:, :33].sum(-1)
    probs = distribution[:, :33] / mass[:, None]
    row_weights = torch.linspace(0.1, 1.0, 11)
    teacher = Teacher(probs, index, row_weights, mass)
    loss = linear_draft_loss(h, weight, teacher, loss="lk-alpha", chunk_rows=4).loss
    (gradient,) = torch.autograd.grad(loss, h)
    exact = h.detach().double().requires_grad_()
    q = (exact @ weight.double().t()).softmax(-1)
    accepted = torch.minimum(q, distribution.double()[index, :33]).sum(-1)
    expected = -(row_weights.double() * accepted.log()).sum()
    (expected_gradient,) = torch.autograd.grad(expected, exact)
    return largest(error_of(loss.detach(), expected.detach()), error_of(gradient, expected_gradient))
