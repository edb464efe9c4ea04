"""The training step as one module: what DDP, FSDP2 and DeepSpeed wrap.

They hook a module's ``forward`` and the backward pass of what it returns, so everything that reads a weight
of the head happens in here.

Legend: T packed tokens, K steps of training-time test, H hidden, Vd draft vocabulary.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from eagle_kit.config.train import TrainingConfig
from eagle_kit.models.heads.draft_head import DraftHead
from eagle_kit.train.algorithm.batch import Forward
from eagle_kit.train.algorithm.teacher import TargetFeatures
from eagle_kit.train.algorithm.ttt import CROSS_ENTROPY, Objective, TTTOutput, ttt_forward


class TTTModule(nn.Module):
    """Training-time test of ``head``, which is its only submodule.

    Args:
        head: what is trained.
        embed_weight: the target's embedding ``[V, H]``, on the head's device.
        target_rows: its output rows of the draft vocabulary ``[Vd, H_target]``, there too.
        objective: what is minimised.
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
        self.head, self.training_config, self.objective = head, training, objective
        self._frozen = (embed_weight, target_rows)  # a tuple, so that nobody shards or broadcasts them

    def forward(
        self,
        forward: Forward | None,
        aux: torch.Tensor,
        hidden: torch.Tensor,
        argmax: torch.Tensor,
        taught: torch.Tensor,
        row_weights: list[torch.Tensor],
    ) -> TTTOutput:
        """Every weight has a gradient after ``loss.backward()``, of zeros when no row of this process learns:
        the other processes wait for it. Without a ``forward`` all gradients are zeros.

        ``taught`` is what the teacher is made of: ``hidden`` without the noise that the head may read. The
        parts of :class:`TargetFeatures` come one by one, because hooks see tensors only when they are
        arguments themselves.
        """
        if forward is None:
            return TTTOutput(self._nothing(aux, hidden), *torch.zeros(4, 0, dtype=torch.float64))
        recompute = self.training_config.gradient_checkpointing == "steps"
        with autocast(self.training_config, forward.ids.device):
            out = ttt_forward(
                self.head,
                self._frozen[0],
                forward.ids,
                TargetFeatures(aux, taught, argmax),
                self._frozen[1],
                forward.plan,
                row_weights,
                self.objective,
                inputs=TargetFeatures(aux, hidden, argmax),
                recompute=recompute,
            )
        has_idle_blocks = len(forward.plan.rows) < len(self.head.blocks)  # a curriculum has not come to them
        if out.loss.requires_grad and not has_idle_blocks:
            return out
        return out._replace(loss=out.loss + self._nothing(aux, hidden))

    def _nothing(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Zero, a function of every trained weight and of ``inputs``."""
        trained = (parameter for parameter in self.head.parameters() if parameter.requires_grad)
        nothing = torch.stack([parameter.sum() * 0.0 for parameter in trained]).sum()
        return nothing + sum(tensor[:0].sum() for tensor in inputs)


def autocast(training: TrainingConfig, device: torch.device) -> AbstractContextManager[object]:
    """Matmuls in bfloat16 when the run's precision says so. Not accelerate's, which is off for DeepSpeed."""
    if training.precision != "bfloat16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
