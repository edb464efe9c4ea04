"""A trainer's step on the device: hidden states, forward, backward by CUDA's autograd engine, update."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from tiny import packed_row, tiny_head, tiny_target
from tiny_row import TinyRow

from eagle_kit.config.drafts.fused_states import Eagle3TrainingConfig
from eagle_kit.config.train import DataConfig, TrainConfig
from eagle_kit.objective.batch import make_micro_batch, row_weights
from eagle_kit.objective.loss import Objective
from eagle_kit.objective.target_features import capture_features, positions_of, vocab_argmax
from eagle_kit.objective.ttt_module import TTTModule
from eagle_kit.ops.attention.packed import document_spans
from eagle_kit.ops.device_memory import reserve_segment, reserved_again
from eagle_kit.train.optim.strategy import Replicated
from eagle_kit.train.parallel.processes import make_process_state
from tests.cuda_device.device import LogKind, Phase, phase
from tests.cuda_device.engines import SIZES
from tests.cuda_device.targets import TARGETS

STEPS = 3
PARTS = ("rows", "capture", "forward", "backward", "figures", "update")
WAITS = {"rows": 0, "capture": 0, "forward": 0, "backward": 0, "figures": 1, "update": 1}
"""How often the host waits for the device in each part: for the figures of a step, and for the norm of the
gradient."""


class Step:
    """A step over one packed sequence in bf16 autocast, in parts.

    Args:
        loss, checkpointing, normalisation: of the settings of a run.
        rule: of positions that have a teacher.
    """

    def __init__(
        self, loss: str, checkpointing: str = "off", normalisation: str = "tokens", rule: str = "serving"
    ) -> None:
        device = torch.device("cuda", 0)
        config = Eagle3TrainingConfig(
            ttt_length=STEPS,
            precision="bfloat16",
            loss=loss,
            gradient_checkpointing=checkpointing,
            loss_normalisation=normalisation,
        )
        self.config = config
        self.rule = rule
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
        config = self.config
        found = {}
        with phase(LogKind.SYNCHRONISATION) as found["rows"]:
            batch = make_micro_batch(TinyRow(), [7], STEPS, self.device, self.rule)
            plan = batch.plan
            weights = row_weights(
                batch, config.weights[:STEPS], config.loss_normalisation, plan.counts, batch.num_documents
            )
        with phase(LogKind.SYNCHRONISATION) as found["capture"]:
            layers = self.head.config.aux_layer_ids
            features = capture_features(
                self.target, batch.ids, batch.doc_start, layers, plan.teacher_positions, plan.spans
            )
        with phase(LogKind.SYNCHRONISATION) as found["forward"]:
            out = self.strategy.forward(batch, features, features.hidden, weights, last=True)
        with phase(LogKind.SYNCHRONISATION) as found["backward"]:
            self.strategy.backward(out.loss, last=True)
        with phase(LogKind.SYNCHRONISATION) as found["figures"]:
            torch.cat((out.loss.detach().double()[None], out.figures)).cpu()
        with phase(LogKind.SYNCHRONISATION) as found["update"]:
            self.strategy.update(1e-3, 1.0)
        return found


def check_waits(found: dict[str, Phase]) -> None:
    """Check that no part waits more often than it may, and print the table."""
    assert list(found) == list(PARTS)
    print(f"\n{'part of a step':16}{'waits':>7}{'allowed':>9}")
    for name in PARTS:
        waits = [str(call) for call in found[name].of(LogKind.SYNCHRONISATION)]
        print(f"{name:16}{len(waits):7}{WAITS[name]:9}")
        assert len(waits) <= WAITS[name], (name, waits)


@pytest.mark.parametrize("checkpointing", ["off", "steps"])
@pytest.mark.parametrize("loss", [pytest.param("ce", marks=pytest.mark.smoke), "kl", "tv", "lk-hybrid"])
def test_a_step_launches_in_every_part_and_waits_for_figures_and_norm_only(loss, checkpointing):
    step = Step(loss, checkpointing)
    step.run()
    found = step.run()
    check_waits(found)
    for name in PARTS:
        assert name in ("rows", "figures") or found[name].launches > 10
        assert found[name].counts["modules_loaded"] == 0, f"{name} compiles again in the second step"
    gradients = [parameter.grad for parameter in step.head.parameters()]
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)


def test_other_weights_and_rows_wait_no_more_often():
    step = Step("tv", normalisation="sequence", rule="published")
    step.run()
    check_waits(step.run())


def test_recomputation_launches_more_in_the_backward_pass():
    launches = {}
    for checkpointing in ("off", "steps"):
        step = Step("ce", checkpointing)
        step.run()
        launches[checkpointing] = step.run()["backward"].launches
    assert launches["steps"] > launches["off"]


@pytest.mark.parametrize("name", TARGETS)
def test_states_of_every_kind_of_target_are_captured_without_a_wait(name):
    device = torch.device("cuda", 0)
    target = TARGETS[name]().to(device, torch.bfloat16)
    ids, _, doc_start = packed_row()
    spans = document_spans(doc_start)
    ids = ids.to(device)
    doc_start = doc_start.to(device)
    with torch.no_grad(), phase(LogKind.SYNCHRONISATION) as found:
        attend = target.packed(spans)
        out = target(ids, positions_of(doc_start), attend, (1, 2, 4))
        best = vocab_argmax(out.hidden, target.head_weight)
    assert found.counts["synchronisations"] == 0, [str(call) for call in found.calls]
    assert out.aux_hidden_states.shape == (len(ids), 3 * target.config.hidden_size) and best.is_cuda


@pytest.mark.parametrize("is_in_use", [False, True], ids=["free", "partly in use"])
def test_what_a_validation_gives_back_is_reserved_again(is_in_use):
    """A segment of which a part is in use stays, and no second one is taken beside it."""
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    reserve_segment(device, 256 << 20)
    moments = [torch.empty(32 << 20, dtype=torch.uint8, device=device)] if is_in_use else []
    before = torch.cuda.memory_reserved()

    with reserved_again(device):
        torch.cuda.empty_cache()
        for size in (96 << 20, 300 << 20):
            torch.empty(size, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_reserved() == before
    with phase() as found:
        torch.empty(200 << 20, dtype=torch.uint8, device=device)
    assert found.counts["device_allocations"] == 0
    del moments


def test_a_run_adds_up_products_in_fp32_from_its_start():
    """As the engine of a validation does, which would else change the products of the steps behind it."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True
    PartialState._reset_state()
    try:
        state = make_process_state(TrainConfig(target="t", output_dir="o", data=DataConfig(source="a")))
        assert state.device.type == "cuda"
    finally:
        PartialState._reset_state()
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction
