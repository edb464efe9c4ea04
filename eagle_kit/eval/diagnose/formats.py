"""Chat formats: the same responses after prompts that are written as other templates write them.

Nothing is decoded: the target computes its own most likely tokens over each response after the other
prompt, and the head is compared with those. A head that was trained with another template follows
the target better after that template than after the target's own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle_kit.data.chat.messages import ChatPrompt, Tool
from eagle_kit.data.chat.renderer import ChatRenderer
from eagle_kit.eval.diagnose.chain import Source, draft_chains
from eagle_kit.eval.diagnose.estimates import Estimate, estimate
from eagle_kit.eval.diagnose.replay import Messages, Responses
from eagle_kit.eval.diagnose.row import PromptResponse, compute_states, log_probs, pack
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.targets.target import Target

MOST_CHATS = 16
"""Chats that are read in every format: each format costs a forward of the target."""
SYSTEM = "Answer briefly and in plain words."
WITH_TOOL = "the same with a tool"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class ChatFormat(NamedTuple):
    """A way to write a chat: text of a turn, with ``{role}`` and ``{content}``, and text before a
    response."""

    name: str
    turn: str
    response: str

    def render(self, messages: Messages) -> str:
        """The chat as text, up to the response."""
        return "".join(self.turn.format(**message) for message in messages) + self.response


FORMATS = (
    ChatFormat("ChatML", "<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n"),
    ChatFormat(
        "Llama 3's",
        "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    ChatFormat("Llama 2's", "[INST] {content} [/INST]", ""),
    ChatFormat("Zephyr's", "<|{role}|>\n{content}</s>\n", "<|assistant|>\n"),
    ChatFormat("Vicuna's", "{role}: {content}\n", "assistant: "),
    ChatFormat("no template", "{content}\n\n", ""),
)


class FormatResult(NamedTuple):
    """A head on responses after prompts of a format.

    Attributes:
        accepted: share of first drafts that are the target's most likely token.
        gain: of that share over the target's own template, root by root.
        follow: the same gain of the log-probability of that token under the head, less that under
            the target, so that the target's own certainty does not count.
    """

    name: str
    accepted: Estimate
    gain: Estimate
    follow: Estimate


def measure_formats(
    head: DraftHead, target: Target, renderer: ChatRenderer, responses: Responses
) -> list[FormatResult]:
    """Measure a head after prompts of every format, the target's own first.

    Raises:
        UserError: the tokenizer has no chat template.
    """
    messages = responses.messages[:MOST_CHATS]
    texts = responses.texts[:MOST_CHATS]
    own = _measure(head, target, texts)
    no_gain = Estimate(0, 0)
    results = [FormatResult("the target's own", estimate(own.is_accepted, own.text_index), no_gain, no_gain)]
    for name, prompts in _prompts(renderer, messages).items():
        rewritten = [
            PromptResponse(prompt, text.response) for prompt, text in zip(prompts, texts, strict=True)
        ]
        found = _measure(head, target, rewritten)
        results.append(
            FormatResult(
                name,
                accepted=estimate(found.is_accepted, found.text_index),
                gain=estimate(found.is_accepted - own.is_accepted, found.text_index),
                follow=estimate(found.follow - own.follow, found.text_index),
            )
        )
    return results


def _prompts(renderer: ChatRenderer, messages: Sequence[Messages]) -> dict[str, list[list[int]]]:
    """Prompts as tokens in every format that differs from the target's own, by the format's
    name."""
    own = [renderer.prompt_token_ids(each) for each in messages]
    system = [{"role": "system", "content": SYSTEM}]
    prompts = {
        "the same with a system prompt": [_own_prompt(renderer, [*system, *each]) for each in messages],
        WITH_TOOL: [_own_prompt(renderer, each, tools=[TOOL]) for each in messages],
    }
    for chat_format in FORMATS:
        ids = []
        for each in messages:
            text = chat_format.render(each)
            ids.append(renderer.tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
        prompts[chat_format.name] = ids

    # A template may pass over system prompts or tools, and may refuse them.
    return {name: ids for name, ids in prompts.items() if ids != own and all(ids)}


def _own_prompt(renderer: ChatRenderer, messages: Messages, tools: Sequence[Tool] = ()) -> list[int]:
    """A prompt by the target's own template; empty where the template refuses it."""
    try:
        return renderer.prompt_token_ids(ChatPrompt(messages, tools))
    except Exception:  # a template is a foreign program
        return []


class _Measurement(NamedTuple):
    """First drafts of a head at every root.

    Attributes:
        is_accepted: fp32 ``[R]``, 1 where the draft is the target's most likely token.
        follow: fp32 ``[R]``, log-probability of that token under the head, less that under the
            target.
        text_index: int64 ``[R]``.
    """

    is_accepted: torch.Tensor
    follow: torch.Tensor
    text_index: torch.Tensor


def _measure(head: DraftHead, target: Target, texts: Sequence[PromptResponse]) -> _Measurement:
    row = pack(texts).to(target.embed_tokens.weight.device)
    states = compute_states(target, row, head.capture)
    result = draft_chains(head, Source(target, row, states))
    target_log_probs = log_probs(target, row, states, states.greedy)
    return _Measurement(
        is_accepted=result.num_accepted.float(),
        follow=result.first.label_log_prob - target_log_probs,
        text_index=row.text_index,
    )
