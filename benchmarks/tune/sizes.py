"""What a comparison compares."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.tune.prompts import OWN_TASKS

PLAIN = "none"
AUTO = "auto"
SHAPES = ("1,1,2", "2,1,3", "3,1,4", "4,1,5", "5,4,16")
TOKENS_OF_A_ROUND = 1024
"""At most."""


@dataclass(frozen=True)
class Sizes:
    """What is compared.

    Attributes:
        tasks: names of tasks or files, whose first turns are taken; ``noise`` (random strings), ``languages``
            (other than English) and ``mixed`` (code, prose and noise, one after another) are made here.
        batches: batch sizes.
        shapes: fixed shapes.
        rounds: interleaved rounds, each with prompts of its own.
        max_tokens: of a response; less in large batches, whose rounds have :data:`TOKENS_OF_A_ROUND`.
        compare: also decode with transformers, plainly and with prompt look-up, at batch sizes 1 and 8,
            beside the first draft.
        vllm: python of an environment with vLLM, to decode with it as well.
    """

    tasks: Sequence[str] = ("human_eval", "ours", *OWN_TASKS)
    batches: Sequence[int] = (1, 4, 8, 32)
    shapes: Sequence[str] = SHAPES
    rounds: int = 7
    max_tokens: int = 64
    compare: bool = True
    vllm: str | None = None
