"""Sampling distribution: penalties, bias, temperature, filters.

Legend: B requests, N window nodes, V vocabulary, S draft steps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.ops.backend import Backend, uses_triton
from eagle_kit.ops.sampling.nearest import nearest
from eagle_kit.ops.transfer import to_device

LARGEST = torch.finfo(torch.float32).max / 4
SMALLEST = torch.finfo(torch.float32).tiny
"""Lower bound of sampling parameters that underflow fp32, so that no probability becomes infinity over
infinity."""


class SamplingBatch(NamedTuple):
    """Sampling parameters of a batch. A parameter that no request uses is None, so that it costs nothing.

    Attributes:
        temperature: fp32 ``[B]``, 0 for greedy.
        seeds: int64 ``[B]``.
        top_k: int64 ``[B]``; V keeps all tokens.
        top_p, min_p: fp32 ``[B]``.
        repetition, frequency, presence: fp32 ``[B]``, penalties.
        bias: fp32 ``[B, V]``.
        prompt_mask: bool ``[B, V]``, tokens of the prompt.
        counts: int32 ``[B, V]``, occurrences in the response so far, the root included.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    repetition: torch.Tensor | None = None
    frequency: torch.Tensor | None = None
    presence: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    prompt_mask: torch.Tensor | None = None
    counts: torch.Tensor | None = None


class FilteredLogits(NamedTuple):
    """Distributions after every node for the Triton kernels: logits, and the bounds of the tokens that
    filters keep.

    Attributes:
        logits: ``[B, N, V]``, unfiltered.
        stats: fp32 ``[B, N, 3]``: the best logit, the temperature, and the distance ``(best - logit) /
            temperature`` up to which tokens are kept.
        last: int32 ``[B, N]``, the last token kept among those at exactly that distance.
        sums: fp64 ``[B, N, C]``, sum of ``exp(-distance)`` over the kept tokens of every chunk of the
            vocabulary.
    """

    logits: torch.Tensor
    stats: torch.Tensor
    last: torch.Tensor
    sums: torch.Tensor


