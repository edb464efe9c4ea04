"""vLLM with a draft head on prompts of token ids; run by the python of its environment, without eagle_kit.

Its argument is a file of JSON: ``target`` and ``head`` folders, ``drafts``, ``prompts``, ``num_tokens`` and
``out``.
It writes ``out``: ``tokens`` of every response, ``num_drafts`` and ``accepted`` by position, ``versions``.
"""

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Decode and write the result."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    vllm: Any = importlib.import_module("vllm")
    engine = vllm.LLM(
        job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=2,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": job["head"],
            "num_speculative_tokens": job["drafts"],
        },
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=job["num_tokens"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = engine.generate(prompts, params, use_tqdm=False)

    result: dict[str, Any] = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }
    result["versions"]["vllm"] = vllm.__version__
    for metric in engine.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            result["num_drafts"] = metric.value
        if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            result["accepted"] = list(metric.values)
    Path(job["out"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
