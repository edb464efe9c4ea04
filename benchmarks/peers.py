"""Other engines on the same prompts: transformers in this process, vLLM in processes of its own."""

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.case import wall_seconds
from eagle_kit.core.errors import UserError
from eagle_kit.core.process import environment_of_others
from eagle_kit.drafts.files.export import export_draft
from eagle_kit.models.loading.source import resolve_target

Prompts = Sequence[list[int]]
Seconds = Callable[[Prompts, int], float]
"""Time in which a peer responses to prompts with a number of tokens each, greedily, stopping nowhere."""

VLLM_DRAFTS = 0, 1, 2, 4
"""Numbers of draft tokens that vLLM is tried with; 0 is plain decoding."""
WORKER = Path(__file__).with_name("vllm_worker.py")


def peer_rate(seconds: Seconds, prompts: Prompts, num_tokens: int = 64) -> float:
    """Tokens/s of a peer, the prefill taken off by a second run."""
    return len(prompts) * (num_tokens - 1) / (seconds(prompts, num_tokens) - seconds(prompts, 1))


def transformers_model(target: str, like: torch.Tensor) -> Any:
    """Load a target in transformers, with the dtype and on the device of a weight."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(resolve_target(target)), dtype=like.dtype, trust_remote_code=False
    )
    return model.to(like.device).eval()


@torch.inference_mode()
def transformers_seconds(model: Any, prompts: Prompts, num_tokens: int, **options: Any) -> float:
    """Time transformers' ``generate`` with ``options`` of its own, see :data:`Seconds`."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    sizes = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "eos_token_id": None}
    greedy = {"do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    return wall_seconds(lambda: model.generate(ids, **sizes, **greedy, **options), ids.device)


@contextmanager
def vllm_engines(python: str, target: str, draft: str, batch_size: int) -> Iterator[dict[str, Seconds]]:
    """Run vLLM with a head and without.

    Args:
        python: interpreter of an environment in which vLLM is installed.
        batch_size: most prompts at a time.

    Yields:
        What times each engine, by name.

    Raises:
        UserError: vLLM does not start there.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        export_draft(draft, folder / "head", target=target, dtype=torch.float32, format="vllm")
        settings = {"target": str(resolve_target(target)), "head": str(folder / "head"), "batch": batch_size}
        yield {
            f"vLLM, {count} drafts" if count else "vLLM, plain": stack.enter_context(
                _vllm(python, {**settings, "drafts": count})
            )
            for count in VLLM_DRAFTS
        }


@contextmanager
def _vllm(python: str, settings: dict[str, Any]) -> Iterator[Seconds]:
    """Run one engine until the context ends."""
    environment = {
        **environment_of_others(),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    environment.pop("PYTHONPATH", None)
    command = [python, str(WORKER), json.dumps(settings)]
    with (
        TemporaryDirectory() as folder,
        open(Path(folder) / "log", "w+") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        try:
            yield partial(_ask, process, Path(folder) / "log")
        finally:
            process.kill()


def _ask(process: "subprocess.Popen[str]", log: Path, prompts: Prompts, num_tokens: int) -> float:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps([list(prompts), num_tokens]) + "\n")
        process.stdin.flush()
        return float(process.stdout.readline())
    except (BrokenPipeError, ValueError) as error:
        last = log.read_text().strip().splitlines()[-1:]
        raise UserError(
            f"vLLM did not answer: {' '.join(last)}",
            "Give --vllm the python of an environment in which vLLM runs.",
        ) from error
