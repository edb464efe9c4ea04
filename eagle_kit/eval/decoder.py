"""Decode every prompt plainly and with every draft and shape, side by side in one run.

Speed drifts with the machine (clock, neighbours), so the settings take turns on each batch of prompts, and
which one goes first rotates: drift then hits all of them alike, and their ratio survives it.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.output import RequestOutput
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.data.tasks.sets import EvalPrompt, Task
from eagle_kit.eval.answers import PLAIN, Answer, AnswerStore, Setting
from eagle_kit.eval.engines import EvalEngine
from eagle_kit.eval.identity import compare_outputs
from eagle_kit.report.stages import TimeLeft, mute, say

WARM_UP_TOKENS = 16
Engines = dict[str | None, EvalEngine]
"""By draft name; None is the plain one."""


@dataclass(frozen=True)
class Decoder:
    """Decodes the prompts of ``tasks`` with all ``runs`` and fills ``store`` with the answers."""

    tasks: list[Task]
    runs: list[Setting]
    params: SamplingParams
    batch_size: int
    store: AnswerStore
    show_progress: bool

    @property
    def num_pending(self) -> int:
        """User turns that lack an answer of some setting."""
        return sum(
            self.store.get((task.name, prompt.id, turn)) is None
            for task in self.tasks
            for prompt in task.prompts
            for turn in range(len(prompt.turns))
        )

    def run(self, engines: Engines) -> None:
        """Decode all prompts that are not done. Ctrl-C says how to go on and is passed on."""
        from tqdm import tqdm

        total = self.num_pending * len(self.runs)
        bar = tqdm(total=total, unit="answer", dynamic_ncols=True, disable=not self.show_progress)
        try:
            bar.set_description("warm-up")
            self._warm_up(engines)
            left = TimeLeft(
                total, sample=self.batch_size * len(self.runs), prints=say if self.show_progress else mute
            )
            for number, (task, prompts, turn) in enumerate(self._batches()):
                todo = [p for p in prompts if self.store.get((task.name, p.id, turn)) is None]
                if todo:
                    bar.set_description(task.name)
                    outputs = self._decode(engines, task, todo, turn, number % len(self.runs), bar)
                    self.store.add(self._answers(engines[None], task, todo, turn, outputs))
                    left.count(len(todo) * len(self.runs))
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

    def _batches(self) -> Iterator[tuple[Task, list[EvalPrompt], int]]:
        """(task, prompts, turn), the same sequence on every resume."""
        for task in self.tasks:
            for start in range(0, len(task.prompts), self.batch_size):
                prompts = task.prompts[start : start + self.batch_size]
                for turn in range(max(len(prompt.turns) for prompt in prompts)):
                    yield task, [prompt for prompt in prompts if turn < len(prompt.turns)], turn

    def _warm_up(self, engines: Engines) -> None:
        """Decode a little with every setting, unmeasured: first calls allocate, compile and fill caches."""
        prompts = [prompt.given() for prompt in self.tasks[0].prompts[: self.batch_size]]
        params = SamplingParams(max_tokens=min(WARM_UP_TOKENS, self.params.max_tokens))
        for run in self.runs:
            engine = engines[run.draft]
            engine.chat([engine.tokenize_task(prompt) for prompt in prompts], params, shape=run.shape)

    def _decode(
        self, engines: Engines, task: Task, prompts: list[EvalPrompt], turn: int, first: int, bar: Any
    ) -> dict[Setting, list[RequestOutput]]:
        """Decode one turn of a batch of prompts with every setting, beginning with setting ``first``."""
        given = [p.given([self._plain_reply(task, p, earlier) for earlier in range(turn)]) for p in prompts]
        outputs = {}
        for run in self.runs[first:] + self.runs[:first]:
            try:
                engine = engines[run.draft]
                prompt_ids = [engine.tokenize_task(prompt) for prompt in given]
                outputs[run] = engine.chat(prompt_ids, self.params, shape=run.shape)
            except UserError as error:
                ids = ", ".join(prompt.id for prompt in prompts)
                raise UserError(f"{task.name} {ids}, turn {turn + 1}: {error.cause}", error.remedy) from None
            bar.update(len(prompts))
        return outputs

    def _answers(
        self,
        engine: EvalEngine,
        task: Task,
        prompts: list[EvalPrompt],
        turn: int,
        outputs: dict[Setting, list[RequestOutput]],
    ) -> list[Answer]:
        """Turn outputs into records, each compared with the plain one."""
        answers = []
        for run in self.runs:
            seconds = batch_decode_seconds(outputs[run])
            num_tokens = sum(max(len(output.token_ids) - 1, 0) for output in outputs[run])
            for prompt, output, plain in zip(prompts, outputs[run], outputs[PLAIN], strict=True):
                difference = None if run == PLAIN else compare_outputs(engine, plain, output)
                share = max(len(output.token_ids) - 1, 0) / num_tokens if num_tokens else 0.0
                answers.append(
                    Answer(
                        task.name,
                        prompt.id,
                        prompt.category,
                        turn,
                        *run,
                        num_prompt_tokens=len(output.prompt_ids),
                        token_ids=list(output.token_ids),
                        finish_reason=output.finish_reason,
                        stats=output.stats,
                        prefill_s=output.prefill_s,
                        decode_s=output.decode_s,
                        decode_share_s=seconds * share,
                        identical=None if run == PLAIN else difference is None,
                        difference=None if difference is None else asdict(difference),
                        text=output.text,
                    )
                )
        return answers

    def _plain_reply(self, task: Task, prompt: EvalPrompt, turn: int) -> str:
        group = self.store.get((task.name, prompt.id, turn))
        assert group is not None, "turns are decoded in order"
        return group[PLAIN].text


def batch_decode_seconds(outputs: Sequence[RequestOutput]) -> float:
    """Seconds that a batch spent decoding, from its last prefill to its last token.

    The engine prefills the requests of a batch one after another before it decodes them together, so the own
    ``decode_s`` of an early request holds the prefill of the later ones, which is not decoding.
    """
    clock = last_token = 0.0
    for output in outputs:
        clock += output.prefill_s
        last_token = max(last_token, clock + output.decode_s)
    return max(last_token - clock, 0.0)
