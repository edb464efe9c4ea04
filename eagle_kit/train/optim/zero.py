"""DeepSpeed's ZeRO, stages 1 to 3 (arXiv 1910.02054): shards of moments, of gradients too, or of weights too.

Weights and moments are fp32; a run in bfloat16 casts inside the module, as elsewhere.
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


class Zero(Strategy):
    """A DeepSpeed engine around the module.

    Args:
        stage: 1, 2 or 3.
        more: settings of the launch, of :func:`~eagle_kit.train.parallel.launch.deepspeed_config`.
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
        deepspeed = _deepspeed()
        if accelerator.device.type == "cpu":  # its collectives over shared memory would be compiled first
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        super().__init__(module, accelerator.num_processes)
        self.stage, self._device = stage, accelerator.device
        self._bound = module.head.bound
        optimizer = make_optimizer(self.head, training)
        self._layout = optimizer.state_dict()["param_groups"]
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if stage == 3:  # gathered as one unit: its forward reads weights of all of it
            deepspeed.utils.set_z3_leaf_modules(module, [TTTModule])
        share = training.sequences_per_step // self.num_processes
        micro_batches = training.gradient_accumulation or share
        zero = {key: value for key, value in more.get("zero_optimization", {}).items() if value != "auto"}
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config={
                **more,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": micro_batches,
                "gradient_clipping": training.clip_norm or 0.0,
                "zero_optimization": {"overlap_comm": False, **zero, "stage": stage},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,  # offloaded moments are torch's AdamW's too
            },
            dist_init_required=False,
        )
        self.module = self.engine
        self.optimizer = self.engine.optimizer
        self.optimizer.check_grad_overflow = True  # stage 2 looks in half precision only; stage 3 always does

    def _prepare(self, inputs: TargetFeatures, last: bool) -> None:
        """Stage 3 frees weights and gradients when the gradients of the module's inputs are there; without
        any it would do so before they were made."""
        if self.stage == 3:
            inputs.aux_hidden_states.requires_grad_()
            inputs.hidden.requires_grad_()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """See :meth:`Strategy.backward`."""
        self.engine.backward(loss * self.num_processes, scale_wrt_gas=False)
        if not last:
            self.engine.step()  # counts the forward; the weights stay

    def update(self, learning_rate: float, clip_norm: float | None) -> float:
        """See :meth:`Strategy.update`."""
        set_learning_rate(self.optimizer, learning_rate)
        self.engine.step()
        return math.nan if self.optimizer.overflow else float(self.engine.get_global_grad_norm())

    def whole_head(self) -> DraftHead:
        """The head itself at stage 2, a copy at stage 3."""
        if self.stage < 3:
            return self.head
        deepspeed = _deepspeed()
        with deepspeed.zero.GatheredParameters(list(self.head.parameters())):
            state = {name: tensor.detach().clone() for name, tensor in self.head.state_dict().items()}
        return copy_head(self.head, state, self._device, self._bound)

    def optimizer_state(self) -> dict[str, Any]:
        """Gathered."""
        deepspeed = _deepspeed()
        inner = self.optimizer.optimizer.state
        steps = [mine["step"] for mine in inner.values() if "step" in mine]
        groups = [
            {**group, "lr": now["lr"]}
            for group, now in zip(self._layout, self.optimizer.param_groups, strict=True)
        ]
        if not steps:
            return {"state": {}, "param_groups": groups}
        self._link()
        state = {}
        for number, parameter in enumerate(self._parameters):
            whole = {
                name: deepspeed.utils.safe_get_full_optimizer_state(parameter, name).detach().cpu().clone()
                for name in MOMENTS
            }
            state[number] = {"step": steps[0].detach().cpu().clone(), **whole}
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Keeps this process's part."""
        deepspeed = _deepspeed()
        if [group["params"] for group in state["param_groups"]] != [g["params"] for g in self._layout]:
            raise ValueError("it has other groups of weights")
        if not state["state"]:
            return
        inner = self.optimizer.optimizer
        parts = (
            self.optimizer.fp32_partitioned_groups_flat
            if self.stage == 3
            else self.optimizer.single_partition_of_fp32_groups
        )
        for part in parts:  # what AdamW would make in its first step
            step = torch.zeros((), dtype=torch.float32, device=part.device)
            inner.state[part] = {"step": step, **{name: torch.zeros_like(part) for name in MOMENTS}}
            step.copy_(state["state"][0]["step"])
        self._link()
        for number, parameter in enumerate(self._parameters):
            shape = getattr(parameter, "ds_shape", parameter.shape)
            for name in MOMENTS:
                value = state["state"][number][name]
                if value.shape != shape:
                    raise ValueError("its moments have the sizes of another head")
                value = value.to(self._device).flatten()
                if self.stage < 3:
                    deepspeed.utils.safe_set_full_optimizer_state(parameter, value, name)
                else:
                    mine = deepspeed.utils.safe_get_local_optimizer_state(parameter, name)
                    size, rank = mine.numel(), torch.distributed.get_rank()
                    part = value[rank * size : (rank + 1) * size]
                    mine.zero_()
                    mine.view(-1)[: part.numel()].copy_(part)

    def _link(self) -> None:
        """Let every weight find its moments. DeepSpeed does so after the first group's first step, when the
        other groups have none yet."""
        if self.stage < 3:
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()


def _deepspeed() -> Any:
    try:
        import deepspeed
    except ImportError:
        raise UserError(
            "accelerate was launched with --use_deepspeed, but deepspeed is not installed.",
            "Install it with pip install 'eagle_kit[deepspeed]', or launch with FSDP2.",
        ) from None
    return deepspeed
