"""FSDP2: shards of weights, gradients and moments."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from eagle_kit.config.train import TrainingConfig
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.objective.target_features import TargetFeatures
from eagle_kit.objective.ttt_module import TTTModule
from eagle_kit.train.optim.optimizer import check_moments, make_optimizer, set_learning_rate
from eagle_kit.train.optim.strategy import Strategy, copy_head

if TYPE_CHECKING:
    from accelerate import Accelerator


class FullySharded(Strategy):
    """FSDP2: every process has a shard of each weight, its gradient and its moments.

    The head is gathered as one unit, because it is one layer and its forward reads all weights.
    """

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

    def _prepare(self, inputs: TargetFeatures, last: bool) -> None:
        """Sum the gradients over the processes in the last backward pass of a step alone.

        Until then each process holds the whole gradient of its own rows, as at the end of every backward
        pass of this one unit.
        """
        self.module.set_requires_gradient_sync(last)

    def update(self, learning_rate: float, clip_norm: float | None) -> float:
        """See :meth:`Strategy.update`."""
        norm = float(_whole(nn.utils.clip_grad_norm_(self.parameters, clip_norm or math.inf)))
        set_learning_rate(self.optimizer, learning_rate)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def whole_head(self) -> DraftHead:
        """A copy of the head with gathered weights."""
        state = {name: _whole(tensor) for name, tensor in self.head.state_dict().items()}
        return copy_head(self.head, state, self._device, self._bound)

    def optimizer_state(self) -> dict[str, Any]:
        """Gather the state, see :meth:`Strategy.optimizer_state`."""
        state = self.optimizer.state_dict()
        gathered = {}
        for number, moments in state["state"].items():
            gathered[number] = {name: _whole(value, "cpu") for name, value in moments.items()}
        return {**state, "state": gathered}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Load this process's shard of the state, see :meth:`Strategy.load_optimizer_state`."""
        from torch.distributed.tensor import distribute_tensor

        # Moments are sharded as their weights are; the counter of steps is whole.
        parameters: list[Any] = [p for group in self.optimizer.param_groups for p in group["params"]]
        sharded = {}
        for number, parameter in enumerate(parameters):
            if number not in state["state"]:
                continue
            moments = {}
            for name, value in state["state"][number].items():
                if name != "step":
                    value = value.to(self._device)
                    value = distribute_tensor(
                        value, parameter.device_mesh, parameter.placements, src_data_rank=None
                    )
                moments[name] = value
            sharded[number] = moments
        self.optimizer.load_state_dict({**state, "state": sharded})
        check_moments(self.optimizer)


def _whole(value: Any, device: str | None = None) -> Any:
    """Gather a sharded tensor; other values are returned as they are.

    Args:
        device: device of the result; None is that of the shards.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor()
    return whole if device is None else whole.to(device)
