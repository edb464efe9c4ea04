"""Sampling parameters of a batch as device tensors, made anew only when the batch changes.

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
        self._key: tuple[tuple[int, int], ...] = ()
        self._batch: SamplingBatch | None = None

    def of_cycle(
        self, requests: Sequence[Request], padding: int, has_fixed_shapes: bool
    ) -> SamplingBatch | None:
        """Parameters of a batch without the counts of its replies; None when all requests are plainly greedy.

        Args:
            padding: dummy requests behind them.
            has_fixed_shapes: set all filters when one is set, and all adjustments of logits when there is
                one, so that few kinds of batches are captured.
        """
        key = (*((request.number, request.epoch) for request in requests), (-1, padding))
        if self._key != key:
            made = self.of_requests(requests, padding)
            if made is not None:
                made = made._replace(counts=None)
                made = self._completed(made) if has_fixed_shapes else made
            self._key, self._batch = key, made
        return self._batch

    def of_requests(self, requests: Sequence[Request], padding: int = 0) -> SamplingBatch | None:
        """Parameters of requests with empty replies; None when all are plainly greedy."""
        if all(_is_plain(request.params) for request in requests):
            return None
        params = [request.params for request in requests] + [SamplingParams()] * padding
        prompts = [request.prompt_ids for request in requests] + [[]] * padding
        seeds = [request.seed for request in requests] + [0] * padding
        return make_sampling_batch(params, prompts, seeds, self.vocab_size, self.device)

    def of_params(self, params: SamplingParams, size: int) -> SamplingBatch:
        """Parameters of ``size`` equal requests, as :meth:`of_cycle` gives them where shapes are fixed."""
        made = make_sampling_batch([params] * size, [[]] * size, [0] * size, self.vocab_size, self.device)
        return self._completed(made._replace(counts=None))

    def forget(self) -> None:
        """Make the tables of the next batch anew."""
        self._key = ()

    def _completed(self, sampling: SamplingBatch) -> SamplingBatch:
        """Set all filters where there is one, and these and all adjustments of logits where there is one of
        them; what was missing changes nothing."""
        adjusts = is_adjusted(sampling)
        if not adjusts and all(part is None for part in (sampling.top_k, sampling.top_p, sampling.min_p)):
            return sampling
        ones = torch.ones_like(sampling.temperature)
        neutral: dict[str, torch.Tensor] = {
            "top_k": torch.full_like(sampling.seeds, self.vocab_size),
            "top_p": ones,
            "min_p": torch.zeros_like(ones),
        }
        if adjusts:
            tables = len(ones), self.vocab_size
            neutral |= {"repetition": ones, "frequency": 0 * ones, "presence": 0 * ones}
            neutral |= {
                "bias": ones.new_zeros(tables),
                "prompt_mask": torch.zeros(tables, dtype=torch.bool, device=self.device),
            }
        missing = {name: value for name, value in neutral.items() if getattr(sampling, name) is None}
        return sampling._replace(**missing)


def counts_tokens(sampling: SamplingBatch) -> bool:
    """Return True if a request's distribution depends on the tokens of its reply."""
    return any(part is not None for part in (sampling.repetition, sampling.frequency, sampling.presence))


def is_adjusted(sampling: SamplingBatch) -> bool:
    """Return True if logits are adjusted before they are filtered, which takes tables of the vocabulary."""
    return counts_tokens(sampling) or sampling.bias is not None


def _is_plain(params: SamplingParams) -> bool:
    return params.is_greedy and not params.has_penalties and not params.logit_bias
