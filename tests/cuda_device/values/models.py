"""Small targets of all kinds, trained drafts, and engines on the CPU and on the device."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from conformance import VOCABULARY, Conformance
from families import family_model
from tiny import randomise
from tiny_engine import serve
from tiny_mixtures import YARN, untrained, v3

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.base.draft_model import DraftModel, HeadDraftModel, StandaloneDraftModel
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.load_draft import copy_head
from eagle_kit.engine.request import Request
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.targets.target import Target

SIZES = {
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
"""Sizes of a Llama that all Triton kernels take."""
MOST_GAP = 1e-4
"""Difference of two logits up to which either token may be taken for the most likely one."""
MOST_LOGPROB_DIFFERENCE = 1e-4
compared: Counter[str] = Counter()
"""Texts that were compared, and ties at which some parted."""

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 3, "logprobs": 3},
    {"temperature": 1.2, "top_k": 7, "top_p": 0.9, "min_p": 0.02, "seed": 6},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.2, "logprobs": 0},
    {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.2, "logit_bias": {3: 1.5, 4: -100.0}},
    {"logprobs": 2},
    {"temperature": 1.0, "seed": 5, "allowed_token_ids": (0, 1, 2, 3, 5, 8)},
)
"""Sampling parameters of requests: greedy, sampled, filtered, with penalties and with biases."""
BAD_WORDS = ((3,), (5, 2), (7, 0, 7))
"""Tokens that a request with forbidden words may not emit after one another."""


class Models(Conformance):
    """Targets and trained drafts of the conformance table; latents in sizes that Triton's kernels take.

    A target with Mamba's layers, "state spaces", is added to those of the table.
    """

    def _target(self, kind: str) -> Target:
        if kind == "latents":
            rope = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
            sizes = {"kv_lora_rank": 64, "qk_rope_head_dim": 16}
            config = v3(vocab_size=VOCABULARY, rope_parameters=rope, **sizes)
            target: Target = randomise(untrained(config), 0, 0.2)
            return target
        if kind == "state spaces":
            folder: Path = self.make_folder("target")
            family_model("falcon_h1", vocab_size=VOCABULARY).save_pretrained(folder)
            return load_target(folder)
        return super()._target(kind)

    def llm(self, device: str, target: str, draft: str, **options: Any) -> LLM:
        """An engine on the CPU or on the device, with copies of a target and of its trained draft.

        Args:
            options: of ``LLM``, in place of those here.
        """
        chosen: dict[str, Any] = {"max_batch_size": 3, "max_context": 96, "kv_tokens": 512}
        if device == "cpu":
            chosen["graph_mode"] = "off"
        else:
            chosen["batch_sizes"] = (1, 3)
        if draft == "n-grams":
            chosen["algorithm"] = "NGRAM"
        if draft == "static tree":
            chosen["tree"] = "static"
        model = copy.deepcopy(self.target(target)).to(device)
        return LLM(model, on_device(self.draft(target, draft), device), **{**chosen, **options})


def on_device(draft: DraftModel | None, device: str) -> Any:
    """A copy of a draft, as ``LLM`` takes it."""
    if draft is None:
        return None
    if isinstance(draft, HeadDraftModel):
        return copy_head(draft.head).to(device)
    assert isinstance(draft, StandaloneDraftModel)
    return StandaloneDraftModel(copy.deepcopy(draft.model).to(device))


def make_request(number: int, prompt: Sequence[int], kind: Mapping[str, Any], max_tokens: int) -> Request:
    """A request of one of the ``KINDS``, or with ``{"bad_words": True}`` one that avoids ``BAD_WORDS``."""
    sampling = dict(kind)
    avoids_words = sampling.pop("bad_words", False)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    request = Request(number, list(prompt), params)
    if avoids_words:
        request.bad_word_ids = BAD_WORDS
    return request


def serve_all(llm: LLM, requests: list[Request], shape: str | None = None) -> list[Request]:
    """Serve requests together, in the shape of the options or another; the pool is checked at every step."""
    serve(llm.engine(shape), requests)
    return requests


def compare(target: Target, expected: Sequence[Request], found: Sequence[Request]) -> int:
    """Compare what the device served with what the CPU did, an aborted response as far as it goes.

    Args:
        target: on the CPU, for the gap between tokens where two greedy texts part.

    Returns:
        The number of greedy texts that part where two logits differ by less than ``MOST_GAP``.
    """
    num_ties = 0
    compared["texts"] += len(found)
    for one, other in zip(expected, found, strict=True):
        assert one.prompt_ids == other.prompt_ids and one.params == other.params
        text = one.token_ids
        if other.finish_reason == "abort":
            text = text[: len(other.token_ids)]
        if text == other.token_ids:
            compare_logprobs(one, other)
            continue
        gap = gap_between(target, one, other)
        assert gap is not None and gap < MOST_GAP, f"{other.params}: {text} became {other.token_ids}"
        num_ties += 1
        compared["ties"] += 1
    return num_ties


def compare_logprobs(one: Request, other: Request) -> None:
    """Compare the log-probabilities of two requests of the same text."""
    for mine, theirs in zip(one.response.logprobs, other.response.logprobs, strict=False):
        assert abs(mine.logprob - theirs.logprob) < MOST_LOGPROB_DIFFERENCE
        values = [value for _, value in mine.top]
        others = [value for _, value in theirs.top]
        assert len(values) == len(others)
        for value, other_value in zip(values, others, strict=True):
            assert abs(value - other_value) < MOST_LOGPROB_DIFFERENCE
    if other.params.logprobs is not None:
        assert len(other.response.logprobs) == len(other.token_ids)


@torch.inference_mode()
def gap_between(target: Target, one: Request, other: Request) -> float | None:
    """Difference of the logits of the first two tokens in which greedy texts differ; None for other texts."""
    params = one.params
    is_plain = params.is_greedy and not params.has_penalties and not params.has_bias
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    place = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
    if not is_plain or place is None:
        return None
    ids = torch.tensor([*one.prompt_ids, *one.token_ids[:place]])
    hidden = target(ids, torch.arange(len(ids)), target.causal()).hidden
    logits = target.logits(hidden)[-1]
    return float((logits[one.token_ids[place]] - logits[other.token_ids[place]]).abs())
