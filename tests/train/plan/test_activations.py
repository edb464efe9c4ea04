"""The formula of activations against what autograd really saves and what is really alive at the peak."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from crossed import crossed
from live_bytes import LiveBytes
from tiny import randomise, tiny_target
from tiny_mixtures import v3

from eagle_kit.config.training import RowSampling
from eagle_kit.drafts.dflash.head import DFlashConfig, DFlashHead
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.mtp.head import MTPConfig, MTPHead
from eagle_kit.drafts.p_eagle.head import PEagleConfig, PEagleHead
from eagle_kit.models.config import TargetConfig
from eagle_kit.objective.loss import LOSS_BLOCK, TTTBatch
from eagle_kit.objective.row_drop import RowDrop
from eagle_kit.objective.row_plan import make_row_plan
from eagle_kit.objective.target_features import TargetFeatures
from eagle_kit.objective.ttt import run_steps, ttt_forward_backward
from eagle_kit.ops.backend import triton_available, use
from eagle_kit.train.plan.activations import Numerics, saved_bytes, training_bytes

LLAMA = {"hidden_size": 160, "num_heads": 5, "num_kv_heads": 1, "head_dim": 30, "intermediate_size": 448}
KINDS = ("llama", "latent", "llama for latent", "mtp", "three mtp", "p-eagle", "dflash")


def make_head(kind):
    llama = tiny_target(vocab_size=901, **LLAMA).config
    raw = v3(hidden_size=64, vocab_size=701).to_dict()
    deepseek = TargetConfig.from_dict({**raw, "architectures": ["DeepseekV3ForCausalLM"]})
    if kind == "p-eagle":
        return PEagleHead(PEagleConfig.for_target(llama, 601, num_layers=3))
    if kind == "dflash":
        config = DFlashConfig.for_target(llama, num_layers=2, block_size=4, aux_layer_ids=(0, 1, 2))
        return DFlashHead(config)
    if kind == "llama":
        return Eagle3Head(Eagle3Config.for_target(llama, 601))
    if "mtp" in kind:
        return randomise(MTPHead(MTPConfig(deepseek, 3 if kind == "three mtp" else 1)), 0, 0.2)
    return Eagle3Head(Eagle3Config.for_target(deepseek, 301, latent=kind == "latent"))


class Row:
    """A document of which the first quarter is a prompt, and random states of a target."""

    def __init__(self, head, tokens, steps, dtype):
        config, generator = head.config, torch.Generator().manual_seed(0)
        self.head, self.dtype = head, dtype
        self.ids = torch.randint(0, 100, (tokens,), generator=generator)
        response = torch.zeros(tokens, dtype=torch.int64)
        response[: tokens // 4] = -1
        drop = ()
        if config.block_rows(steps):  # anchors have gaps between them
            every = RowDrop(RowSampling(most=tokens // 8), seed=0, step=0)
            drop = every.sampling.shares(steps), every.uniforms([0], [tokens]), every.sampling.most
        self.plan = make_row_plan(response, torch.zeros_like(response), steps, "serving", *drop)

        def random(rows, size):
            return torch.randn(rows, size, generator=generator).to(dtype)

        size = config.hidden_size
        choice = torch.zeros(tokens, dtype=torch.int64)
        self.features = TargetFeatures(random(tokens, len(head.capture) * size), random(tokens, size), choice)
        self.embeds = random(config.vocab_size, size)
        self.target_rows = random(config.draft_vocab_size, size)

    def autocast(self):
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def batch(self, weights):
        return TTTBatch(self.ids, self.plan, weights, self.features, self.embeds, self.target_rows)

    def saved(self):
        """Bytes of all storages saved by the head's steps, but those of weights, their casts and inputs."""
        parameters = list(self.head.parameters())
        inputs = (*parameters, *self.head.buffers(), *self.features, self.embeds, self.ids)
        given = {x.untyped_storage().data_ptr() for x in inputs}
        shapes = {tuple(p.shape) for p in parameters} | {tuple(p.shape)[::-1] for p in parameters}
        found = {}

        def pack(x):
            is_cast = self.dtype == torch.bfloat16 and tuple(x.shape) in shapes
            if x.untyped_storage().data_ptr() not in given and not is_cast:
                found[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), self.autocast():
            outputs = run_steps(self.head, self.batch([]))
        assert outputs
        return sum(x.untyped_storage().nbytes() for x in found.values())

    def peak(self):
        """Most bytes alive at once in a forward and backward, beyond what was there before."""
        for parameter in self.head.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if not self.head.config.owns_output:
            output = torch.nn.Linear(*self.target_rows.shape[::-1], bias=False, dtype=self.dtype)
            self.head.bind(output.requires_grad_(False))
        weights = [torch.full((count,), 1 / count) for count in self.plan.counts]
        for plan in self.plan.attention:
            assert plan.blocks  # masks of a CPU's attention belong to the plan and are made before
        with LiveBytes() as live, self.autocast():
            result = ttt_forward_backward(self.head, self.batch(weights))
        assert result.loss > 0
        return live.peak


def kinds_and_numerics():
    """Every kind in fp32; in half precision three that differ most, the others are nightly."""
    cases = []
    for kind, numerics in product(KINDS, ("fp32", "bf16", "bf16 in Triton")):
        is_slow = numerics != "fp32" and kind not in ("llama", "mtp", "dflash")
        cases.append(pytest.param(kind, numerics, marks=[pytest.mark.nightly] * is_slow))
    return cases


@pytest.mark.parametrize(("kind", "numerics"), kinds_and_numerics())
def test_saved_tensors_are_those_of_the_formula(kind: str, numerics: str) -> None:
    half, triton = "bf16" in numerics, "Triton" in numerics
    if triton and (torch.cuda.is_available() or not triton_available()):
        pytest.skip("needs Triton's interpreter")
    if triton:
        from kernel_lab.interpreter import repair

        repair()  # else gates see what the interpreter makes of bf16, and send tokens elsewhere
    # Of few tokens many are alone with their expert, and on a CPU such a row is doubled.
    tokens, steps = (101, 2) if triton else (203, 3)
    row = Row(make_head(kind), tokens, steps, torch.bfloat16 if half else torch.float32)
    with use("triton") if triton else nullcontext():
        saved = row.saved()
    expected = saved_bytes(
        row.head.config, tokens, row.plan.counts[0], steps, Numerics(2 if half else 4, triton)
    )
    assert expected == pytest.approx(saved, rel=0.15)


@crossed(
    ("kind", ["llama", "latent", "mtp", "dflash"]),
    (
        "dtype, tokens, steps",
        [
            (torch.float32, 760, 4),
            (torch.float32, 240, 3),
            (torch.bfloat16, 240, 3),
            (torch.bfloat16, 760, 4),
        ],
    ),
)
def test_peak_of_a_forward_and_backward_is_that_of_the_formula(
    kind: str, dtype: torch.dtype, tokens: int, steps: int
) -> None:
    row = Row(make_head(kind), tokens, steps, dtype)
    numerics = Numerics(dtype.itemsize, is_gpu=False)
    expected = sum(training_bytes(row.head.config, tokens, row.plan.counts[0], steps, LOSS_BLOCK, numerics))
    if numerics.operand == 2:  # casts of the weights, counted elsewhere
        expected += 2 * sum(parameter.numel() for parameter in row.head.parameters())
    assert expected == pytest.approx(row.peak(), rel=0.15)
