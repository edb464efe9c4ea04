"""Sampling parameters of a batch as device tensors, made when the requests of the batch change.

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
        device: device of the tensors.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device

    def of_cycle(
        self, requests: Sequence[Request], padding: int, level: Level | None = None
    ) -> SamplingBatch | None:
        """Make the parameters of a decode cycle, without the tables of the vocabulary, which the slots hold.

        Args:
            padding: number of dummy rows behind the requests.
            level: level whose parameters are all set, so that graphs are captured for few kinds of batches;
                None sets only the parameters that a request asks for.

        Returns:
            The parameters; None if all requests are greedy without penalties and biases.
        """
        params = [request.params for request in requests] + [SamplingParams()] * padding
        seeds = [request.response.seed for request in requests] + [0] * padding
        return self._without_tables(params, seeds, level)

    def of_requests(self, requests: Sequence[Request], level: Level | None = None) -> SamplingBatch | None:
        """Make the parameters of first tokens, tables of the vocabulary included; None if all are greedy."""
        params = [request.params for request in requests]
        if level_of(params) == Level.GREEDY:
            return None
        prompts = [request.prompt_ids for request in requests]
        seeds = [request.response.seed for request in requests]
        made = make_sampling_batch(params, prompts, seeds, self.vocab_size, self.device)
        return made if level is None or level < Level.FILTERED else self._with_filters(made)

    def of_level(self, level: Level, size: int) -> SamplingBatch | None:
        """Make the parameters that :meth:`of_cycle` makes for ``size`` dummies at a level."""
        params = SamplingParams(temperature=1.0)
        if level == Level.GREEDY:
            return None
        return self._without_tables([params] * size, [0] * size, level)

    def _without_tables(
        self, params: Sequence[SamplingParams], seeds: Sequence[int], level: Level | None
    ) -> SamplingBatch | None:
        """Make parameters without tables. Adjusted logits get all penalties, missing ones without effect."""
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
        """Set all filters, the missing ones without effect."""
        ones = torch.ones_like(made.temperature)
        top_k = torch.full_like(made.seeds, self.vocab_size)
        return _with(made, top_k=top_k, top_p=ones, min_p=0 * ones)


def is_adjusted(sampling: SamplingBatch | None) -> bool:
    """Return True if the cycle of a batch reads the tables of the vocabulary."""
    return sampling is not None and sampling.repetition is not None


def _with(made: SamplingBatch, **neutral: torch.Tensor) -> SamplingBatch:
    """Set the parameters that are None."""
    return made._replace(**{name: value for name, value in neutral.items() if getattr(made, name) is None})
