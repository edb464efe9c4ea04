"""Decode every prompt plainly and with every setting, side by side in one run.

Speed drifts with the machine (clock, neighbours), so the settings take turns on each batch of prompts, and
which one goes first rotates: drift then hits all of them alike, and their ratio survives it.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from eagle_kit.config.eval import Round
from eagle_kit.core.errors import UserError
from eagle_kit.core.output import RequestOutput
from eagle_kit.core.sampling_params import MAX_LOGPROBS, SamplingParams
from eagle_kit.data.tasks.sets import EvalPrompt, Task
from eagle_kit.eval.answers import PLAIN, Answer, AnswerKey, AnswerStore, Setting, seed_of_prompt
from eagle_kit.eval.distribution import sample_places, total_variations
from eagle_kit.eval.engines import EvalEngine
from eagle_kit.eval.identity import compare_outputs
from eagle_kit.eval.promises import EXACT, Promise, Promises
from eagle_kit.eval.servers.measured_server import WARM_UP, WARM_UP_TOKENS
from eagle_kit.eval.servers.server_round import ServedPrompts, ServerRound
from eagle_kit.report.stages import TimeLeft, mute, say

RECORDED_TOKENS = 32
"""First tokens of a response at which distributions of another target are compared."""
Engines = dict[str | None, EvalEngine]
"""By the name of the setting; None is the plain one."""


class PromptBatch(NamedTuple):
    """Prompts of a task that are decoded together, in one of their turns and one of the rounds."""

    round: Round
    task: Task
    prompts: list[EvalPrompt]
    turn: int

    def key(self, prompt: EvalPrompt, turn: int | None = None) -> AnswerKey:
        """Key of the answers to a prompt in this round, in the batch's turn or an earlier one."""
        number = self.turn if turn is None else turn
        return self.task.name, prompt.id, number, self.round.temperature, self.round.seed


