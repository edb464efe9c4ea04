"""Prompts through our engine: greedy responses to measure on, plainly and with a chain of the draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle_kit.config.diagnose import DiagnoseConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.output import RequestOutput
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.data.chat.template import has_chat_template
from eagle_kit.data.tasks.sets import load_task
from eagle_kit.engine.llm import LLM
from eagle_kit.eval.diagnose.row import PromptResponse
from eagle_kit.report.stages import Stages

FEWEST_PROMPTS = 8
FEWEST_TOKENS = 200
"""Tokens of responses below which chance explains any difference."""
PLAIN = "plain decoding"
DRAFTED = "chain"
"""Names of stages. The shape follows the second."""
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Responses:
    """Prompts and the target's own greedy responses.

    Attributes:
        messages: of every prompt.
        outputs: responses of plain decoding.
    """

    messages: Sequence[Messages]
    outputs: Sequence[RequestOutput]

    @property
    def texts(self) -> list[PromptResponse]:
        """Prompts and responses as tokens."""
        return [PromptResponse(output.prompt_ids, output.token_ids) for output in self.outputs]

    @property
    def num_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def is_finite(self) -> bool:
        """False where the target's logits were not finite."""
        return not any(output.finish_reason == "error" for output in self.outputs)


@dataclass(frozen=True)
class Replay:
    """The same prompts decoded with the draft.

    Attributes:
        shape: the shape of every cycle.
        stats: what the engine counted.
        predicted: the same, computed from the head's chains without decoding; None for a tree.
        num_different: responses that are not those of plain decoding.
    """

    shape: SpecShape
    stats: SpecStats
    predicted: SpecStats | None
    num_different: int


def check_sizes(config: DiagnoseConfig) -> None:
    """Raise UserError where responses of full length would have too few tokens to measure on."""
    num_tokens = config.limit * config.max_tokens
    if num_tokens - config.limit < FEWEST_TOKENS:
        raise UserError(
            f"{config.limit} responses of at most {config.max_tokens} tokens have at most {num_tokens} "
            "tokens, too few to tell a cause from chance.",
            f"Raise --limit or --max-tokens to more than {FEWEST_TOKENS + config.limit} tokens in all.",
        )


def decode_responses(llm: LLM, config: DiagnoseConfig, stages: Stages) -> Responses:
    """Decode the prompts of a task plainly.

    Raises:
        UserError: an unknown task, prompts that leave no room, or too few or too short responses to measure
            on.
    """
    task = load_task(config.task).limited(config.limit, config.seed)
    if len(task.prompts) < FEWEST_PROMPTS:
        raise UserError(
            f"The task {task.name} has {len(task.prompts)} prompts, too few to tell a cause from chance.",
            f"Give at least {FEWEST_PROMPTS} with --task.",
        )
    if any(prompt.tools or prompt.chat_template_kwargs for prompt in task.prompts):
        raise UserError(
            f"The task {task.name} has prompts with tools or arguments of the chat template, which a "
            "diagnosis does not render.",
            "Give another with --task.",
        )
    messages = [prompt.messages([]) for prompt in task.prompts]
    responses = Responses(messages, _decode(llm, messages, config, NO_SPECULATION, stages))
    if responses.is_finite and responses.num_tokens - len(messages) < FEWEST_TOKENS:
        raise UserError(
            f"The responses to the {len(messages)} prompts of {task.name} have {responses.num_tokens} tokens "
            "in all, too few to tell a cause from chance.",
            "Give more prompts with --task and --limit, or a larger --max-tokens.",
        )
    return responses


def decode_drafted(
    llm: LLM, responses: Responses, config: DiagnoseConfig, shape: SpecShape, stages: Stages
) -> Replay:
    """Decode the same prompts with the draft in ``shape``."""
    outputs = _decode(llm, responses.messages, config, shape, stages)
    stats = SpecStats()
    for output in outputs:
        stats.add(output.stats)
    pairs = zip(outputs, responses.outputs, strict=True)
    num_different = sum(output.token_ids != plain.token_ids for output, plain in pairs)
    return Replay(shape, stats, None, num_different)


def _decode(
    llm: LLM, messages: Sequence[Messages], config: DiagnoseConfig, shape: SpecShape, stages: Stages
) -> list[RequestOutput]:
    prompts = [_prompt(llm, each) for each in messages]
    stage = PLAIN if shape == NO_SPECULATION else f"{DRAFTED} {shape}"
    stages.start(stage, len(prompts), "response")
    params = SamplingParams(max_tokens=config.max_tokens, temperature=0.0)
    return llm.chat(prompts, params, shape=shape, on_finish=stages.step)


def _prompt(llm: LLM, messages: Messages) -> Any:
    """Messages, or their texts as tokens for a model without a chat template."""
    if has_chat_template(llm.tokenizer):
        return messages
    text = "\n\n".join(message["content"] for message in messages)
    return list(llm.tokenizer(text, verbose=False)["input_ids"])
