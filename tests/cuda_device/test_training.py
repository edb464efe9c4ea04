"""A trainer's step on the device: hidden states, forward, backward by CUDA's autograd engine, update."""

from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_head, tiny_target

from benchmarks.waits import PackedRow
from eagle_kit.config.drafts.fused_states import Eagle3TrainingConfig
from eagle_kit.train.algorithm.batch import make_micro_batch, row_weights
from eagle_kit.train.algorithm.loss import Objective
from eagle_kit.train.algorithm.module import TTTModule
from eagle_kit.train.algorithm.target_features import capture_features
from eagle_kit.train.optim.strategy import Replicated
from tests.cuda_device.device import LogKind, Phase, phase
from tests.cuda_device.engines import SIZES

STEPS = 3
PARTS = ("rows", "capture", "forward", "backward", "update")
WAITS = {"rows": 0, "capture": 0, "forward": 0, "backward": 0, "update": 1}
"""How often the host waits for the device in each part: for the norm of the gradient."""


class Step:
    """A step over one packed row in bf16 autocast, in parts."""

    def __init__(self, loss: str, checkpointing: str) -> None:
        device = torch.device("cuda", 0)
        config = Eagle3TrainingConfig(
            ttt_length=STEPS, precision="bfloat16", loss=loss, gradient_checkpointing=checkpointing
        )
        self.config = config
        self.target = tiny_target(512, **SIZES).to(device, torch.bfloat16).requires_grad_(False)
        self.head = tiny_head(self.target, 101).to(device).requires_grad_(True)
        objective = Objective.of(config.losses, config.lk_eta, self.head, self.target.head_weight)
        rows = self.target.head_weight[self.head.token_map]
        module = TTTModule(self.head, self.target.embed_tokens.weight, rows, config, objective)
        launcher = SimpleNamespace(device=device, num_processes=1, process_index=0)
        self.strategy = Replicated(module, config, launcher)
        self.device = device

    def run(self) -> dict[str, Phase]:
        """Take a step -> what each part did."""
        found = {}
        with phase(LogKind.SYNCHRONISATION) as found["rows"]:
            batch = make_micro_batch(PackedRow(), [7], STEPS, self.device, "serving")
            plan = batch.plan
            weights = row_weights(
                batch, self.config.weights[:STEPS], "tokens", plan.counts, batch.num_documents
            )
        with phase(LogKind.SYNCHRONISATION) as found["capture"]:
            layers = self.head.config.aux_layer_ids
            features = capture_features(
                self.target, batch.ids, batch.doc_start, layers, plan.taught, plan.spans
            )
        with phase(LogKind.SYNCHRONISATION) as found["forward"]:
            out = self.strategy.forward(batch, features, features.hidden, weights, last=True)
        with phase(LogKind.SYNCHRONISATION) as found["backward"]:
            self.strategy.backward(out.loss, last=True)
        with phase(LogKind.SYNCHRONISATION) as found["update"]:
            self.strategy.update(1e-3, 1.0)
        return found


@pytest.mark.parametrize("checkpointing", ["off", "steps"])
@pytest.mark.parametrize("loss", ["ce", "kl", "tv", "lk-hybrid"])
def test_a_step_launches_in_every_part_and_waits_for_its_norm_only(loss, checkpointing):
    step = Step(loss, checkpointing)
    step.run()
    found = step.run()
    assert list(found) == list(PARTS)
    for name in PARTS:
        waits = [str(call) for call in found[name].of(LogKind.SYNCHRONISATION)]
        assert len(waits) <= WAITS[name], (name, waits)
        assert name == "rows" or found[name].launches > 10
        assert found[name].counts["modules_loaded"] == 0, f"{name} compiles again in the second step"
    gradients = [parameter.grad for parameter in step.head.parameters()]
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)


def test_recomputation_launches_more_in_the_backward_pass():
    launches = {}
    for checkpointing in ("off", "steps"):
        step = Step("ce", checkpointing)
        step.run()
        launches[checkpointing] = step.run()["backward"].launches
    assert launches["steps"] > launches["off"]
