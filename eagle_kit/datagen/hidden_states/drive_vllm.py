"""vLLM, in an environment of its own, as the engine that computes states."""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import write_json_atomically
from eagle_kit.core.process import end_with_parent

WORKER = Path(__file__).parent / "worker" / "eagle_kit_vllm.py"
LAST_LINES = 12


def compute_states(
    python: str,
    model: Path,
    texts: Path,
    out: Path,
    layers: Sequence[int],
    dtype: str,
    max_length: int,
    count: int,
    *,
    engine_args: dict[str, Any] | None = None,
    progress: bool = True,
) -> None:
    """Have vLLM compute the states of ``texts`` that ``out`` lacks; broken off, the next call goes on.

    Args:
        python: of an environment with vLLM.
        texts: JSONL of ``{"input_ids"}``.
        layers: inputs of layers; the number of layers is the last one's output.
        count: number of texts.
        engine_args: further arguments of vLLM's ``LLM``, such as ``tensor_parallel_size``.

    Raises:
        UserError: vLLM cannot be started, or fails.
    """
    from tqdm import tqdm

    spec: dict[str, Any] = {
        "model": str(model),
        "texts": str(texts),
        "out": str(out),
        "layers": sorted(layers),
    }
    spec |= {"dtype": dtype, "max_length": max_length, "engine_args": engine_args or {}}
    place = texts.with_suffix(".spec.json")
    write_json_atomically(place, spec)
    found = len(list(out.glob("*.safetensors"))) if out.is_dir() else 0
    last: deque[str] = deque(maxlen=LAST_LINES)
    try:
        process = subprocess.Popen(
            [python, str(WORKER), str(place)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=end_with_parent(),
            env={**os.environ, "PYTHONPATH": str(WORKER.parent)},  # its own workers find the connector there
        )
    except OSError as error:
        raise UserError(
            f"{python} cannot be run ({error.strerror or error}).",
            "Name the python of an environment with vLLM with --engine-python.",
        ) from error
    assert process.stdout is not None
    with tqdm(total=count, initial=min(found, count), unit="text", disable=not progress) as bar:
        try:
            for line in process.stdout:
                if line.startswith("done "):
                    bar.update()
                else:
                    last.append(line.rstrip())
        except BaseException:
            process.terminate()
            raise
        finally:
            process.wait()
    if process.returncode:
        print("\n".join(last), file=sys.stderr)
        raise UserError(
            f"vLLM ended with the exit code {process.returncode}; its last lines are above.",
            "Correct what they say; what was computed is kept, and the same command goes on.",
        )
