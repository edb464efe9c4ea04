"""Program that vLLM's Python runs to compute states of texts; it imports nothing of this package.

``python eagle_kit_vllm.py SPEC``: SPEC is a JSON file with ``model``, ``texts`` (a JSONL file of
``{"input_ids"}``), ``out`` (a folder), ``layers``, ``dtype``, ``max_length``, ``engine_args``. A text whose
file is there is not computed again. One line is printed for every text that is done.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
AT_A_TIME = 64


def name_of(ids: list[int]) -> str:
    """Name of a text's file."""
    return hashlib.sha256(torch.tensor(ids, dtype=torch.int64).numpy().tobytes()).hexdigest()[:24]


def make_connector() -> Any:
    """Connector that writes on any device: vLLM's own needs pinned memory and CUDA's streams."""
    from safetensors.torch import save_file
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        ExampleHiddenStatesConnector,
        extract_from_kv_cache,
    )

    class Written:
        """Stands for the end of a copy, which is over."""

        def query(self) -> bool:
            """Return True."""
            return True

    class PlainConnector(ExampleHiddenStatesConnector):
        """vLLM's connector, which writes at once."""

        def _submit_async_write(self, pending: Any) -> None:
            if not self._is_tp_rank_zero:
                return
            blocks = torch.tensor(pending.block_ids, dtype=torch.long)[:, None] * self._block_size
            slots = (blocks + torch.arange(self._block_size)).flatten().to(self._kv_cache.device)
            states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).cpu().contiguous()
            path = Path(pending.filename)
            path.parent.mkdir(parents=True, exist_ok=True)
            target = path.parent / f"{name_of(pending.token_ids.tolist())}.safetensors"
            work = target.with_suffix(".partial")
            save_file({"hidden_states": states, "token_ids": pending.token_ids.clone()}, work)
            work.replace(target)
            self._req_copy_events[pending.req_id] = Written()
            print(f"done {target.name}", flush=True)

    return PlainConnector


def main(spec_path: str) -> None:
    """Compute what is missing."""
    spec = json.loads(Path(spec_path).read_text())
    out = Path(spec["out"])
    out.mkdir(parents=True, exist_ok=True)
    with open(spec["texts"], encoding="utf-8") as file:
        texts = [json.loads(line)["input_ids"] for line in file]
    missing = [ids for ids in texts if not (out / f"{name_of(ids)}.safetensors").exists()]
    if not missing:
        return
    from vllm import LLM, SamplingParams

    usual = {"dtype": spec["dtype"], "max_model_len": spec["max_length"] + 1, "enable_prefix_caching": False}
    usual["enforce_eager"] = not torch.cuda.is_available()
    llm = LLM(
        spec["model"],
        **{**usual, **spec["engine_args"]},
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": spec["layers"]}},
        },
        kv_transfer_config={
            "kv_connector": "PlainConnector",
            "kv_connector_module_path": "eagle_kit_vllm",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(out), "use_synchronization_lock": False},
        },
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    for first in range(0, len(missing), AT_A_TIME):
        part = missing[first : first + AT_A_TIME]
        llm.generate([{"prompt_token_ids": ids} for ids in part], params, use_tqdm=False)
        for _ in range(8):  # in one process, what has just ended is written in the step after
            if all((out / f"{name_of(ids)}.safetensors").exists() for ids in part):
                break
            llm.llm_engine.engine_core.get_output()
    lost = [ids for ids in missing if not (out / f"{name_of(ids)}.safetensors").exists()]
    if lost:
        sys.exit(f"vLLM wrote no states of {len(lost)} of {len(missing)} texts")


def __getattr__(name: str) -> Any:
    """Make the connector when vLLM, or a worker that it has started, asks for it by name."""
    if name == "PlainConnector":
        return make_connector()
    raise AttributeError(name)


if __name__ == "__main__":
    main(sys.argv[1])