@dataclass(frozen=True)
class Decoder:
    """Decodes the prompts of ``tasks`` with all ``runs`` in all ``rounds`` and fills ``store`` with the
    answers.

    ``params`` are those of a response, without the temperature and the seed of its round. ``servers``, if
    there are any, decode each batch after all ``runs``.
    """

    tasks: list[Task]
    runs: list[Setting]
    rounds: list[Round]
    params: SamplingParams
    batch_size: int
    store: AnswerStore
    promises: Promises
    show_progress: bool
    servers: ServerRound | None = None

    @property
    def num_pending(self) -> int:
        """Answers that are missing, those of all settings to a turn where one is missing."""
        num_pending = 0
        for batch in self._batches():
            num_pending += len(self._pending(batch).prompts) * len(self.runs)
            num_pending += len(batch.prompts) * self._num_pending_servers(batch)
        return num_pending

    def run(self, engines: Engines) -> None:
        """Decode all prompts that are not done. Ctrl-C says how to go on and is passed on."""
        from tqdm import tqdm

        num_runs = len(self.runs)
        total = self.num_pending
        bar = tqdm(total=total, unit="answer", dynamic_ncols=True, disable=not self.show_progress)
        try:
            bar.set_description("warm-up")
            self._warm_up(engines)

            # Decode batch by batch. Another setting goes first each time.
            prints = say if self.show_progress else mute
            num_settings = num_runs + (len(self.servers.servers) if self.servers is not None else 0)
            time_left = TimeLeft(total, sample=self.batch_size * num_settings, prints=prints)
            for number, whole in enumerate(self._batches()):
                batch = self._pending(whole)
                bar.set_description(whole.task.name)
                done = bar.n
                if batch.prompts:
                    first = number % num_runs
                    outputs = self._decode(engines, batch, self.runs[first:] + self.runs[:first], bar)
                    self.store.add(self._answers(engines, batch, outputs))
                if self._num_pending_servers(whole):
                    self._decode_by_servers(engines[None], whole, number, bar)
                if bar.n > done:
                    time_left.count(bar.n - done)
        except KeyboardInterrupt:
            bar.close()
            print(
                f"Stopped: {len(self.store.answers)} answers are kept in {self.store.folder}; "
                "the same command goes on from there.",
                file=sys.stderr,
            )
            raise
        finally:
            bar.close()

    def _batches(self) -> Iterator[PromptBatch]:
        """All batches, the same sequence on every resume."""
        for round in self.rounds:
            for task in self.tasks:
                for start in range(0, len(task.prompts), self.batch_size):
                    prompts = task.prompts[start : start + self.batch_size]
                    for turn in range(max(len(prompt.turns) for prompt in prompts)):
                        asked = [prompt for prompt in prompts if turn < len(prompt.turns)]
                        yield PromptBatch(round, task, asked, turn)

    def _pending(self, batch: PromptBatch) -> PromptBatch:
        """The prompts of a batch that lack an answer of some setting."""
        pending = [prompt for prompt in batch.prompts if self.store.get(batch.key(prompt)) is None]
        return batch._replace(prompts=pending)

    def _num_pending_servers(self, batch: PromptBatch) -> int:
        """Servers that have not decoded a batch."""
        if self.servers is None:
            return 0
        ids = [prompt.id for prompt in batch.prompts]
        return self.servers.num_pending(batch.round.number, batch.task.name, batch.turn, ids)

    def _params(self, batch: PromptBatch) -> list[SamplingParams]:
        """Sampling parameters of the response to each prompt."""
        temperature = batch.round.temperature
        if temperature == 0:
            return [self.params] * len(batch.prompts)
        params = []
        for prompt in batch.prompts:
            seed = seed_of_prompt(batch.round.seed, batch.task.name, prompt.id, batch.turn)
            params.append(replace(self.params, temperature=temperature, seed=seed))
        return params

    def _decode_by_servers(self, engine: EvalEngine, batch: PromptBatch, number: int, bar: Any) -> None:
        """Let every server decode a batch, of which our engine's answers are kept."""
        assert self.servers is not None
        prompt_ids = [engine.tokenize_task(prompt) for prompt in self._given(batch)]
        plain = []
        for prompt in batch.prompts:
            group = self.store.get(batch.key(prompt))
            assert group is not None, "our engine decodes first"
            plain.append(group[PLAIN])
        served = ServedPrompts(batch.task.name, batch.turn, batch.prompts, prompt_ids, plain)
        self.servers.decode(
            engine,
            served,
            [replace(each, cache_salt=str(batch.round.number)) for each in self._params(batch)],
            round=batch.round.number,
            first=number,
            on_answers=bar.update,
        )

    def _warm_up(self, engines: Engines) -> None:
        """Decode a little with every setting, unmeasured: first calls allocate, compile and fill caches."""
        prompts = [prompt.given() for prompt in self.tasks[0].prompts[: self.batch_size]]
        short = replace(
            self.params, max_tokens=min(WARM_UP_TOKENS, self.params.max_tokens), cache_salt=WARM_UP, seed=0
        )

        # Greedy and sampled cycles are captured apart.
        kinds = {round.temperature > 0: round.temperature for round in self.rounds}
        for run in self.runs:
            engine = engines[run.draft]
            prompt_ids = [engine.tokenize_task(prompt) for prompt in prompts]
            for temperature in kinds.values():
                params = replace(short, temperature=temperature)
                engine.chat(prompt_ids, [params] * len(prompts), shape=run.shape)

    def _decode(
        self, engines: Engines, batch: PromptBatch, runs: Sequence[Setting], bar: Any
    ) -> dict[Setting, list[RequestOutput]]:
        """Decode a batch with every setting, in the order of ``runs``."""
        prompts = self._given(batch)
        outputs = {}
        for run in runs:
            # N-grams and cached prefixes are those of this setting in this round.
            engine = engines[run.draft]
            salt = f"{run.draft} {run.shape} {batch.round.number}"
            params = [replace(each, cache_salt=salt) for each in self._params(batch)]
            try:
                prompt_ids = [engine.tokenize_task(prompt) for prompt in prompts]
                outputs[run] = engine.chat(prompt_ids, params, shape=run.shape)
            except UserError as error:
                ids = ", ".join(prompt.id for prompt in batch.prompts)
                where = f"{batch.task.name} {ids}, turn {batch.turn + 1}"
                raise UserError(f"{where}: {error.cause}", error.remedy) from None
            bar.update(len(prompts))
        return outputs

    def _answers(
        self, engines: Engines, batch: PromptBatch, outputs: dict[Setting, list[RequestOutput]]
    ) -> list[Answer]:
        """Turn outputs into records, each compared with the plain one."""
        engine = engines[None]
        answers = []
        for run in self.runs:
            # Responses share the seconds of their batch by their decoded tokens.
            seconds = batch_decode_seconds(outputs[run])
            num_batch_tokens = sum(_num_decoded(output) for output in outputs[run])
            promise = self.promises.get(run.draft, EXACT).at(batch.round.temperature)
            of_run = []
            for prompt, output, plain in zip(batch.prompts, outputs[run], outputs[PLAIN], strict=True):
                share = _num_decoded(output) / max(num_batch_tokens, 1)
                answer = Answer(
                    task=batch.task.name,
                    id=prompt.id,
                    category=prompt.category,
                    turn=batch.turn,
                    temperature=batch.round.temperature,
                    seed=batch.round.seed,
                    draft=run.draft,
                    shape=run.shape,
                    num_prompt_tokens=len(output.prompt_ids),
                    token_ids=list(output.token_ids),
                    finish_reason=output.finish_reason,
                    stats=output.stats,
                    prefill_s=output.prefill_s,
                    decode_s=output.decode_s,
                    decode_share_s=seconds * share,
                    text=output.text,
                )
                if run != PLAIN and promise is not Promise.DISTRIBUTION:
                    difference = compare_outputs(engine, plain, output)
                    answer.identical = difference is None
                    answer.difference = None if difference is None else asdict(difference)
                of_run.append(answer)
            self._judge(engines, batch, run, of_run)
            answers += of_run
        return answers

    def _judge(self, engines: Engines, batch: PromptBatch, run: Setting, answers: list[Answer]) -> None:
        """Compare the distributions of a setting that does not promise its text with the plain target's.

        Args:
            answers: of ``run`` to the prompts of the batch; their distances are filled in.
        """
        promises = self.promises.get(run.draft, EXACT)
        if run == PLAIN or promises.at(batch.round.temperature) is Promise.TEXT:
            return
        plain = engines[None]
        prompt_ids = [plain.tokenize_task(prompt) for prompt in self._given(batch)]
        params = self._params(batch)

        # Samples against the plain target's distributions.
        if batch.round.temperature > 0:
            for answer, ids, each in zip(answers, prompt_ids, params, strict=True):
                logits = _response_logits(plain, ids, answer.token_ids)
                answer.places = sample_places(logits, answer.token_ids, each)

        # Distributions of another target, which are recorded in responses of their own: it takes time.
        if not promises.has_same_target:
            num_tokens = min(RECORDED_TOKENS, self.params.max_tokens)
            records = [replace(each, logprobs=MAX_LOGPROBS, max_tokens=num_tokens) for each in params]
            outputs = engines[run.draft].chat(prompt_ids, records, shape=run.shape)
            for answer, output in zip(answers, outputs, strict=True):
                logits = _response_logits(plain, output.prompt_ids, output.token_ids)
                answer.total_variations = total_variations(logits, output.logprobs)

    def _given(self, batch: PromptBatch) -> list[Any]:
        """The prompts of a batch. Later turns follow plain decoding's responses to the earlier ones, in every
        setting."""
        prompts = []
        for prompt in batch.prompts:
            responses = [self._plain_response(batch, prompt, turn) for turn in range(batch.turn)]
            prompts.append(prompt.given(responses))
        return prompts

    def _plain_response(self, batch: PromptBatch, prompt: EvalPrompt, turn: int) -> str:
        """Plain decoding's response to an earlier turn of a prompt, in the batch's round."""
        group = self.store.get(batch.key(prompt, turn))
        assert group is not None, "turns are decoded in order"
        return group[PLAIN].text


def _response_logits(engine: EvalEngine, prompt_ids: list[int], token_ids: list[int]) -> Any:
    """Logits ``[T, V]`` of the target before each of the T tokens of a response."""
    return engine.logits(prompt_ids + token_ids)[len(prompt_ids) - 1 : -1]


def _num_decoded(output: RequestOutput) -> int:
    """Tokens that decoding produced: all but the first, which comes from prefill."""
    return max(len(output.token_ids) - 1, 0)


def batch_decode_seconds(outputs: Sequence[RequestOutput]) -> float:
    """Seconds that a batch spent decoding, from its last prefill to its last token.

    The engine prefills the requests of a batch one after another before it decodes them together.
    So ``decode_s`` of an early request includes the prefill of the later ones, which is not
    decoding.
    """
    clock = 0.0
    last_token = 0.0
    for output in outputs:
        clock += output.prefill_s
        last_token = max(last_token, clock + output.decode_s)
    return max(last_token - clock, 0.0)
