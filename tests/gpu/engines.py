"""Engines of small models on the device, and what they say."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from tiny import tiny_head, tiny_target
from tiny_trained import trained_models
from uncaptured import UncapturedGraphs

from eagle_kit.config.engine import GraphMode
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import ShapeTable
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.runner import Runner
from tests.gpu.place import DEVICE, ON_GPU, pick

PROMPTS = [[5, 6, 7], [9, 10, 1, 2, 3], [8], [3, 4, 3, 4, 3, 4], list(range(11)) * pick(40, 2)]
"""Of a vocabulary of 11; the last one is longer than some pages."""
SIZES = pick(
    {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64, "intermediate_size": 3072},
    {},
)


@cache
def _trained() -> tuple[Any, Any]:
    return trained_models()


def trained(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A target of 11 tokens and a head that guesses well, trained in seconds on the host."""
    target, head = (_on_device(model, dtype) for model in _trained())
    target.config = replace(target.config, max_position_embeddings=4096)
    return target, head


def random_models(dtype: torch.dtype = torch.float32, vocab: int = pick(4096, 64)) -> tuple[Any, Any]:
    """Of a usual head size and vocabulary; the head guesses badly."""
    target = tiny_target(vocab, std=0.05, max_position_embeddings=4096, **SIZES)
    head = tiny_head(target, vocab // 2, std=0.05)
    return _on_device(target, dtype), _on_device(head, dtype)


def _on_device(model: Any, dtype: torch.dtype) -> Any:
    return copy.deepcopy(model).to(DEVICE, dtype)


def make(models: tuple[Any, Any], mode: GraphMode = "off", **options: Any) -> LLM:
    """An LLM on the device; a rehearsal replays its graphs eagerly."""
    sizes = {"max_batch_size": 4, "max_context": pick(2300, 100), "batch_sizes": (1, 2, 4), "lag": 1}
    target, draft = models
    llm = LLM(target, draft, **{**sizes, **options}, graph_mode=mode if ON_GPU else "off")
    if mode != "off" and not ON_GPU:
        llm.engine().runner.graphs = UncapturedGraphs(mode)
    return llm


def responses(
    llm: LLM,
    shape: str | None = None,
    tokens: int = pick(96, 8),
    match: Any = None,
    prompts: list[list[int]] = PROMPTS,
    **sampling: Any,
) -> list[list[int]]:
    """Of the prompts, held to the grammar ``match``; the pool is checked after every step."""
    engine = llm.engine(None if shape is None else ShapeTable.parse(shape))
    requests = [
        llm.make_request(p, SamplingParams(max_tokens=tokens + i % 3, ignore_eos=True, **sampling))
        for i, p in enumerate(prompts)
    ]
    for request in requests:
        request.response.match = match
        engine.add_request(request)
    while engine.has_work:
        engine.step()
        engine.check()
    return [request.token_ids for request in requests]


def runner_of(llm: LLM) -> Runner:
    """The device's side of its engine, whose shapes stay as they are."""
    assert llm._engine is not None
    return llm._engine.runner


def stores(llm: LLM) -> list[torch.Tensor]:
    """Keys and values of target and draft."""
    runner = runner_of(llm)
    kept = [runner.kv] + ([] if runner.drafter is None else [runner.drafter.kv])
    return [part for kv in kept for part in (kv.k, kv.v)]


def accept_length(llm: LLM) -> float:
    """Tokens a verify, bonus included, since the engine was made."""
    assert llm._engine is not None
    return llm._engine.totals.spec.accept_length
