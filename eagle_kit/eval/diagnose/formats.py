"""Chat formats: the same replies behind prompts that are written as other templates write them.

No decoding: the target reads each reply behind the other prompt and says for itself which token comes next,
and the head is compared with that. A head that was trained with another template follows the target better
there than behind the target's own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle_kit.data.chat.messages import ChatPrompt, Tool
from eagle_kit.data.chat.renderer import ChatRenderer
from eagle_kit.eval.diagnose.chain import Source, read_chain
from eagle_kit.eval.diagnose.estimates import Estimate, estimate
from eagle_kit.eval.diagnose.replay import Messages, Replies
from eagle_kit.eval.diagnose.row import Text, compute_states, log_probs, pack
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


class Format(NamedTuple):
    """A way to write a chat: every turn, with ``{role}`` and ``{content}``, and what begins a reply."""

    name: str
    turn: str
    reply: str

    def render(self, messages: Messages) -> str:
        """The chat as text, up to the reply."""
        return "".join(self.turn.format(**message) for message in messages) + self.reply


FORMATS = (
    Format("ChatML", "<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n"),
    Format(
        "Llama 3's",
        "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    Format("Llama 2's", "[INST] {content} [/INST]", ""),
    Format("Zephyr's", "<|{role}|>\n{content}</s>\n", "<|assistant|>\n"),
    Format("Vicuna's", "{role}: {content}\n", "assistant: "),
    Format("no template", "{content}\n\n", ""),
)


class FormatReading(NamedTuple):
    """A head on replies behind prompts of a format.

    Attributes:
        accepted: share of first drafts that are the target's most likely token.
        gain: of that share over the target's own template, root by root.
        follow: the same of the log-probability of that token, head's less target's, so that how sure the
            target itself is does not count.
    """

    name: str
    accepted: Estimate
    gain: Estimate
    follow: Estimate


def read_formats(
    head: DraftHead, target: Target, renderer: ChatRenderer, replies: Replies
) -> list[FormatReading]:
    """Read a head behind prompts of every format, the target's own first.

    Raises:
        UserError: the tokenizer has no chat template.
    """
    messages, chosen = replies.messages[:MOST_CHATS], replies.texts[:MOST_CHATS]
    own = _measure(head, target, chosen)
    found = [FormatReading("the target's own", estimate(own[0], own[2]), Estimate(0, 0), Estimate(0, 0))]
    for name, prompts in _written(renderer, messages):
        texts = [Text(ids, text.reply) for ids, text in zip(prompts, chosen, strict=True)]
        hits, follow, numbers = _measure(head, target, texts)
        found.append(
            FormatReading(
                name,
                estimate(hits, numbers),
                estimate(hits - own[0], numbers),
                estimate(follow - own[1], numbers),
            )
        )
    return found


def _written(renderer: ChatRenderer, messages: Sequence[Messages]) -> list[tuple[str, list[list[int]]]]:
    """Prompts in all formats that differ from the target's own, as tokens, by the format's name."""
    own = [renderer.prompt_token_ids(each) for each in messages]
    system = [{"role": "system", "content": SYSTEM}]
    written = [
        ("the same with a system prompt", [_own(renderer, [*system, *each]) for each in messages]),
        (WITH_TOOL, [_own(renderer, each, tools=[TOOL]) for each in messages]),
    ]
    for form in FORMATS:
        texts = [form.render(each) for each in messages]
        ids = [
            renderer.tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"] for text in texts
        ]
        written.append((form.name, ids))
    return [(name, prompts) for name, prompts in written if prompts != own and all(prompts)]


def _own(renderer: ChatRenderer, messages: Messages, tools: Sequence[Tool] = ()) -> list[int]:
    """By the target's own template; empty where it has no place for them."""
    try:
        return renderer.prompt_token_ids(ChatPrompt(messages, tools))
    except Exception:  # a template is a foreign program
        return []


def _measure(
    head: DraftHead, target: Target, texts: Sequence[Text]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First drafts that are right ``[R]``, how well the target is followed ``[R]``, and texts ``[R]``."""
    row = pack(texts).to(target.embed_tokens.weight.device)
    states = compute_states(target, row, head.capture)
    reading = read_chain(head, Source(target, row, states))
    follow = reading.log_truth - log_probs(target, row, states, states.greedy)
    return reading.accepted.float(), follow, row.texts
