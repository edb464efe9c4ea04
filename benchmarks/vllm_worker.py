"""An engine of vLLM that times what it is asked; run by the python of vLLM's environment, so without this
package.

Its argument is JSON: ``target`` and ``head`` folders, ``drafts`` (0: none), ``batch``. Every line of stdin is
JSON, prompts and a number of tokens; every line of stdout the seconds of the responses.
"""

import importlib
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Serve stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes into stdout
    settings = json.loads(sys.argv[1])
    vllm: Any = importlib.import_module("vllm")
    draft = {"method": "eagle3", "model": settings["head"], "num_speculative_tokens": settings["drafts"]}
    engine = vllm.LLM(
        settings["target"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=1280,
        max_num_seqs=max(2, settings["batch"]),
        speculative_config=draft if settings["drafts"] else None,
    )
    for line in sys.stdin:
        prompts, num_tokens = json.loads(line)
        params = vllm.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        begun = time.perf_counter()
        outputs = engine.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
        print(seconds, file=answers, flush=True)


if __name__ == "__main__":
    main()
