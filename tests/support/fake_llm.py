"""A deterministic stand-in for ``LLM``: responses follow from the prompt, acceptance from the draft's
name."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from eagle_kit.core.output import RequestOutput, TokenLogprobs
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats

VOCABULARY = 97
SECONDS_PER_CYCLE = 0.5
PREFILL_SECONDS = 0.25


class FakeTokenizer:
    chat_template: str | None = "{{ messages }}"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % VOCABULARY for letter in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(f"w{token}" for token in ids)

    @property
    def backend_tokenizer(self) -> "FakeTokenizer":
        return self

    def get_vocab_size(self) -> int:
        return 0


class FakeLLM:
    """``accepted`` draft tokens are kept in every verify; ``wrong`` maps positions to other tokens.

    ``calls`` collects (draft, shape, prompts) of every chat; the one after ``stop_after`` is a Ctrl-C.
    """

    def __init__(
        self,
        draft: str | None,
        accepted: int = 0,
        wrong: dict[int, int] | None = None,
        stop_after: int | None = None,
        calls: list[tuple[str | None, str, list[Any]]] | None = None,
        max_context: int = 1000,
    ) -> None:
        self.draft, self.accepted, self.wrong, self.stop_after = draft, accepted, wrong or {}, stop_after
        self.calls = [] if calls is None else calls
        self.params: list[SamplingParams] = []
        self.max_context = max_context
        self._prompts: dict[tuple[int, ...], Any] = {}
        self.tokenizer = FakeTokenizer()
        self.target = SimpleNamespace(
            embed_tokens=SimpleNamespace(weight=torch.zeros(1)), weight_format="float32"
        )

    def tokenize_task(self, prompt: Any) -> list[int]:
        messages = getattr(prompt, "messages", prompt)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        text = "|".join(f"{message['role']}:{message['content']}" for message in messages)
        ids = [ord(letter) % VOCABULARY for letter in text]
        self._prompts[tuple(ids)] = prompt
        return ids

    def close(self) -> None:
        pass

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Row t prefers the plain next token by 3; every other token's logit is 0."""
        out = torch.zeros(len(ids), VOCABULARY)
        for t in range(len(ids)):
            out[t, _next(ids[: t + 1])] = 3.0
        return out

    def chat(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams] | None = None,
        *,
        shape: str | None = None,
    ) -> list[RequestOutput]:
        assert params is not None and shape is not None
        self.calls.append((self.draft, shape, [self._prompts[tuple(ids)] for ids in prompts]))
        if self.stop_after is not None and len(self.calls) > self.stop_after:
            raise KeyboardInterrupt
        used = SpecShape.parse("3,1,4" if shape == "auto" else shape)
        self.params += params
        return [self._response(prompt, each, used) for prompt, each in zip(prompts, params, strict=True)]

    def _response(self, prompt_ids: list[int], params: SamplingParams, shape: SpecShape) -> RequestOutput:
        ids = list(prompt_ids)
        for position in range(params.max_tokens):
            ids.append(self.wrong.get(position, _next(ids)))
        response = ids[len(prompt_ids) :]
        stats = SpecStats()
        left = len(response) - 1
        num_cycles = 0
        while left:
            emitted = min(min(self.accepted, shape.steps) + 1, left)
            if shape.steps:
                stats.observe(emitted, min(self.accepted, shape.steps, emitted))
            num_cycles += 1
            left -= emitted
        logprobs = []
        if params.logprobs is not None:
            for row in self.logits(ids)[len(prompt_ids) - 1 : -1].log_softmax(-1):
                top = row.topk(params.logprobs)
                pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
                logprobs.append(TokenLogprobs(0.0, tuple(pairs)))
        return RequestOutput(
            prompt_ids,
            response,
            self.tokenizer.decode(response),
            "length",
            stats,
            prefill_s=PREFILL_SECONDS,
            decode_s=num_cycles * SECONDS_PER_CYCLE,
            logprobs=logprobs,
        )


def plain_generation(prompt_ids: list[int], num_tokens: int) -> tuple[str, list[int]]:
    """Text and token ids with which plain decoding responds."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(_next(ids))
    response = ids[len(prompt_ids) :]
    return FakeTokenizer().decode(response), response


def _next(ids: list[int]) -> int:
    return (31 * ids[-1] + 7 * len(ids) + sum(ids)) % VOCABULARY
