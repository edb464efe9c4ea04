"""Program that vLLM's Python runs to compute states of texts; it imports nothing of this package.

``python eagle_kit_vllm.py SPEC``: SPEC is a JSON file with ``model``, ``texts`` (a JSONL file of
``{"input_ids": [...]}``), ``out`` (a folder), ``layers``, ``dtype``, ``max_length``, ``engine_args``. A text
that has a file in ``out`` is not computed again. A line ``done FILE`` is printed for every finished text.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
TEXTS_PER_CALL = 64
MOST_STEPS = 8
"""Engine steps after a call in which its last files must be written."""


def name_of(ids: list[int]) -> str:
    """Name of a text's file."""
    return hashlib.sha256(torch.tensor(ids, dtype=torch.int64).numpy().tobytes()).hexdigest()[:24]


def make_connector() -> Any:
    """Make a connector that writes hidden states on any device.

    vLLM's own connector needs pinned memory and CUDA streams.
    """
    from safetensors.torch import save_file
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        ExampleHiddenStatesConnector,
        extract_from_kv_cache,
    )

    class WrittenEvent:
        """Event of a copy that has ended, in place of a CUDA event."""

        def query(self) -> bool:
            """Return True."""
            return True

    class PlainConnector(ExampleHiddenStatesConnector):
        """vLLM's connector, but it writes synchronously."""

        def _submit_async_write(self, pending: Any) -> None:
            if not self._is_tp_rank_zero:
                return

            # States of the request's tokens, from the key-value cache.
            blocks = torch.tensor(pending.block_ids, dtype=torch.long)[:, None] * self._block_size
            slots = (blocks + torch.arange(self._block_size)).flatten().to(self._kv_cache.device)
            states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).cpu().contiguous()

            # A file that is named by the tokens, and renamed when it is complete.
            folder = Path(pending.filename).parent
            folder.mkdir(parents=True, exist_ok=True)
            target = folder / f"{name_of(pending.token_ids.tolist())}.safetensors"
            work = target.with_suffix(".partial")
            save_file({"hidden_states": states, "token_ids": pending.token_ids.clone()}, work)
            work.replace(target)
            self._req_copy_events[pending.req_id] = WrittenEvent()
            print(f"done {target.name}", flush=True)

    return PlainConnector


def main(spec_path: str) -> None:
    """Compute the states of the texts that have no file yet. Exits with a message if vLLM leaves some out."""
    spec = json.loads(Path(spec_path).read_text())
    out = Path(spec["out"])

    def lacking(texts: list[list[int]]) -> list[list[int]]:
        """Texts without a file."""
        return [ids for ids in texts if not (out / f"{name_of(ids)}.safetensors").exists()]

    # Texts to compute.
    out.mkdir(parents=True, exist_ok=True)
    with open(spec["texts"], encoding="utf-8") as file:
        texts = [json.loads(line)["input_ids"] for line in file]
    missing = lacking(texts)
    if not missing:
        return

    # The engine. A cached prefix would have no states.
    from vllm import LLM, SamplingParams

    arguments = {
        "dtype": spec["dtype"],
        "max_model_len": spec["max_length"] + 1,
        "enable_prefix_caching": False,
        "enforce_eager": not torch.cuda.is_available(),
    }
    arguments |= spec["engine_args"]
    llm = LLM(
        spec["model"],
        **arguments,
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

    # In one process, a request that has ended is written in the next step of the engine.
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    for first in range(0, len(missing), TEXTS_PER_CALL):
        part = missing[first : first + TEXTS_PER_CALL]
        llm.generate([{"prompt_token_ids": ids} for ids in part], params, use_tqdm=False)
        for _ in range(MOST_STEPS):
            if not lacking(part):
                break
            llm.llm_engine.engine_core.get_output()

    lost = lacking(missing)
    if lost:
        sys.exit(f"vLLM wrote no states of {len(lost)} of {len(missing)} texts")


def __getattr__(name: str) -> Any:
    """Make the connector when vLLM or one of its processes imports it by name."""
    if name == "PlainConnector":
        return make_connector()
    raise AttributeError(name)


if __name__ == "__main__":
    main(sys.argv[1])
