"""Strategies by which processes share one head, and the plain one: a whole copy in each.

accelerate says which strategy was asked for; the wrapping is done here, because its ``prepare`` shards on
GPUs only, and what is tested on CPUs should be what runs on GPUs. Whatever the strategy, a gradient
is that of the *global* batch: a step's loss is divided by counts over all processes, so gradients add up over
them; DDP, FSDP2 and ZeRO take means, hence the loss is multiplied by the number of processes.

What is saved is always whole and the same for every strategy, so that a run goes on under another one.
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
        module: call it with the arguments of :meth:`TTTModule.forward`.
        optimizer: takes the steps; its groups' learning rates are set by :meth:`update`.
    """

    module: Any
    optimizer: torch.optim.Optimizer

    def __init__(self, module: TTTModule, num_processes: int) -> None:
        self.head, self.num_processes = module.head, num_processes

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of one forward; ``last`` of the step's."""
        (loss * self.num_processes if self.num_processes > 1 else loss).backward()

    def forward(
        self,
        micro_batch: MicroBatch,
        inputs: TargetFeatures,
        teacher_hidden: torch.Tensor,
        row_weights: list[torch.Tensor],
        *,
        last: bool,
    ) -> TTTOutput:
        """Call :attr:`module`; ``last`` as for :meth:`backward`."""
        self._prepare(inputs, last)
        return self.module(micro_batch, *inputs, teacher_hidden, row_weights)

    @abstractmethod
    def update(self, learning_rate: float, clip_norm: float | None) -> float:
        """One optimiser step, or none where the gradient is not finite; returns the gradient's norm before
        clipping, the same in all processes, NaN or infinite where there was no step. Gradients are zero
        afterwards."""

    @abstractmethod
    def whole_head(self) -> DraftHead:
        """The head with all of its weights, for saving and decoding: the trained one itself where it is
        whole, or a copy. All processes call it."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any]:
        """The ``state_dict`` that the optimiser of a single process would have, on the CPU. All processes
        call it."""

    @abstractmethod
    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`optimizer_state` of any strategy gave. Raises ValueError for another
        head's."""

    def _prepare(self, inputs: TargetFeatures, last: bool) -> None:  # noqa: B027
        """Do what a forward needs beforehand; by default nothing."""


class Replicated(Strategy):
    """The whole head in every process: one alone, or DDP."""

    def __init__(self, module: TTTModule, training: TrainingConfig, accelerator: "Accelerator") -> None:
        super().__init__(module, accelerator.num_processes)
        self.module = module
        if self.num_processes > 1:
            buffers = [name for name, _ in module.named_buffers()]  # the same everywhere, and never changed
            ddp = nn.parallel.DistributedDataParallel
            ddp._set_params_and_buffers_to_ignore_for_model(module, buffers)
            self.module = ddp(module, gradient_as_bucket_view=True)
            # DDP sorts its buckets once, by the first backward pass. With this one first, steps add up in the
            # same order whether a run was resumed before them or not.
            none = torch.zeros(0, device=accelerator.device)
            self.module(None, none, none, none, none, []).loss.backward()
            module.zero_grad(set_to_none=False)
        process = accelerator.process_index, self.num_processes
        self.optimizer = make_optimizer(self.head, training, process)
        self.parameters = [p for p in self.head.parameters() if p.requires_grad]

    def _prepare(self, inputs: TargetFeatures, last: bool) -> None:
        """Let gradients meet in the last backward pass."""
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
        optimizer = self.optimizer
        return optimizer.whole_state_dict() if isinstance(optimizer, MuonAdamW) else optimizer.state_dict()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Strategy.load_optimizer_state`."""
        self.optimizer.load_state_dict(dict(state))
        check_moments(self.optimizer)


def copy_head(
    head: DraftHead, state: Mapping[str, torch.Tensor], device: torch.device, bound: Any
) -> DraftHead:
    """A head of the same architecture with the weights of ``state``."""
    with torch.random.fork_rng(devices=[]):
        copy: DraftHead = type(head)(head.config)
    copy.load_state_dict({name: tensor.detach() for name, tensor in state.items()})
    copy = copy.to(device=device, dtype=torch.float32)
    return copy if bound is None else copy.bind(bound)


def on_device(head: DraftHead, device: torch.device, output: Any = None) -> DraftHead:
    """``head``, or a copy of it where it is elsewhere; ``output`` is the target's output layer there."""
    if head.device == device:
        return head
    return copy_head(head, head.state_dict(), device, output)
