"""How processes share one head: each a whole copy, or shards of it, as accelerate's launcher was asked.

accelerate starts the processes and says what was asked; the wrapping is done here, because its ``prepare``
shards on GPUs only, and what is tested on CPUs should be what runs on GPUs. Whatever the strategy, a gradient
is that of the *global* batch: a step's loss is divided by counts over all processes, so gradients add up over
them; DDP, FSDP2 and ZeRO take means, hence the loss is multiplied by the number of processes.

What is saved is always whole and the same for every strategy, so that a run goes on under another one.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from eagle_kit.config.train import TrainingConfig
from eagle_kit.core.errors import UserError
from eagle_kit.models.heads.draft_head import DraftHead
from eagle_kit.train.algorithm.batch import Forward
from eagle_kit.train.algorithm.teacher import TargetFeatures
from eagle_kit.train.algorithm.ttt import TTTOutput
from eagle_kit.train.run.module import TTTModule
from eagle_kit.train.run.optimizer import check_moments, make_optimizer, set_learning_rate

if TYPE_CHECKING:
    from accelerate import Accelerator


class Strategy(ABC):
    """The module as the processes share it, and its optimiser.

    Attributes:
        module: call it with the arguments of :meth:`TTTModule.forward`.
        optimizer: what takes the steps; its groups' learning rates are set by :meth:`update`.
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
        forward: Forward,
        inputs: TargetFeatures,
        taught: torch.Tensor,
        row_weights: list[torch.Tensor],
        *,
        last: bool,
    ) -> TTTOutput:
        """Call :attr:`module`; ``last`` as for :meth:`backward`."""
        return self.module(forward, *inputs, taught, row_weights)

    @abstractmethod
    def update(self, learning_rate: float, clip_norm: float | None) -> float:
        """One optimiser step; returns the gradient norm before clipping. Gradients are zero afterwards."""

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

    def _clip(self, parameters: list[nn.Parameter], limit: float | None) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, limit or float("inf"))

    def _set_rate(self, rate: float) -> None:
        set_learning_rate(self.optimizer, rate)


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
        self.optimizer = make_optimizer(self.head, training)
        self.parameters = [p for p in self.head.parameters() if p.requires_grad]

    def forward(
        self,
        forward: Forward,
        inputs: TargetFeatures,
        taught: torch.Tensor,
        row_weights: list[torch.Tensor],
        *,
        last: bool,
    ) -> TTTOutput:
        """See :meth:`Strategy.forward`; gradients meet in the last backward pass."""
        if isinstance(self.module, nn.parallel.DistributedDataParallel):
            self.module.require_backward_grad_sync = last
        return super().forward(forward, inputs, taught, row_weights, last=last)

    def update(self, learning_rate: float, clip_norm: float | None) -> float:
        """See :meth:`Strategy.update`; a missing gradient counts as zero."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = float(self._clip(self.parameters, clip_norm))
        self._set_rate(learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return norm

    def whole_head(self) -> DraftHead:
        """The head itself."""
        return self.head

    def optimizer_state(self) -> dict[str, Any]:
        """Its ``state_dict``, where it is."""
        return self.optimizer.state_dict()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Strategy.load_optimizer_state`."""
        self.optimizer.load_state_dict(dict(state))
        check_moments(self.optimizer)


class FullySharded(Strategy):
    """FSDP2: every process has a part of each weight, its gradient and its moments; the head is gathered as
    one unit, since it is one layer and its forward reads weights of all of it."""

    def __init__(self, module: TTTModule, training: TrainingConfig, accelerator: "Accelerator") -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(module, accelerator.num_processes)
        self._device = accelerator.device
        self._bound = module.head.bound
        mesh = init_device_mesh(self._device.type, (self.num_processes,))
        self.module = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        self.optimizer = make_optimizer(self.head, training)
        self.parameters = [p for p in self.head.parameters() if p.requires_grad]

    def update(self, learning_rate: float, clip_norm: float | None) -> float:
        """See :meth:`Strategy.update`."""
        norm = self._clip(self.parameters, clip_norm)
        self._set_rate(learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(_whole(norm))

    def whole_head(self) -> DraftHead:
        """A copy."""
        state = {name: _whole(tensor) for name, tensor in self.head.state_dict().items()}
        return copy_head(self.head, state, self._device, self._bound)

    def optimizer_state(self) -> dict[str, Any]:
        """Gathered."""
        state = self.optimizer.state_dict()
        moments = {
            number: {name: _whole(value, "cpu") for name, value in mine.items()}
            for number, mine in state["state"].items()
        }
        return {**state, "state": moments}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Keeps this process's part."""
        from torch.distributed.tensor import distribute_tensor

        parameters: list[Any] = [p for group in self.optimizer.param_groups for p in group["params"]]
        moments = {
            number: {
                name: distribute_tensor(
                    value.to(self._device), mine.device_mesh, mine.placements, src_data_rank=None
                )
                if name != "step"
                else value
                for name, value in state["state"][number].items()
            }
            for number, mine in enumerate(parameters)
            if number in state["state"]
        }
        self.optimizer.load_state_dict({**state, "state": moments})
        check_moments(self.optimizer)


def _whole(value: Any, device: str | None = None) -> Any:
    """A sharded tensor gathered; anything else as it is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return value
    value = value.full_tensor()
    return value if device is None else value.to(device)


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
    if head.last_norm.weight.device == device:
        return head
    return copy_head(head, head.state_dict(), device, output)


def make_strategy(
    sharding: str, module: TTTModule, training: TrainingConfig, accelerator: "Accelerator"
) -> Strategy:
    """The strategy named ``sharding``, see :func:`eagle_kit.train.parallel.launch.sharding_asked_for`."""
    shards = sharding == "fsdp2" or sharding.startswith("zero")
    for name, value, plain in (
        ("optimizer", training.optimizer, "adamw"),
        ("ema_decay", training.ema_decay, None),
    ):
        if shards and value != plain:
            raise UserError(
                f"training.{name} is {value}, which needs whole weights, but the launch shards them.",
                f"Leave training.{name} out, or launch without sharding.",
            )
    if sharding == "fsdp2":
        return FullySharded(module, training, accelerator)
    if sharding.startswith("zero"):
        from eagle_kit.train.parallel.zero import Zero

        return Zero(int(sharding[-1]), module, training, accelerator)
    return Replicated(module, training, accelerator)
