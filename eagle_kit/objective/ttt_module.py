"""Training step as one module, to be wrapped by DDP, FSDP2 and DeepSpeed.

They hook a module's ``forward`` and the backward pass of what it returns, so everything that reads a
weight of the head happens in here.

Legend: T packed tokens, K steps of training-time test, H hidden, Vd draft vocabulary.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from eagle_kit.config.train import TrainingConfig
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.objective.batch import MicroBatch
from eagle_kit.objective.loss import Objective, TTTBatch, TTTOutput
from eagle_kit.objective.target_features import TargetFeatures
from eagle_kit.objective.ttt import CROSS_ENTROPY, ttt_forward


class TTTModule(nn.Module):
    """Training-time test of ``head``, which is its only submodule.

    Args:
        head: draft head.
        embed_weight: the target's embedding ``[V, H]``, on the head's device.
        target_rows: rows of the target's output layer for the draft vocabulary ``[Vd, H_target]``, on the
            head's device.
        training: section ``training`` of the config.
        objective: loss to minimise.
    """

    def __init__(
        self,
        head: DraftHead,
        embed_weight: torch.Tensor,
        target_rows: torch.Tensor,
        training: TrainingConfig,
        objective: Objective = CROSS_ENTROPY,
    ) -> None:
        super().__init__()
        self.head = head
        self.training_config = training
        self.objective = objective
        # A tuple is no buffer: DDP does not broadcast it, and FSDP does not shard it.
        self._frozen = (embed_weight, target_rows)

    def forward(
        self,
        micro_batch: MicroBatch | None,
        aux: torch.Tensor,
        hidden: torch.Tensor,
        argmax: torch.Tensor,
        teacher_hidden: torch.Tensor,
        row_weights: list[torch.Tensor],
    ) -> TTTOutput:
        """Loss of one micro-batch.

        Every weight has a gradient after ``loss.backward()``, zeros if no row of this process learns, because
        the other processes wait for it. Hooks see only tensors that are arguments themselves, so the parts of
        :class:`TargetFeatures` are arguments of their own.

        Args:
            micro_batch: packed sequences; None for gradients of zeros.
            aux, hidden, argmax: target features that the head reads, with noise if there is any, see
                :class:`TargetFeatures`.
            teacher_hidden: ``hidden`` without noise, ``[T, H]``, of which the teacher is made.
            row_weights: see :class:`TTTBatch`.
        """
        if micro_batch is None:
            return TTTOutput.zeros(self._zero_of_all_weights(aux, hidden), 0)

        # Forward and loss.
        embed_weight, target_rows = self._frozen
        batch = TTTBatch(
            ids=micro_batch.ids,
            plan=micro_batch.plan,
            row_weights=row_weights,
            features=TargetFeatures(aux, teacher_hidden, argmax),
            embed_weight=embed_weight,
            target_rows=target_rows,
            inputs=TargetFeatures(aux, hidden, argmax),
            group=micro_batch.group,
            num_groups=micro_batch.num_groups,
        )
        recompute = self.training_config.gradient_checkpointing == "steps"
        with autocast(self.training_config, micro_batch.ids.device):
            out = ttt_forward(self.head, batch, self.objective, recompute=recompute)

        # Weights without a part in the loss get zeros. A curriculum trains the last blocks later.
        has_idle_blocks = len(micro_batch.plan.rows) < len(self.head.blocks)
        if out.loss.requires_grad and not has_idle_blocks:
            return out
        return out._replace(loss=out.loss + self._zero_of_all_weights(aux, hidden))

    def _zero_of_all_weights(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Zero that depends on every trained weight and on ``inputs``."""
        trained = (parameter for parameter in self.head.parameters() if parameter.requires_grad)
        zero = torch.stack([parameter.sum() * 0.0 for parameter in trained]).sum()
        return zero + sum(tensor[:0].sum() for tensor in inputs)


def autocast(training: TrainingConfig, device: torch.device) -> AbstractContextManager[object]:
    """Context in which matmuls run in bfloat16 if ``training.precision`` is bfloat16.

    That of accelerate is off with DeepSpeed.
    """
    if training.precision != "bfloat16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
