"""Samples of an engine's responses to be compared: pairs of later tokens of many short ones."""

import torch
from restless import Restless
from tiny_engine import make_engine, serve

from eagle_kit.autotune.policy import ShapePolicy
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.engine.request import Request


def pair_counts(models, count, **engine_options) -> torch.Tensor:
    """How often each pair of first tokens is sampled, ``[11, 11]``."""
    shape = engine_options.pop("shape")
    shape = shape if isinstance(shape, ShapePolicy) else SpecShape.parse(shape)
    options = {
        "max_context": 24, "kv_tokens": 40_000, "page_size": 4, "mixed_prefill_tokens": 512, **engine_options
    }  # fmt: skip
    batch = options.pop("batch", 1000)
    engine = make_engine(models, batch=batch, **options)
    engine.use_shape(shape)
    params = SamplingParams(max_tokens=4, temperature=1.1, top_k=6)
    requests = [Request(i, [1, 2, 3], params) for i in range(count)]
    serve(engine, requests)
    if isinstance(shape, Restless):
        assert shape.used == set(shape.shapes)
    elif isinstance(shape, SpecShape) and shape.steps:
        assert engine.totals.spec.accept_length > 1.3
    pairs = torch.tensor([r.token_ids[1] * 11 + r.token_ids[3] for r in requests])
    return torch.bincount(pairs, minlength=121).double()


def chi_square(one: torch.Tensor, other: torch.Tensor) -> tuple[float, int]:
    """Chi-square of the difference of two samples of one size, and its degrees of freedom. Rare values count
    together."""
    rare = one + other <= 20
    one, other = (torch.cat((counts[~rare], counts[rare].sum()[None])) for counts in (one, other))
    return float(((one - other) ** 2 / (one + other).clamp(min=1)).sum()), len(one) - 1
