"""FSDP2: shards of weights, gradients and moments."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from eagle_kit.config.train import TrainingConfig
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.objective.ttt_module import TTTModule
from eagle_kit.train.optim.optimizer import check_moments, make_optimizer, set_learning_rate
from eagle_kit.train.optim.strategy import Strategy, copy_head

if TYPE_CHECKING:
    from accelerate import Accelerator


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
        norm = float(_whole(nn.utils.clip_grad_norm_(self.parameters, clip_norm or math.inf)))
        set_learning_rate(self.optimizer, learning_rate)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

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
