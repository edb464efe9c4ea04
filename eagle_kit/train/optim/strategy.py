"""Strategies by which processes share one head, and the plain one: a whole copy in each.

accelerate says which strategy was launched. The head is wrapped here, because accelerate's ``prepare`` shards
on GPUs only, and the code that runs on GPUs should be tested on CPUs. With every strategy a gradient is that
of the *global* batch: the loss is divided by counts over all processes, so the gradients of the processes add
up. DDP, FSDP2 and ZeRO take means, so the loss is multiplied by the number of processes.

Checkpoints have whole weights and states, the same for every strategy, so a run can continue with another
strategy.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from eagle_kit.config.train import TrainingConfig
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.objective.batch import MicroBatch
from eagle_kit.objective.loss import TTTOutput
from eagle_kit.objective.target_features import TargetFeatures
from eagle_kit.objective.ttt_module import TTTModule
from eagle_kit.train.optim.optimizer import MuonAdamW, check_moments, make_optimizer, set_learning_rate

if TYPE_CHECKING:
    from accelerate import Accelerator


class Strategy(ABC):
    """The module as the processes share it, and its optimiser.

    Attributes:
        module: the wrapped module; it takes the arguments of :meth:`TTTModule.forward`.
        optimizer: the optimiser; :meth:`update` sets its learning rates.
        head: the draft head, whose weights may be shards.
        num_processes: number of processes.
    """

    module: Any
    optimizer: torch.optim.Optimizer

    def __init__(self, module: TTTModule, num_processes: int) -> None:
        self.head = module.head
        self.num_processes = num_processes

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of one forward.

        Args:
            loss: loss of this process.
            last: True for the last forward of the optimiser step.
        """
        if self.num_processes > 1:
            loss = loss * self.num_processes
        loss.backward()

    def forward(
        self,
        micro_batch: MicroBatch,
        inputs: TargetFeatures,
        teacher_hidden: torch.Tensor,
        row_weights: list[torch.Tensor],
        *,
        last: bool,
    ) -> TTTOutput:
        """Call :attr:`module`.

        Args:
            inputs: target features that the head reads.
            teacher_hidden, row_weights: see :meth:`TTTModule.forward`.
            last: see :meth:`backward`.
        """
        self._prepare(inputs, last)
        return self.module(micro_batch, *inputs, teacher_hidden, row_weights)

    @abstractmethod
    def update(self, learning_rate: float, clip_norm: float | None) -> float:
        """Make an optimiser step, unless the gradient is not finite. Gradients are zero afterwards.

        Args:
            clip_norm: maximum norm of the gradient; None does not clip.

        Returns:
            Norm of the gradient before clipping, the same in all processes; NaN or infinite if no step was
            made.
        """

    @abstractmethod
    def whole_head(self) -> DraftHead:
        """The head with whole weights, for saving and decoding. All processes call it.

        Returns:
            The trained head itself if its weights are whole, else a copy.
        """

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any]:
        """The ``state_dict`` that the optimiser of a single process would have. All processes call it."""

    @abstractmethod
    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`optimizer_state` of any strategy returned.

        Raises:
            ValueError: it is the state of another head.
        """

    def _prepare(self, inputs: TargetFeatures, last: bool) -> None:  # noqa: B027
        """Prepare a forward; by default it does nothing."""


class Replicated(Strategy):
    """The whole head in every process: a single process, or DDP."""

    def __init__(self, module: TTTModule, training: TrainingConfig, accelerator: "Accelerator") -> None:
        super().__init__(module, accelerator.num_processes)
        self.module = module
        if self.num_processes > 1:
            # Buffers are the same in all processes and never change.
            buffers = [name for name, _ in module.named_buffers()]
            ddp = nn.parallel.DistributedDataParallel
            ddp._set_params_and_buffers_to_ignore_for_model(module, buffers)
            self.module = ddp(module, gradient_as_bucket_view=True)

            # DDP sorts its buckets once, by the first backward pass. With this one first, gradients are
            # summed in the same order in a resumed run.
            empty = torch.zeros(0, device=accelerator.device)
            self.module(None, empty, empty, empty, empty, []).loss.backward()
            module.zero_grad(set_to_none=False)

        process = (accelerator.process_index, self.num_processes)
        self.optimizer = make_optimizer(self.head, training, process)
        self.parameters = [p for p in self.head.parameters() if p.requires_grad]

    def _prepare(self, inputs: TargetFeatures, last: bool) -> None:
        """Sum the gradients over the processes in the last backward pass of a step alone."""
        if isinstance(self.module, nn.parallel.DistributedDataParallel):
            self.module.require_backward_grad_sync = last

    def update(self, learning_rate: float, clip_norm: float | None) -> float:
        """See :meth:`Strategy.update`; a missing gradient counts as zero."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = float(nn.utils.clip_grad_norm_(self.parameters, clip_norm or math.inf))
        set_learning_rate(self.optimizer, learning_rate)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return norm

    def whole_head(self) -> DraftHead:
        """The head itself."""
        return self.head

    def optimizer_state(self) -> dict[str, Any]:
        """See :meth:`Strategy.optimizer_state`."""
        if isinstance(self.optimizer, MuonAdamW):
            return self.optimizer.whole_state_dict()
        return self.optimizer.state_dict()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Strategy.load_optimizer_state`."""
        self.optimizer.load_state_dict(dict(state))
        check_moments(self.optimizer)


def copy_head(
    head: DraftHead, state: Mapping[str, torch.Tensor], device: torch.device, bound: Any
) -> DraftHead:
    """Copy of a head in fp32 with other weights.

    Args:
        state: weights by name.
        device: device of the copy.
        bound: output layer of the target that the copy is bound to; None binds none.
    """
    # The initial weights are drawn; the run's random numbers stay as they are.
    with torch.random.fork_rng(devices=[]):
        copy: DraftHead = type(head)(head.config)
    copy.load_state_dict({name: tensor.detach() for name, tensor in state.items()})
    copy = copy.to(device=device, dtype=torch.float32)
    return copy if bound is None else copy.bind(bound)


def on_device(head: DraftHead, device: torch.device, output: Any = None) -> DraftHead:
    """``head`` if it is on ``device``, else a copy there.

    Args:
        output: output layer of the target on ``device``.
    """
    if head.device == device:
        return head
    return copy_head(head, head.state_dict(), device, output)
