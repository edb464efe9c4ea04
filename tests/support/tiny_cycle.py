"""Cycles of tiny engines to be traced: shapes, kinds of sampling and policies, and the engines for them."""

import torch
from tiny import tiny_head
from tiny_engine import resolved

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.drafts.eagle1.static_tree import StaticDrafter
from eagle_kit.engine.cycle import CycleSettings
from eagle_kit.engine.engine import Engine
from eagle_kit.ops.sampling import SamplingBatch, make_sampling_batch

BATCH, NUM_LOGPROBS = 3, 3
SAMPLING_PARAMS = {
    "greedy": None,
    "sampled": SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01),
    "penalised": SamplingParams(temperature=1.0, repetition_penalty=1.2, logit_bias={3: 1.0}),
}
POLICIES = {
    "block": ("4,1,5", {"sampled_drafts": True}),
    "rejection": ("4,1,5", {"sampled_drafts": True, "verifier": "rejection"}),
    "static": (str(StaticDrafter.topology.shape), {"tree": "static"}),
    "static sampled": (str(StaticDrafter.topology.shape), {"tree": "static", "sampled_drafts": True}),
    "relaxed": ("5,4,16", {"accept_threshold_single": 0.5, "accept_threshold_acc": 0.9}),
}


def cycle_engine(target, draft: HeadDraftModel, shape: str, **options) -> Engine:
    """An engine of ``BATCH`` requests that speculates in ``shape``."""
    engine = Engine(target, draft, resolved(BATCH, 128, kv_tokens=600, **options))
    engine.use_shape(SpecShape.parse(shape))
    return engine


def head_draft(target, make_head=tiny_head) -> HeadDraftModel:
    """A random head for ``target``, by default EAGLE-3's."""
    return HeadDraftModel(make_head(target), target)


def cycle_settings(engine: Engine, shape: str) -> CycleSettings:
    """Settings of a cycle that reports log-probabilities."""
    parsed = SpecShape.parse(shape)
    verifier = engine.runner.verifier(parsed)
    return CycleSettings(parsed, 192, num_logprobs=NUM_LOGPROBS, verifier=verifier)


def sampling_batch(sampling: str, vocab_size: int, device: torch.device) -> SamplingBatch | None:
    """Sampling parameters of the batch, tables included; None where it is greedy."""
    params = SAMPLING_PARAMS[sampling]
    if params is None:
        return None
    return make_sampling_batch([params] * BATCH, [[1, 2]] * BATCH, [7] * BATCH, vocab_size, device)
