"""Decode every prompt plainly and with every draft and shape, side by side in one run.

Speed drifts with the machine (clock, neighbours), so the settings take turns on each batch of prompts, and
which one goes first rotates: drift then hits all of them alike, and their ratio survives it.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from eagle_kit.core.errors import UserError
from eagle_kit.core.output import RequestOutput
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.data.tasks.sets import EvalPrompt, Task
from eagle_kit.eval.answers import PLAIN, Answer, AnswerStore, Setting
from eagle_kit.eval.engines import EvalEngine
from eagle_kit.eval.identity import compare_outputs
from eagle_kit.eval.servers.server_round import ServedPrompts, ServerRound
from eagle_kit.report.stages import TimeLeft, mute, say

WARM_UP_TOKENS = 16
Engines = dict[str | None, EvalEngine]
"""By draft name; None is the plain one."""


class PromptBatch(NamedTuple):
    """Prompts of a task that are decoded together, in one of their turns."""

    task: Task
    prompts: list[EvalPrompt]
    turn: int


@dataclass(frozen=True)
class Decoder:
    """Decodes the prompts of ``tasks`` with all ``runs`` and fills ``store`` with the answers.

    ``servers``, if there are any, decode each batch after all ``runs``.
    """

    tasks: list[Task]
    runs: list[Setting]
    params: SamplingParams
    batch_size: int
    store: AnswerStore
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
                    self.store.add(self._answers(engines[None], batch, outputs))
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
        for task in self.tasks:
            for start in range(0, len(task.prompts), self.batch_size):
                prompts = task.prompts[start : start + self.batch_size]
                for turn in range(max(len(prompt.turns) for prompt in prompts)):
                    yield PromptBatch(task, [prompt for prompt in prompts if turn < len(prompt.turns)], turn)

    def _pending(self, batch: PromptBatch) -> PromptBatch:
        """The prompts of a batch that lack an answer of some setting."""
        task, prompts, turn = batch
        pending = [prompt for prompt in prompts if self.store.get((task.name, prompt.id, turn)) is None]
        return batch._replace(prompts=pending)

    def _num_pending_servers(self, batch: PromptBatch) -> int:
        """Servers that have not decoded a batch."""
        if self.servers is None:
            return 0
        ids = [prompt.id for prompt in batch.prompts]
        return self.servers.num_pending(0, batch.task.name, batch.turn, ids)

    def _decode_by_servers(self, engine: EvalEngine, batch: PromptBatch, number: int, bar: Any) -> None:
        """Let every server decode a batch, of which our engine's answers are kept."""
        assert self.servers is not None
        prompt_ids = []
        plain = []
        for prompt in batch.prompts:
            responses = [self._plain_response(batch.task, prompt, turn) for turn in range(batch.turn)]
            prompt_ids.append(engine.tokenize_task(prompt.given(responses)))
            group = self.store.get((batch.task.name, prompt.id, batch.turn))
            assert group is not None, "our engine decodes first"
            plain.append(group[PLAIN])
        served = ServedPrompts(batch.task.name, batch.turn, batch.prompts, prompt_ids, plain)
        self.servers.decode(engine, served, self.params, round=0, first=number, on_answers=bar.update)

    def _warm_up(self, engines: Engines) -> None:
        """Decode a little with every setting, unmeasured: first calls allocate, compile and fill caches."""
        prompts = [prompt.given() for prompt in self.tasks[0].prompts[: self.batch_size]]
        params = SamplingParams(max_tokens=min(WARM_UP_TOKENS, self.params.max_tokens))
        for run in self.runs:
            engine = engines[run.draft]
            engine.chat([engine.tokenize_task(prompt) for prompt in prompts], params, shape=run.shape)

    def _decode(
        self, engines: Engines, batch: PromptBatch, runs: Sequence[Setting], bar: Any
    ) -> dict[Setting, list[RequestOutput]]:
        """Decode a batch with every setting, in the order of ``runs``."""
        # Later turns follow plain decoding's responses to the earlier ones, in every setting.
        prompts = []
        for prompt in batch.prompts:
            responses = [self._plain_response(batch.task, prompt, turn) for turn in range(batch.turn)]
            prompts.append(prompt.given(responses))

        outputs = {}
        for run in runs:
            engine = engines[run.draft]
            try:
                prompt_ids = [engine.tokenize_task(prompt) for prompt in prompts]
                outputs[run] = engine.chat(prompt_ids, self.params, shape=run.shape)
            except UserError as error:
                ids = ", ".join(prompt.id for prompt in batch.prompts)
                where = f"{batch.task.name} {ids}, turn {batch.turn + 1}"
                raise UserError(f"{where}: {error.cause}", error.remedy) from None
            bar.update(len(prompts))
        return outputs

    def _answers(
        self, engine: EvalEngine, batch: PromptBatch, outputs: dict[Setting, list[RequestOutput]]
    ) -> list[Answer]:
        """Turn outputs into records, each compared with the plain one."""
        answers = []
        for run in self.runs:
            # Responses share the seconds of their batch by their decoded tokens.
            seconds = batch_decode_seconds(outputs[run])
            num_batch_tokens = sum(_num_decoded(output) for output in outputs[run])
            for prompt, output, plain in zip(batch.prompts, outputs[run], outputs[PLAIN], strict=True):
                share = _num_decoded(output) / max(num_batch_tokens, 1)
                answer = Answer(
                    task=batch.task.name,
                    id=prompt.id,
                    category=prompt.category,
                    turn=batch.turn,
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
                if run != PLAIN:
                    difference = compare_outputs(engine, plain, output)
                    answer.identical = difference is None
                    answer.difference = None if difference is None else asdict(difference)
                answers.append(answer)
        return answers

    def _plain_response(self, task: Task, prompt: EvalPrompt, turn: int) -> str:
        group = self.store.get((task.name, prompt.id, turn))
        assert group is not None, "turns are decoded in order"
        return group[PLAIN].text


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
