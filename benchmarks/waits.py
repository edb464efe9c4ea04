"""Waits of the host for a GPU in a trainer's step and in a prefill, counted without one: tiny models compute
real values by interpreted kernels (:mod:`kernel_lab.host_waits`), and what waits is counted by part.
"""

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.models import TINY, make_models
from eagle_kit.config.drafts.fused_states import Eagle3TrainingConfig
from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.backend import use
from eagle_kit.serve.request import Request
from eagle_kit.serve.runner import Runner
from eagle_kit.serve.scheduler import Chunk
from eagle_kit.speculation.propose.draft_model import HeadDraftModel
from eagle_kit.train.algorithm.batch import make_micro_batch, row_weights
from eagle_kit.train.algorithm.loss import Objective
from eagle_kit.train.algorithm.module import TTTModule
from eagle_kit.train.algorithm.target_features import capture_features
from eagle_kit.train.optim.strategy import Replicated
from kernel_lab.host_waits import THERE, PretendGPU

LENGTH = 15
TTT_LENGTH = 2
DRAFT_VOCAB_SIZE = 101
PROMPTS = (3, 6, 5)
SHAPE = SpecShape(1, 1, 2)
PAGES = 4
BUDGETS: Mapping[str, Mapping[str, int]] = {
    "trainer's step": {"rows": 0, "capture": 0, "forward": 0, "backward": 0, "figures": 1, "update": 1},
    "prefill": {"prompts": 0, "draft and verify": 0},
}
"""Most waits of each part: the figures of a step in one copy, and the gradient's norm."""


class PackedRow:
    """One packed row of three documents with a reply each, of two groups; token ids below 101."""

    groups = ("one", "other")

    def row(self, number: int) -> Any:
        """Row ``number``, from a generator of this seed."""
        generator = np.random.default_rng(number)
        doc_start, reply = np.zeros(LENGTH, np.int64), np.full(LENGTH, -1)
        group = (np.arange(LENGTH) >= 5).astype(np.int32)
        for which, (start, stop) in enumerate(((0, 5), (5, 10), (10, LENGTH))):
            doc_start[start:stop] = start
            reply[start + 2 : stop] = which
        ids = generator.integers(0, DRAFT_VOCAB_SIZE, LENGTH)
        return SimpleNamespace(ids=ids, reply=reply, doc_start=doc_start, group=group)


def models(gpu: PretendGPU) -> HeadDraftModel:
    """A tiny target and an EAGLE-3 head on ``gpu``."""
    target, draft = make_models(TINY, DRAFT_VOCAB_SIZE, torch.device("cpu"), torch.float32, 0)
    gpu.put(target)
    gpu.put(draft.head)
    return HeadDraftModel(draft.head, target)


def count_step(loss: str = "ce", normalisation: Any = "tokens", rule: str = "serving") -> PretendGPU:
    """Take a trainer's step over one packed row -> its waits.

    Args:
        loss, normalisation, rule: ``loss``, ``loss_normalisation`` and rule of positions of a run.
    """
    with PretendGPU() as gpu, use("triton"):
        draft = models(gpu)
        target, head = draft.target, draft.head.requires_grad_(True)
        config = Eagle3TrainingConfig(
            ttt_length=TTT_LENGTH, precision="float32", loss_normalisation=normalisation, loss=loss
        )
        objective = Objective.of(config.losses, config.lk_eta, head, target.head_weight)
        assert head.token_map is not None
        rows = target.head_weight[head.token_map]
        module = TTTModule(head, target.embed_tokens.weight, rows, config, objective)
        alone: Any = SimpleNamespace(device=THERE, num_processes=1, process_index=0)
        strategy = Replicated(module, config, alone)
        with gpu.phase("rows"):
            data: Any = PackedRow()
            batch = make_micro_batch(data, [7], TTT_LENGTH, THERE, rule)
            plan = batch.plan
            weights = row_weights(
                batch, config.weights[:TTT_LENGTH], normalisation, plan.counts, batch.num_documents
            )
        with gpu.phase("capture"):
            layers = head.config.aux_layer_ids
            features = capture_features(target, batch.ids, batch.doc_start, layers, plan.taught, plan.spans)
        with gpu.phase("forward"):
            out = strategy.forward(batch, features, features.hidden, weights, last=True)
        with gpu.phase("backward"):
            strategy.backward(out.loss, last=True)
        with gpu.phase("figures"):
            figures = torch.cat((out.loss.detach().double()[None], out.figures)).cpu()
        with gpu.phase("update"):
            norm = strategy.update(1e-3, 1.0)
    assert figures.isfinite().all() and norm > 0.0
    return gpu


def count_prefill() -> PretendGPU:
    """Compute a whole prompt, a chunk that goes on, and one behind other tokens that ends, then a cycle of
    the two whose prompts have ended -> their waits."""
    with PretendGPU() as gpu, use("triton"), torch.no_grad():
        draft = models(gpu)
        options = EngineConfig(max_batch_size=3, max_context=16, page_size=4, kv_tokens=64, graph_mode="off")
        runner = Runner(draft.target, draft, options.resolve(on_gpu=True))
        runner.use_shape([SHAPE])
        requests = []
        for i, length in enumerate(PROMPTS):
            prompt = [(7 * i + j) % 11 for j in range(length)]
            request = Request(i, prompt, SamplingParams(max_tokens=8))
            request.slot, request.allocation.pages = i, list(range(PAGES * i, PAGES * (i + 1)))
            requests.append(request)
        whole, part, last = requests
        with gpu.phase("prompts"):
            runner.set_pages(requests)
            runner.prefill([Chunk(last, 0, 2)])
            runner.prefill([Chunk(whole, 0, PROMPTS[0]), Chunk(part, 0, 5), Chunk(last, 2, PROMPTS[2])])
        with gpu.phase("draft and verify"):
            results = runner.decode([whole, last], SHAPE)
    assert results.copy.wait().num_emitted.min() >= 1
    return gpu


def counts() -> dict[str, PretendGPU]:
    """Waits of everything that has a budget."""
    return {"trainer's step": count_step(), "prefill": count_prefill()}


def main() -> int:
    """Print a JSON line for each part of what has a budget; 1 where one is exceeded."""
    is_within = True
    for what, gpu in counts().items():
        for part, budget in BUDGETS[what].items():
            print(json.dumps({"what": what, "part": part, "waits": gpu.phases[part], "budget": budget}))
            is_within &= gpu.phases[part] <= budget
    return 0 if is_within else 1


if __name__ == "__main__":
    raise SystemExit(main())
