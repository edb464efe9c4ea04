"""A trainer's forward on fake CUDA tensors, states of the target in bf16 and fp32, and one update.

The backward pass of CUDA tensors needs a driver, `tests/train/run/test_host_waits.py` has it; so does
autocast, which torch turns off here.
"""

from types import SimpleNamespace

import pytest
import torch
from fake_cuda import COPIES, CUDA, Copies, Device, fake_gpu, to_gpu
from tiny import packed_row, tiny_head, tiny_hybrid, tiny_target
from tiny_mixtures import DEEPSEEK, MIXTURES, untrained

from eagle_kit.config.drafts.fused_states import Eagle3TrainingConfig
from eagle_kit.kernels.packed_attention import document_spans
from eagle_kit.kernels.ttt_attention import plan_rows
from eagle_kit.train.algorithm.batch import MicroBatch, row_weights
from eagle_kit.train.algorithm.loss import LOSS_BLOCK_ON_GPU, Objective
from eagle_kit.train.algorithm.module import TTTModule
from eagle_kit.train.algorithm.row_plan import LossBlock, RowPlan, plan_row
from eagle_kit.train.algorithm.target_features import TargetFeatures, positions_of, vocab_argmax
from eagle_kit.train.optim.strategy import Replicated

STEPS = 3
WAITS = frozenset({"eagle_kit.train.optim.strategy.Replicated.update"})
"""Where a step may read the device: this list only shrinks."""


def moved(tensor):
    return torch.empty_like(tensor, device=CUDA)


class Planned(RowPlan):
    """A plan whose loss blocks were found before tensors were fake: they depend on numbers of the host."""

    found: list[LossBlock]

    def blocks(self, size):
        return [LossBlock(block.pieces, *map(moved, block[1:])) for block in self.found]


def on_gpu(plan, found, length):
    doc_start, computed = moved(plan.doc_start), [moved(rows) for rows in plan.computed]
    attention = [plan_rows(rows, doc_start) for rows in computed]
    rows, kept = [moved(part) for part in plan.rows], [moved(part) for part in plan.kept]
    made = Planned(rows, computed, kept, attention, plan.needed, doc_start, plan.shares, plan)
    vars(made).update(found=found, length=length)
    return made


@pytest.mark.parametrize("loss", ["ce", "kl", "tv", "lk-hybrid"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_step_waits_where_it_is_listed_only(precision, loss):
    target = tiny_target()
    head = tiny_head(target, 101).requires_grad_(True)
    ids, reply, doc_start = packed_row()
    plan = plan_row(reply, doc_start, STEPS)
    found, length = plan.blocks(LOSS_BLOCK_ON_GPU), plan.length
    training = Eagle3TrainingConfig(precision=precision, ttt_length=STEPS, loss=loss)
    dtype = getattr(torch, precision)
    with fake_gpu():
        to_gpu(target, dtype), to_gpu(head, torch.float32)
        group, packed = torch.zeros_like(ids), on_gpu(plan, found, length)
        batch = MicroBatch(
            [0], [len(ids)], moved(ids), moved(doc_start), packed, moved(group), [plan.counts[0]]
        )
        rows = target.head_weight[head.target_ids]
        objective = Objective.of(training.losses, training.lk_eta, head, target.head_weight)
        module = TTTModule(head, target.embed_tokens.weight, rows, training, objective)
        strategy = Replicated(
            module, training, SimpleNamespace(num_processes=1, process_index=0, device=CUDA)
        )
        hidden = target.config.hidden_size
        aux = torch.empty(len(ids), 3 * hidden, dtype=dtype, device=CUDA)
        final = torch.empty(len(ids), hidden, dtype=dtype, device=CUDA)
        argmax = torch.empty(len(ids), dtype=torch.int64, device=CUDA)
        with Copies(COPIES | WAITS, WAITS) as guard:
            weights = row_weights(batch, training.weights[:STEPS], "tokens", plan.counts, 3)
            out = strategy.forward(batch, TargetFeatures(aux, final, argmax), final, weights, last=True)
            assert guard.used <= COPIES, "a forward waits for nothing"
            strategy.update(1e-3, 1.0)
    assert out.loss.is_cuda and out.sums.is_cuda and out.loss.requires_grad
    assert guard.used >= WAITS, "what no longer waits leaves the list"


@pytest.mark.parametrize(
    "make",
    [
        tiny_target,
        tiny_hybrid,
        lambda: untrained(DEEPSEEK["v3: YaRN"]),
        lambda: untrained(MIXTURES["mixtral"]),
    ],
    ids=["llama", "hybrid", "latents", "experts"],
)
def test_states_are_captured_without_a_wait(make):
    target = make()
    ids, _, doc_start = packed_row()
    spans = document_spans(doc_start)
    with fake_gpu(), torch.no_grad():
        to_gpu(target)
        ids, doc_start = moved(ids), moved(doc_start)
        with Copies():
            attend = target.packed(spans)
            out = target(ids, positions_of(doc_start), attend, (1, 2, 4))
        with Device():
            best = vocab_argmax(out.hidden, target.head_weight)
    assert out.aux.shape == (len(ids), 3 * target.config.hidden_size) and best.is_cuda
