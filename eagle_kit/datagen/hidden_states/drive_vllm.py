"""Hidden states by vLLM, which runs in an environment of its own."""

import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import write_json_atomically
from eagle_kit.core.process import end_with_parent, environment_of_others

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
    num_texts: int,
    *,
    engine_args: dict[str, Any] | None = None,
    progress: bool = True,
) -> None:
    """Have vLLM compute the hidden states of the ``texts`` that have no file in ``out``.

    vLLM writes a file as soon as its text is done, so a call after an interruption continues.

    Args:
        python: Python of an environment with vLLM.
        model: folder of the target.
        texts: JSONL file of ``{"input_ids": [...]}``.
        out: folder of the safetensors files.
        layers: layers whose inputs are written; the number of layers means the output of the last layer.
        dtype: vLLM's ``dtype``.
        max_length: tokens of the longest text.
        num_texts: number of texts.
        engine_args: further arguments of vLLM's ``LLM``, such as ``tensor_parallel_size``.
        progress: show a progress bar.

    Raises:
        UserError: vLLM cannot be started, or fails.
    """
    from tqdm import tqdm

    # What to compute, in a file for the worker.
    spec: dict[str, Any] = {
        "model": str(model),
        "texts": str(texts),
        "out": str(out),
        "layers": sorted(layers),
        "dtype": dtype,
        "max_length": max_length,
        "engine_args": engine_args or {},
    }
    spec_file = texts.with_suffix(".spec.json")
    write_json_atomically(spec_file, spec)
    num_found = len(list(out.glob("*.safetensors"))) if out.is_dir() else 0

    # Start vLLM. The processes that it starts import the connector from the worker's folder.
    try:
        process = subprocess.Popen(
            [python, str(WORKER), str(spec_file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=end_with_parent(),
            env={**environment_of_others(), "PYTHONPATH": str(WORKER.parent)},
        )
    except OSError as error:
        raise UserError(
            f"{python} cannot be run ({error.strerror or error}).",
            "Name the python of an environment with vLLM with --engine-python.",
        ) from error

    # Follow it to its end.
    assert process.stdout is not None
    num_done = min(num_found, num_texts)
    last_lines: deque[str] = deque(maxlen=LAST_LINES)
    with tqdm(total=num_texts, initial=num_done, unit="text", disable=not progress) as bar:
        try:
            for line in process.stdout:
                if line.startswith("done "):
                    bar.update()
                else:
                    last_lines.append(line.rstrip())
        except BaseException:
            process.terminate()
            raise
        finally:
            process.wait()
    if process.returncode:
        print("\n".join(last_lines), file=sys.stderr)
        raise UserError(
            f"vLLM ended with the exit code {process.returncode}; its last lines are above.",
            "Correct what they say; what was computed is kept, and the same command goes on.",
        )
