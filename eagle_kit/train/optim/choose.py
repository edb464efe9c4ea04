"""The strategy that a launcher asked for."""

import os
from typing import TYPE_CHECKING

from eagle_kit.config.train import TrainingConfig
from eagle_kit.core.errors import UserError
from eagle_kit.objective.ttt_module import TTTModule
from eagle_kit.train.optim.fsdp import FullySharded
from eagle_kit.train.optim.strategy import Replicated, Strategy
from eagle_kit.train.optim.zero import Zero
from eagle_kit.train.parallel.launch import deepspeed_config

if TYPE_CHECKING:
    from accelerate import Accelerator


def make_strategy(
    sharding: str, module: TTTModule, training: TrainingConfig, accelerator: "Accelerator"
) -> Strategy:
    """Make the strategy for a sharding of the head.

    Args:
        sharding: see :func:`~eagle_kit.train.parallel.launch.sharding_asked_for`.

    Raises:
        UserError: the weights are sharded, and a setting needs whole ones.
    """
    if sharding == "none":
        return Replicated(module, training, accelerator)

    # Muon and the average of weights need whole matrices.
    values = {"optimizer": training.optimizer, "ema_decay": training.ema_decay}
    allowed = {"optimizer": "adamw", "ema_decay": None}
    for name, value in values.items():
        if value != allowed[name]:
            raise UserError(
                f"training.{name} is {value}, which needs whole weights, but the launch shards them.",
                f"Leave training.{name} out, or launch without sharding.",
            )
    if sharding == "fsdp2":
        return FullySharded(module, training, accelerator)
    stage = int(sharding.removeprefix("zero"))
    return Zero(stage, module, training, accelerator, deepspeed_config(os.environ))
