"""Sampling parameters of a batch as device tensors, made when a batch begins.

Legend: B requests, V vocabulary.
"""

from collections.abc import Sequence

import torch

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.kernels.sampling import SamplingBatch, make_sampling_batch
from eagle_kit.serve.request import Request


class SamplingTables:
    """Sampling parameters of the requests of a runner.

    Args:
        vocab_size: V of the target.
        device: of the tensors.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device

    def of_cycle(
        self, requests: Sequence[Request], padding: int, has_fixed_shapes: bool
    ) -> SamplingBatch | None:
        """Parameters of a batch without tables of the vocabulary, which are the slots'; None when all
        requests are plainly greedy.

        Args:
            padding: dummy requests behind them.
            has_fixed_shapes: set all filters when one is set, so that few kinds of batches are captured.
        """
        params = [request.params for request in requests] + [SamplingParams()] * padding
        if all(map(_is_plain, params)):
            return None
        seeds = [request.seed for request in requests] + [0] * padding
        return self._without_tables(params, seeds, has_fixed_shapes)

    def of_requests(self, requests: Sequence[Request]) -> SamplingBatch | None:
        """Parameters of requests with empty replies, tables included; None when all are plainly greedy."""
        params = [request.params for request in requests]
        if all(map(_is_plain, params)):
            return None
        prompts, seeds = [request.prompt_ids for request in requests], [request.seed for request in requests]
        return make_sampling_batch(params, prompts, seeds, self.vocab_size, self.device)

    def of_params(self, params: SamplingParams, size: int) -> SamplingBatch:
        """Parameters of ``size`` equal requests, as :meth:`of_cycle` gives them where shapes are fixed."""
        return self._without_tables([params] * size, [0] * size, True)

    def _without_tables(
        self, params: Sequence[SamplingParams], seeds: Sequence[int], has_fixed_shapes: bool
    ) -> SamplingBatch:
        """Parameters without tables, with all penalties where logits are adjusted in any way, and with all
        filters where that is so or there is one; what was missing changes nothing."""
        made = make_sampling_batch(
            params, [[]] * len(params), seeds, self.vocab_size, self.device, with_tables=False
        )
        ones, neutral = torch.ones_like(made.temperature), {}
        adjusts = any(map(adjusts_logits, params))
        if adjusts:
            neutral = {"repetition": ones, "frequency": 0 * ones, "presence": 0 * ones}
        filters = made.top_k, made.top_p, made.min_p
        if has_fixed_shapes and (adjusts or any(part is not None for part in filters)):
            top_k = torch.full_like(made.seeds, self.vocab_size)
            neutral |= {"top_k": top_k, "top_p": ones, "min_p": 0 * ones}
        return made._replace(
            **{name: value for name, value in neutral.items() if getattr(made, name) is None}
        )


def adjusts_logits(params: SamplingParams) -> bool:
    """Return True if penalties or biases change a request's logits before they are filtered."""
    return params.has_penalties or bool(params.logit_bias)


def is_adjusted(sampling: SamplingBatch | None) -> bool:
    """Return True for a batch of a cycle that takes tables of the vocabulary."""
    return sampling is not None and sampling.repetition is not None


def _is_plain(params: SamplingParams) -> bool:
    return params.is_greedy and not adjusts_logits(params)
