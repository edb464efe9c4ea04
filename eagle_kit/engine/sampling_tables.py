"""Sampling parameters of a batch as device tensors, made when a batch begins.

Legend: B requests, V vocabulary.
"""

from collections.abc import Sequence

import torch

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.graphs.batch_kind import Level, level_of
from eagle_kit.engine.request import Request
from eagle_kit.ops.sampling import SamplingBatch, make_sampling_batch


class SamplingTables:
    """Sampling parameters of the requests of a runner.

    Args:
        vocab_size: V of the target.
        device: of the tensors.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device

    def of_cycle(
        self, requests: Sequence[Request], padding: int, level: Level | None = None
    ) -> SamplingBatch | None:
        """Parameters of a batch without tables of the vocabulary, which are the slots'; None when all
        requests are plainly greedy.

        Args:
            padding: dummy requests behind them.
            level: at least what they need, of which all parameters are set, so that few kinds of batches are
                captured; None sets what is asked for.
        """
        params = [request.params for request in requests] + [SamplingParams()] * padding
        seeds = [request.reply.seed for request in requests] + [0] * padding
        return self._without_tables(params, seeds, level)

    def of_requests(self, requests: Sequence[Request], level: Level | None = None) -> SamplingBatch | None:
        """Parameters of requests with empty replies, tables included; None when all are plainly greedy."""
        params = [request.params for request in requests]
        if level_of(params) == Level.GREEDY:
            return None
        prompts = [request.prompt_ids for request in requests]
        seeds = [request.reply.seed for request in requests]
        made = make_sampling_batch(params, prompts, seeds, self.vocab_size, self.device)
        return made if level is None or level < Level.FILTERED else self._with_filters(made)

    def of_level(self, level: Level, size: int) -> SamplingBatch | None:
        """Parameters of ``size`` requests that ask for nothing, as :meth:`of_cycle` gives them at a level."""
        params = SamplingParams(temperature=1.0)
        if level == Level.GREEDY:
            return None
        return self._without_tables([params] * size, [0] * size, level)

    def _without_tables(
        self, params: Sequence[SamplingParams], seeds: Sequence[int], level: Level | None
    ) -> SamplingBatch | None:
        """Parameters without tables, with all penalties where logits are adjusted in any way; what was
        missing changes nothing."""
        needed = level_of(params)
        if max(needed, level or Level.GREEDY) == Level.GREEDY:
            return None
        made = make_sampling_batch(
            params, [[]] * len(params), seeds, self.vocab_size, self.device, with_tables=False
        )
        if level is not None and level >= Level.FILTERED:
            made = self._with_filters(made)
        if max(needed, level or Level.GREEDY) == Level.ADJUSTED:
            ones = torch.ones_like(made.temperature)
            made = _with(made, repetition=ones, frequency=0 * ones, presence=0 * ones)
        return made

    def _with_filters(self, made: SamplingBatch) -> SamplingBatch:
        """Set all filters; what was missing changes nothing."""
        ones = torch.ones_like(made.temperature)
        top_k = torch.full_like(made.seeds, self.vocab_size)
        return _with(made, top_k=top_k, top_p=ones, min_p=0 * ones)


def is_adjusted(sampling: SamplingBatch | None) -> bool:
    """Return True for a batch of a cycle that takes tables of the vocabulary."""
    return sampling is not None and sampling.repetition is not None


def _with(made: SamplingBatch, **neutral: torch.Tensor) -> SamplingBatch:
    """Set the parameters that are None."""
    return made._replace(**{name: value for name, value in neutral.items() if getattr(made, name) is None})
