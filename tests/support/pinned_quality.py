"""The shipped head on fixed prompts: what is decoded, and the figures that are pinned.

``python tests/support/pinned_quality.py`` measures anew and writes ``tests/quality/shipped_head.json``. Do
that only where the head, the prompts or a shape has changed on purpose, and say so in the commit.

Everything is greedy, in fp32 and on the CPU. Two sorts of figures are pinned:

* The tokens of every response, exactly. The order in which a kernel sums moves a logit by less than 1e-3
  (threads, instruction sets and batch sizes were tried), so tokens may differ between machines only where the
  two best logits are closer than that. ``least_lead`` is the smallest distance of the two along all
  responses; prompts were chosen so that it is at least :data:`LEAST_LEAD`.
* Counts of accepted tokens. A near tie in the draft may fall otherwise on another machine, which moves a
  count by one or two of hundreds: so accept lengths have a tolerance.
"""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_kit.core.output import RequestOutput
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.stats import SpecStats
from eagle_kit.data.tasks.sets import load_task
from eagle_kit.engine.llm import LLM
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.targets.target import Target

TESTS = Path(__file__).parents[1]
PINS = TESTS / "quality" / "shipped_head.json"
TARGET = "smollm2-135m-instruct"
HEAD = TESTS.parent / "checkpoints" / "smollm2-135m-eagle3"

SHAPES = ("1,1,2", "4,1,5", "5,4,16", "5,8,32")
NUM_TOKENS = 32
"""Most tokens of a response without a draft: so many are pinned."""
NUM_DRAFTED_TOKENS = 20
"""Most tokens of a response in a shape; a shape is verified some hundred times even so."""
BATCH_SIZE = 8
PROMPTS = {
    "human_eval": tuple(f"HumanEval/{number}" for number in (10, 30, 50, 60, 70, 80, 100, 120)),
    "ours": (
        "writing-01",
        "writing-05",
        "reasoning-05",
        "math-05",
        "code-01",
        "code-08",
        "extraction-04",
        "summarising-04",
    ),
}
"""Ids of the prompts, by task. Of a prompt with two turns the first one is taken."""
LEAST_LEAD = 0.02
"""Logit of a pinned token above the second best one, at least."""


def pinned_prompts() -> dict[str, Any]:
    """The prompts as an engine takes them, by ``task/id``."""
    prompts = {}
    for task, ids in PROMPTS.items():
        by_id = {prompt.id: prompt for prompt in load_task(task).prompts}
        for name in ids:
            prompts[f"{task}/{name}"] = by_id[name].given()
    return prompts


def open_engine(
    target: str | Target = TARGET, draft: "Path | DraftHead | None" = HEAD, **options: Any
) -> LLM:
    """An engine in fp32 on the CPU that measures nothing."""
    fixed = {"dtype": "float32", "device": "cpu", "max_context": 512}
    return LLM(target, draft, max_batch_size=BATCH_SIZE, shape="4,1,5", **{**fixed, **options})


def decode(llm: LLM, prompts: Iterable[Any], shape: str, num_tokens: int) -> list[RequestOutput]:
    """Greedy responses in one shape."""
    prompt_ids = [llm.tokenize_task(prompt) for prompt in prompts]
    return llm.chat(prompt_ids, SamplingParams(max_tokens=num_tokens), shape=shape)


def sum_of(outputs: Sequence[RequestOutput]) -> SpecStats:
    """Acceptance over all responses."""
    total = SpecStats()
    for output in outputs:
        total.add(output.stats)
    return total


def figures(stats: SpecStats) -> dict[str, Any]:
    """Counts and accept length of a shape, as they are pinned."""
    return {
        "accept_length": round(stats.accept_length, 4),
        "num_verifies": stats.num_verifies,
        "num_emitted_tokens": stats.num_emitted_tokens,
        "num_accepted_at": list(stats.num_accepted_at),
    }


@dataclass(frozen=True)
class Pins:
    """Contents of the pinned file.

    Attributes:
        tokens: of every response, by ``task/id``.
        shapes: what :func:`figures` says of each shape.
        few: the same of the cheap regime, see :data:`FEW`.
        least_lead: smallest distance of the two best logits along all responses.
    """

    tokens: dict[str, list[int]]
    shapes: dict[str, dict[str, Any]]
    least_lead: float
    few: dict[str, Any]


FEW_SHAPE = "4,1,5"
FEW_TOKENS = 32


def few_of(prompts: dict[str, Any]) -> list[str]:
    """Names of the prompts of the cheap regime: the first one of each task."""
    return [next(name for name in prompts if name.startswith(task)) for task in PROMPTS]


def read_pins() -> Pins:
    """The pinned figures."""
    return Pins(**json.loads(PINS.read_text(encoding="utf-8")))


def least_lead(llm: LLM, outputs: Sequence[RequestOutput]) -> float:
    """Smallest distance of a response's token to the second best one, in the target's logits."""
    leads = []
    for output in outputs:
        logits = llm.logits([*output.prompt_ids, *output.token_ids])
        # Row i predicts token i + 1; the last row predicts what was not decoded.
        predicting = logits[len(output.prompt_ids) - 1 : -1]
        best = predicting.topk(2).values
        leads.append(float((best[:, 0] - best[:, 1]).min()))
    return min(leads)


def measure() -> Pins:
    """Decode plainly and in every shape."""
    llm = open_engine()
    prompts = pinned_prompts()

    plain = decode(llm, prompts.values(), "none", NUM_TOKENS)
    tokens = {name: list(output.token_ids) for name, output in zip(prompts, plain, strict=True)}

    shapes = {}
    for shape in SHAPES:
        outputs = decode(llm, prompts.values(), shape, NUM_DRAFTED_TOKENS)
        expected = [ids[:NUM_DRAFTED_TOKENS] for ids in tokens.values()]
        assert [list(output.token_ids) for output in outputs] == expected, shape
        shapes[shape] = figures(sum_of(outputs))

    few = decode(llm, (prompts[name] for name in few_of(prompts)), FEW_SHAPE, FEW_TOKENS)
    return Pins(tokens, shapes, round(least_lead(llm, plain), 4), figures(sum_of(few)))


def write(pins: Pins) -> None:
    """Write the file, the tokens of a response on one line."""
    lines = [f"    {json.dumps(name)}: {json.dumps(ids)}" for name, ids in pins.tokens.items()]
    shapes = [f"    {json.dumps(name)}: {json.dumps(figure)}" for name, figure in pins.shapes.items()]
    text = (
        f'{{\n  "least_lead": {pins.least_lead},\n  "few": {json.dumps(pins.few)},\n'
        + '  "shapes": {\n'
        + ",\n".join(shapes)
        + '\n  },\n  "tokens": {\n'
        + ",\n".join(lines)
        + "\n  }\n}\n"
    )
    PINS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    found = measure()
    if found.least_lead < LEAST_LEAD:
        sys.exit(f"The two best logits come within {found.least_lead}; choose other prompts.")
    write(found)
    print(f"{PINS}: {found.shapes}")
