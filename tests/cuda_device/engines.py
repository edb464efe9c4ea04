"""Engines of small models on the device, and made-up results for them, since no kernel computes any."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from tiny import tiny_head, tiny_target

from eagle_kit.distributed.collectives import Ranks
from eagle_kit.engine.graphs.cuda_graph import HostCopy, leaves
from eagle_kit.engine.llm import LLM
from eagle_kit.models.targets.target import Target

SIZES = {
    "hidden_size": 128,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 64,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
}
"""Sizes that all Triton kernels take."""


def small_llm(
    shape: str = "3,2,6",
    changes: Mapping[str, int] | None = None,
    target: Target | None = None,
    **options: Any,
) -> LLM:
    """An engine of a small target with an EAGLE-3 head or n-grams, at lag 1.

    Args:
        changes: sizes of a Llama in bf16, in place of those of ``SIZES``.
        target: another target, on the device.
        options: of ``LLM``.
    """
    if target is None:
        target = tiny_target(512, **{**SIZES, **(changes or {})}).to("cuda", torch.bfloat16)
    head = None
    if options.get("algorithm") != "NGRAM":
        head = tiny_head(target, target.config.vocab_size // 2).to("cuda", target.embed_tokens.weight.dtype)
    sizes = {"max_batch_size": 2, "max_context": 256, "batch_sizes": (1, 2), "kv_tokens": 2048, "lag": 1}
    return LLM(target, head, shape=shape, **{**sizes, **options})


@contextmanager
def made_up_results(seed: int = 0) -> Iterator[None]:
    """Within, results of cycles and prompts are finite, of random tokens and accepted lengths.

    Without them results are whatever bytes the device's memory holds.
    """
    rng = random.Random(seed)
    wait = HostCopy.wait

    @torch.inference_mode()
    def answered(self: HostCopy, ranks: Ranks | None = None) -> Any:
        emitted = wait(self, ranks)
        emitted.is_finite.fill_(True)
        most = emitted.tokens.shape[1]
        for row in range(len(emitted.num_emitted)):
            emitted.num_emitted[row] = rng.randint(1, most)
            emitted.tokens[row] = torch.tensor([rng.randrange(500) for _ in range(most)])
        for numbers in leaves((emitted.logprobs, emitted.confidence)):
            numbers.zero_()
        return emitted

    with mock.patch.object(HostCopy, "wait", answered):
        yield


@contextmanager
def fixed_results() -> Iterator[None]:
    """Within, request i of a batch gets the first 1 + i mod (S + 1) of S + 1 tokens in every cycle.

    This takes the host some microseconds, where :func:`made_up_results` takes some for every request.
    """
    made: dict[torch.Size, tuple[torch.Tensor, torch.Tensor]] = {}
    wait = HostCopy.wait

    @torch.inference_mode()
    def answered(self: HostCopy, ranks: Ranks | None = None) -> Any:
        emitted = wait(self, ranks)
        shape = emitted.tokens.shape
        if shape not in made:
            ids = torch.arange(shape.numel()).view(shape) % 500
            made[shape] = (ids, 1 + torch.arange(shape[0]) % shape[1])
        tokens, counts = made[shape]
        emitted.is_finite.fill_(True)
        emitted.tokens.copy_(tokens)
        emitted.num_emitted.copy_(counts)
        return emitted

    with mock.patch.object(HostCopy, "wait", answered):
        yield
