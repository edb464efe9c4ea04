"""DeepSpeed's ZeRO, stages 1 to 3 (arXiv 1910.02054): shards of moments, of gradients too, or of weights too.

Weights and moments are fp32. A run in bfloat16 casts inside the module, as with other strategies. Stage 1
sums gradients over the processes once a step. Stages 2 and 3 do so in every backward pass, since DeepSpeed
keeps no whole gradient there.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from eagle_kit.config.train import TrainingConfig
from eagle_kit.core.errors import UserError
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.objective.target_features import TargetFeatures
from eagle_kit.objective.ttt_module import TTTModule
from eagle_kit.train.optim.optimizer import make_optimizer, set_learning_rate
from eagle_kit.train.optim.strategy import Strategy, copy_head

if TYPE_CHECKING:
    from accelerate import Accelerator

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments."""


class Zero(Strategy):
    """A DeepSpeed engine around the module.

    Args:
        stage: 1, 2 or 3.
        more: settings of the launch, see :func:`~eagle_kit.train.parallel.launch.deepspeed_config`.
    """

    optimizer: Any

    def __init__(
        self,
        stage: int,
        module: TTTModule,
        training: TrainingConfig,
        accelerator: "Accelerator",
        more: Mapping[str, Any],
    ) -> None:
        # On a CPU, do not compile DeepSpeed's collectives over shared memory.
        deepspeed = _deepspeed()
        if accelerator.device.type == "cpu":
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        super().__init__(module, accelerator.num_processes)
        self.stage = stage
        self._device = accelerator.device
        self._bound = module.head.bound

        # The optimiser, and its groups before they become shards.
        optimizer = make_optimizer(self.head, training)
        self._groups = optimizer.state_dict()["param_groups"]
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

        # Stage 3 gathers the head as one unit, because its forward reads all weights.
        if stage == 3:
            deepspeed.utils.set_z3_leaf_modules(module, [TTTModule])

        # The engine. The run's own config decides what it has in common with the launch. Offloaded moments
        # are those of torch's AdamW too.
        rows_per_process = training.sequences_per_step // self.num_processes
        zero: dict[str, Any] = {"overlap_comm": False}
        for key, value in more.get("zero_optimization", {}).items():
            if value != "auto":
                zero[key] = value
        zero["stage"] = stage
        config = {
            **more,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": training.gradient_accumulation or rows_per_process,
            "gradient_clipping": training.clip_norm or 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, dist_init_required=False
        )
        self.module = self.engine
        self.optimizer = self.engine.optimizer

        # By default stage 2 checks gradients in half precision only; stage 3 always does.
        self.optimizer.check_grad_overflow = True

    def _prepare(self, inputs: TargetFeatures, last: bool) -> None:
        """At stage 3, let the inputs need gradients.

        DeepSpeed frees weights and gradients when the gradients of the module's inputs are there. Without
        any, it would free them before they are computed.
        """
        if self.stage == 3:
            inputs.aux_hidden_states.requires_grad_()
            inputs.hidden.requires_grad_()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """See :meth:`Strategy.backward`."""
        self.engine.backward(loss * self.num_processes, scale_wrt_gas=False)

        # Count the forward. The weights change in the last call alone.
        if not last:
            self.engine.step()

    def update(self, learning_rate: float, clip_norm: float | None) -> float:
        """See :meth:`Strategy.update`."""
        set_learning_rate(self.optimizer, learning_rate)
        self.engine.step()
        if self.optimizer.overflow:
            return math.nan
        return float(self.engine.get_global_grad_norm())

    def whole_head(self) -> DraftHead:
        """The head itself at stages 1 and 2, a copy with gathered weights at stage 3."""
        if self.stage < 3:
            return self.head
        deepspeed = _deepspeed()
        with deepspeed.zero.GatheredParameters(list(self.head.parameters())):
            state = {name: tensor.detach().clone() for name, tensor in self.head.state_dict().items()}
        return copy_head(self.head, state, self._device, self._bound)

    def optimizer_state(self) -> dict[str, Any]:
        """Gather the state, see :meth:`Strategy.optimizer_state`."""
        deepspeed = _deepspeed()

        # Groups, with the learning rates of now.
        groups = []
        for group, sharded in zip(self._groups, self.optimizer.param_groups, strict=True):
            groups.append({**group, "lr": sharded["lr"]})

        # Before the first step there are no moments.
        shards = self.optimizer.optimizer.state
        steps = [moments["step"] for moments in shards.values() if "step" in moments]
        if not steps:
            return {"state": {}, "param_groups": groups}

        # Whole moments of every weight.
        self._link_moments()
        state = {}
        for number, parameter in enumerate(self._parameters):
            moments = {"step": steps[0].detach().cpu().clone()}
            for name in MOMENTS:
                whole = deepspeed.utils.safe_get_full_optimizer_state(parameter, name)
                moments[name] = whole.detach().cpu().clone()
            state[number] = moments
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Load this process's shard of the state, see :meth:`Strategy.load_optimizer_state`."""
        given = [group["params"] for group in state["param_groups"]]
        expected = [group["params"] for group in self._groups]
        if given != expected:
            raise ValueError("it has other groups of weights")
        if not state["state"]:
            return

        # Empty moments of every shard, as AdamW would make them in its first step.
        if self.stage == 3:
            shards = self.optimizer.fp32_partitioned_groups_flat
        else:
            shards = self.optimizer.single_partition_of_fp32_groups
        for shard in shards:
            step = torch.zeros((), dtype=torch.float32, device=shard.device)
            step.copy_(state["state"][0]["step"])
            moments = {name: torch.zeros_like(shard) for name in MOMENTS}
            self.optimizer.optimizer.state[shard] = {"step": step, **moments}
        self._link_moments()

        # Fill them.
        for number, parameter in enumerate(self._parameters):
            shape = getattr(parameter, "ds_shape", parameter.shape)
            for name in MOMENTS:
                moment = state["state"][number][name]
                if moment.shape != shape:
                    raise ValueError("its moments have the sizes of another head")
                self._set_moment(parameter, name, moment.to(self._device).flatten())

    def _set_moment(self, parameter: torch.nn.Parameter, name: str, whole: torch.Tensor) -> None:
        """Write this process's shard of a moment.

        Args:
            whole: the whole moment, flat.
        """
        deepspeed = _deepspeed()
        if self.stage < 3:
            deepspeed.utils.safe_set_full_optimizer_state(parameter, whole, name)
            return

        # The last shard may be longer than what is left of the moment; its end stays zero.
        shard = deepspeed.utils.safe_get_local_optimizer_state(parameter, name)
        size = shard.numel()
        first = torch.distributed.get_rank() * size
        part = whole[first : first + size]
        shard.zero_()
        shard.view(-1)[: part.numel()].copy_(part)

    def _link_moments(self) -> None:
        """At stages 1 and 2, let every weight find its moments.

        DeepSpeed does so after the first step of the first group, when the other groups have none yet.
        """
        if self.stage < 3:
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()


def _deepspeed() -> Any:
    """Import DeepSpeed. Raises UserError if it is not installed."""
    try:
        import deepspeed
    except ImportError:
        raise UserError(
            "accelerate was launched with --use_deepspeed, but deepspeed is not installed.",
            "Install it with pip install 'eagle_kit[deepspeed]', or launch with FSDP2.",
        ) from None
    return deepspeed