def make_sampling_batch(
    params: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    vocab_size: int,
    device: torch.device,
    *,
    with_tables: bool = True,
) -> SamplingBatch:
    """Sampling parameters of requests with ``params`` and empty responses, as tensors.

    Args:
        prompts: token ids of each prompt.
        seeds: seed of each request's random numbers.
        with_tables: make the tables of the vocabulary that penalties and biases need.
    """

    def column(name: str, neutral: float, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        values = [getattr(p, name) for p in params]
        if all(value == neutral for value in values):
            return None
        return to_device([min(value, LARGEST) for value in values], device, dtype)

    # Filters.
    top_k = None
    if any(p.top_k for p in params):
        top_k = to_device([min(p.top_k or vocab_size, vocab_size) for p in params], device)
    top_p = column("top_p", 1.0)
    if top_p is not None:
        top_p = top_p.clamp(min=SMALLEST)

    # Penalties.
    repetition = column("repetition_penalty", 1.0)
    if repetition is not None:
        repetition = repetition.clamp(min=SMALLEST)
    frequency = column("frequency_penalty", 0.0)
    presence = column("presence_penalty", 0.0)

    # Tables of the vocabulary.
    bias = None
    if with_tables and any(p.has_bias for p in params):
        bias = torch.zeros(len(params), vocab_size, device=device)
        for row, p in zip(bias, params, strict=True):
            write_bias(row, p)
    prompt_mask = None
    if with_tables and repetition is not None:
        prompt_mask = torch.zeros(len(params), vocab_size, dtype=torch.bool, device=device)
        entries = [i * vocab_size + token for i, prompt in enumerate(prompts) for token in prompt]
        prompt_mask.view(-1).index_fill_(0, to_device(entries, device), True)
    counts = None
    if with_tables and any(p.has_penalties for p in params):
        counts = torch.zeros(len(params), vocab_size, dtype=torch.int32, device=device)
    return SamplingBatch(
        temperature=to_device([min(p.temperature, LARGEST) for p in params], device, torch.float32),
        seeds=to_device(list(seeds), device),
        top_k=top_k,
        top_p=top_p,
        min_p=column("min_p", 0.0),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
        bias=bias,
        prompt_mask=prompt_mask,
        counts=counts,
    )


def write_bias(row: torch.Tensor, params: SamplingParams) -> None:
    """Write a request's biases into ``row`` fp32 ``[V]``: -inf for tokens that are not allowed."""
    row.zero_()
    if params.logit_bias:
        tokens = to_device(list(params.logit_bias), row.device)
        values = [min(max(value, -LARGEST), LARGEST) for value in params.logit_bias.values()]
        row[tokens] = to_device(values, row.device, row.dtype)
    if params.allowed_token_ids is not None:
        allowed = to_device(list(params.allowed_token_ids), row.device)
        forbidden = torch.full_like(row, float("-inf"))
        forbidden.index_fill_(0, allowed, 0.0)
        row += forbidden


def adjust_logits(
    logits: torch.Tensor, batch: SamplingBatch, tokens: torch.Tensor, ancestors: torch.Tensor
) -> torch.Tensor:
    """Apply penalties and bias: repetition, then frequency and presence, then bias. The penalties of a node
    count the tokens on its own path.

    Args:
        logits: fp32 ``[B, N, V]``, after each node.
        tokens: int64 ``[B, N]``, the window; its root is already in ``batch.counts``.
        ancestors: int64 bits ``[B, N]``, a node's own bit included.

    Returns:
        ``[B, N, V]``, a new tensor when anything is changed.
    """
    if batch.counts is not None:
        # Occurrences of every token in the response and on a node's path, [B, N, V]; the response has the
        # root.
        b, n, v = logits.shape
        node = torch.arange(n, device=logits.device)
        on_path = ((ancestors[:, :, None] >> node) & 1) * (node > 0)
        index = tokens[:, None].expand(b, n, n)
        counts = batch.counts[:, None].expand(b, n, v).clone()
        counts.scatter_add_(2, index, on_path.to(torch.int32))

        if batch.repetition is not None and batch.prompt_mask is not None:
            penalty = batch.repetition[:, None, None]
            seen = batch.prompt_mask[:, None] | (counts > 0)
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(seen, penalised, logits).clamp(max=LARGEST)
        if batch.frequency is not None:
            logits = logits - batch.frequency[:, None, None] * counts
        if batch.presence is not None:
            logits = logits - batch.presence[:, None, None] * (counts > 0)
    return logits if batch.bias is None else logits + batch.bias[:, None]


def target_distribution(
    logits: torch.Tensor, batch: SamplingBatch, *, backend: Backend | None = None
) -> torch.Tensor | FilteredLogits:
    """Distribution of :func:`target_probs` in the form that ``sample`` and the verifiers read fastest:
    probabilities for the reference, a ``FilteredLogits`` for Triton, which accepts ``logits`` of any float
    type."""
    if not uses_triton("sampling", logits, backend):
        return target_probs(logits.float(), batch, backend="reference")
    from eagle_kit.ops.sampling import triton

    logits = logits.contiguous()
    floors = None if batch.min_p is None else -batch.min_p.log()
    stats, last, sums = triton.filter_logits(logits, batch.temperature, batch.top_k, batch.top_p, floors)
    return FilteredLogits(logits, stats, last, sums)


def distribution_parts(distribution: torch.Tensor | FilteredLogits) -> list[torch.Tensor]:
    """A distribution as the Triton operations take it: contiguous probabilities, or the four fields of a
    ``FilteredLogits``."""
    if isinstance(distribution, torch.Tensor):
        return [distribution.contiguous()]
    return list(distribution)


def probabilities(distribution: torch.Tensor | FilteredLogits) -> torch.Tensor:
    """A distribution as probabilities, fp32 ``[B, N, V]``."""
    if isinstance(distribution, torch.Tensor):
        return distribution
    from eagle_kit.ops.sampling import triton

    return triton.filtered_probs(*distribution)


def target_probs(
    logits: torch.Tensor, batch: SamplingBatch, *, backend: Backend | None = None
) -> torch.Tensor:
    """Apply temperature, then top-k, top-p and min-p, each to the tokens left by the one before -> fp32 ``[B,
    N, V]``.

    Equal logits are ranked by token id, so top-k keeps exactly k, and top-p no more than it needs. A
    temperature of 0 is one-hot at the most likely token, the lowest id among equals. A request's distribution
    does not depend on the filters of others in its batch.

    Args:
        logits: fp32 ``[B, N, V]``.
    """
    if uses_triton("sampling", logits, backend):
        return probabilities(target_distribution(logits, batch, backend=backend))
    # Distance of every token from the best one in units of the temperature, 0..inf.
    greedy = (batch.temperature == 0)[:, None, None]
    best, best_id = logits.max(-1, keepdim=True)
    distance = best - logits
    distance /= torch.where(greedy, 1.0, batch.temperature[:, None, None])

    # Each filter puts the tokens that it excludes at infinity.
    if batch.top_k is not None:
        kept = nearest(distance, torch.ones_like(distance), batch.top_k[:, None, None].double())
        distance.masked_fill_(~kept, float("inf"))
    if batch.top_p is not None:
        share = torch.where(batch.top_p < 1, batch.top_p, float("inf"))[:, None, None]
        kept = nearest(distance, (-distance).softmax(-1), share.double())
        distance.masked_fill_(~kept, float("inf"))
    if batch.min_p is not None:
        distance.masked_fill_(distance > -batch.min_p.log()[:, None, None], float("inf"))

    # Greedy requests take the best token alone.
    probs = distance.neg_().softmax(-1)
    best_prob = torch.where(greedy, 1.0, probs.gather(-1, best_id))
    return probs.masked_fill_(greedy, 0.0).scatter_(-1, best_id, best_prob)


def counts_after(counts: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> torch.Tensor:
    """Add the first ``num_emitted [B]`` of ``tokens`` int64 ``[B, S + 1]`` to ``counts [B, V]``."""
    new = torch.arange(tokens.shape[1], device=tokens.device) < num_emitted[:, None]
    return counts.scatter_add(1, tokens, new.to(counts.dtype))


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities under the unmodified logits.

    Args:
        logits: ``[R, V]``.
        tokens: int64 ``[R]``.
        top: number of alternatives to report, best first; may be 0.

    Returns:
        fp32 ``[R]`` of the tokens, int64 ``[R, top]`` ids of the alternatives, and fp32 ``[R, top]`` of
            these.
    """
    distributions = logits.float().log_softmax(-1)
    values, ids = distributions.topk(top, -1)
    return distributions.gather(1, tokens[:, None])[:, 0], ids, values
