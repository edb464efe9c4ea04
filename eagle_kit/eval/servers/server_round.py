"""All servers of an evaluation, which take their turns on each batch of prompts after our engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.data.tasks.sets import EvalPrompt
from eagle_kit.eval.answers import Answer
from eagle_kit.eval.engines import EvalEngine
from eagle_kit.eval.identity import first_difference
from eagle_kit.eval.servers.measured_server import OURS, MeasuredServer, ServedBatch, ServedResponse
from eagle_kit.eval.servers.server_answers import (
    ServedAnswer,
    ServedRecord,
    ServerAnswerStore,
    TextDifference,
    shape_name,
)
from eagle_kit.eval.servers.server_checks import LabelledPrompt, check_server

UNFINISHED = "\ufffd"
"""Stands for the beginning of a character whose other tokens were cut off."""
SHOWN_CHARACTERS = 24


@dataclass(frozen=True)
class ServedPrompts:
    """A batch as it is sent.

    Attributes:
        task: name of the task.
        turn: user turn that is answered, from 0.
        prompts: of the task.
        prompt_ids: of every prompt, with the template and earlier turns.
        plain: responses of plain decoding to every prompt.
    """

    task: str
    turn: int
    prompts: Sequence[EvalPrompt]
    prompt_ids: Sequence[list[int]]
    plain: Sequence[Answer]

    @property
    def ids(self) -> list[str]:
        """Ids of the prompts."""
        return [prompt.id for prompt in self.prompts]


@dataclass(frozen=True)
class ServerRound:
    """Sends prompts to ``servers`` and keeps the responses in ``store``."""

    servers: Sequence[MeasuredServer]
    store: ServerAnswerStore

    def num_pending(self, round: int, task: str, turn: int, ids: Sequence[str]) -> int:
        """Servers that have not decoded a batch."""
        return sum(self.store.get(server.name, round, task, turn, ids) is None for server in self.servers)

    def start(
        self,
        target: str | Path,
        engine: EvalEngine,
        prompts: Sequence[LabelledPrompt],
        warm_up: Sequence[list[int]],
        max_tokens: int,
    ) -> None:
        """Check every server, and let it decode ``warm_up`` unmeasured.

        Args:
            prompts: every first turn.
            max_tokens: most tokens of a response.

        Raises:
            UserError: a server cannot be measured on them, or is another one than that of the records.
        """
        for server in self.servers:
            facts = server.facts
            now = (facts.engine, facts.version, facts.model)
            for record in self.store.records:
                earlier = (record.engine, record.version, record.model)
                if record.server == server.name and earlier != now:
                    raise UserError(
                        f"{server.name} was {' '.join(earlier)} when {self.store.path} was begun, and is "
                        f"{' '.join(now)}.",
                        "Start the same server, or give another --out.",
                    )
            check_server(server, target, engine.tokenizer, prompts, max_tokens)
            server.warm_up(warm_up, max_tokens)
        self.store.start()

    def decode(
        self,
        engine: EvalEngine,
        batch: ServedPrompts,
        params: Sequence[SamplingParams],
        *,
        round: int,
        first: int,
        on_answers: Callable[[int], None],
    ) -> None:
        """Let every server decode a batch that it has not decoded.

        Args:
            engine: computes the logits where a text differs.
            params: temperature, seed and length of each response.
            round: number of the temperature and seed.
            first: number of the server that goes first.
            on_answers: called with the number of new answers.

        Raises:
            UserError: a server does not answer or refuses a prompt.
        """
        first %= len(self.servers)
        for server in [*self.servers[first:], *self.servers[:first]]:
            if self.store.get(server.name, round, batch.task, batch.turn, batch.ids) is not None:
                continue
            try:
                served = server.decode(batch.prompt_ids, params)
            except UserError as error:
                where = f"{batch.task} {', '.join(batch.ids)}, turn {batch.turn + 1}"
                raise UserError(f"{where}: {error.cause}", error.remedy) from None
            self.store.add(_record(server, engine, batch, served, params, round))
            on_answers(len(batch.prompts))


def _record(
    server: MeasuredServer,
    engine: EvalEngine,
    batch: ServedPrompts,
    served: ServedBatch,
    params: Sequence[SamplingParams],
    round: int,
) -> ServedRecord:
    """The record of a batch, each response compared with the plain one."""
    facts = server.facts
    num_batch_tokens = sum(response.num_decode_tokens for response in served.responses)
    answers = []
    for index, response in enumerate(served.responses):
        identical = None
        difference = None
        is_seeded = facts.engine == OURS and params[index].seed is not None
        if params[index].is_greedy or is_seeded:
            difference = compare_texts(engine, batch.prompt_ids[index], batch.plain[index], response)
            identical = difference is None
        # Responses share the seconds of their batch by their decoded tokens.
        share = response.num_decode_tokens / max(num_batch_tokens, 1)
        prompt = batch.prompts[index]
        seconds = served.decode_s * share
        answers.append(ServedAnswer(prompt.id, prompt.category, response, seconds, identical, difference))
    return ServedRecord(
        server=server.name,
        engine=facts.engine,
        version=facts.version,
        model=facts.model,
        shape=shape_name(served.counted, server.shape_of(served.counted)),
        round=round,
        task=batch.task,
        turn=batch.turn,
        answers=answers,
        counted=served.counted,
    )


def compare_texts(
    engine: EvalEngine, prompt_ids: list[int], plain: Answer, response: ServedResponse
) -> TextDifference | None:
    """Compare the text of a server's response with the plain one of our engine.

    The position is that of the tokens where the server gives them. Otherwise it is that of the plain
    token with the first different character.

    Args:
        engine: computes the logits where the tokens differ.
        prompt_ids: of the prompt.
    """
    plain_text = plain.text.rstrip(UNFINISHED)
    text = response.text.rstrip(UNFINISHED)
    if plain_text == text:
        return None
    character = _first_different_character(plain_text, text)

    # The token, and the gap of its logits.
    position = None
    logit_gap = None
    if response.token_ids:
        position = first_difference(plain.token_ids, response.token_ids)
    if position is None:
        position = _token_of_character(engine, plain.token_ids, character)
    elif position < min(len(plain.token_ids), len(response.token_ids)):
        logits = engine.logits(prompt_ids + plain.token_ids[:position])[-1]
        plain_token = plain.token_ids[position]
        logit_gap = float(logits[plain_token]) - float(logits[response.token_ids[position]])
    end = character + SHOWN_CHARACTERS
    return TextDifference(position, character, plain_text[character:end], text[character:end], logit_gap)


def _first_different_character(text: str, other: str) -> int:
    for index, (letter, other_letter) in enumerate(zip(text, other, strict=False)):
        if letter != other_letter:
            return index
    return min(len(text), len(other))


def _token_of_character(engine: EvalEngine, token_ids: list[int], character: int) -> int:
    """Index of the token with a character of the decoded text; the number of tokens at its end."""
    for index in range(len(token_ids)):
        text = engine.tokenizer.decode(token_ids[: index + 1], skip_special_tokens=True)
        if len(text.rstrip(UNFINISHED)) > character:
            return index
    return len(token_ids)
