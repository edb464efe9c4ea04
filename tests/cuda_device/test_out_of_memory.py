"""Too little memory of a GPU is reported by a sentence of cause and one with the settings to change: at a
server's start, in a step, and in training."""

import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from starlette.testclient import TestClient
from tiny_run import make_config, make_target

from eagle_kit.config.server import ServerConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from eagle_kit.server.api.app import create_app
from tests.cuda_device import device
from tests.cuda_device.device import ROOT, environment, memory_of
from tests.cuda_device.engines import made_up_results, small_llm
from tests.cuda_device.full_size import GB
from tests.cuda_device.published import publish, unread_weights
from tests.cuda_device.recipes import recipe, unsaved

pytestmark = pytest.mark.usefixtures("memory_of_its_own")
WIDE = {"intermediate_size": 16384, "max_position_embeddings": 4096}
"""Sizes of a target whose prompts need 100 kB a token."""
LONG = [5] * 1500


def memory_in_use(more: int = 0) -> int:
    """Bytes that the device would have to have, so that ``more`` are free."""
    torch.cuda.empty_cache()
    return device.bytes_used() + more


def everything(least: int = 1 << 20) -> list[torch.Tensor]:
    """Tensors in all that is free in the segments of torch's allocator, on a device that has no more, but for
    pieces of fewer bytes than ``least``."""
    taken = []
    for size in (64 << 20, 8 << 20, 1 << 20, 64 << 10, 1 << 10, 1 << 9):
        if size < least:
            break
        with suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return taken


def wide_llm() -> LLM:
    """An engine that captures nothing before it is needed."""
    return small_llm(changes=WIDE, max_context=2200, prefill_tokens=2048, kv_tokens=6000)


# ---- The start of a server ----


def test_weights_that_do_not_fit_are_refused(tmp_path):
    folder = publish("meta-llama/Llama-3.1-8B-Instruct", tmp_path / "target")
    with unread_weights(), memory_of(memory_in_use(10 * GB)), pytest.raises(UserError) as raised:
        LLM(folder, tokenizer=object())
    assert "out of memory while loading the models" in raised.value.cause
    assert "quantization" in raised.value.remedy and "tensor_parallel" in raised.value.remedy
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < GB, "the error keeps what was loaded"


def test_a_warm_up_without_memory_says_what_to_lower():
    llm = wide_llm()
    llm.engine()
    with memory_of(memory_in_use(64 << 20)), made_up_results(), pytest.raises(UserError) as raised:
        llm.warm_up("usual")
    assert "out of memory while preparing the engine" in raised.value.cause
    assert "kv_tokens" in raised.value.remedy and "prefill_tokens" in raised.value.remedy


@pytest.mark.parametrize(
    ("gigabytes", "words"),
    [
        pytest.param("0.001", ("out of memory while loading", "quantization"), id="no room for the weights"),
        pytest.param("0.008", ("before a token", "batch size"), id="no room for the pool"),
    ],
)
def test_the_server_ends_with_exit_code_2_and_two_sentences(gigabytes, words, tmp_path):
    folder = make_target(tmp_path / "target")
    command = [sys.executable, "-m", "eagle_kit", "serve", str(folder), "--port", "0"]
    settings = {"EAGLE_KIT_DEVICE_MEMORY_GB": gigabytes, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--speculative-algorithm", "NONE"],
        env=environment(settings),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    *_, cause, remedy = done.stderr.strip().splitlines()
    assert words[0] in cause and words[1] in remedy, done.stderr


# ---- Steps ----


def test_responses_without_memory_end_and_the_engine_goes_on():
    llm = wide_llm()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with made_up_results():
        llm.generate([[1, 2, 3]], params)
        before = torch.cuda.memory_allocated()
        with memory_of(memory_in_use()):
            taken = everything(1 << 9)
            with pytest.raises(UserError) as raised:
                llm.generate([LONG, [7, 8]], params)
            del taken
        assert "out of memory while computing" in raised.value.cause
        assert "prefill_tokens" in raised.value.remedy
        engine = llm.engine()
        engine.check()
        assert not engine.has_work
        assert engine.page_pool.num_available == engine.page_pool.num_pages
        assert torch.cuda.memory_allocated() == before, "tensors of the step are kept"

        responses = llm.generate([LONG, [7, 8]], params)
        assert [len(response.token_ids) for response in responses] == [4, 4]


def test_the_server_answers_503_and_goes_on(tmp_path):
    folder = make_target(tmp_path / "target")
    llm = LLM(folder, max_batch_size=2, max_context=400, batch_sizes=(1, 2), kv_tokens=4000)
    body = {"prompt": [70, 71, 72], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    app = create_app(llm, llm.engine(), ServerConfig(model_name="small"))
    with made_up_results(), TestClient(app, base_url="http://127.0.0.1") as http:
        assert http.post("/v1/completions", json=body).status_code == 200
        again = {**body, "temperature": 1.0, "logprobs": 2}
        with memory_of(memory_in_use()):
            # The first of its kind would be captured now. It runs without a graph in the memory there is.
            assert http.post("/v1/completions", json=again).status_code == 200
            taken = everything(1 << 10)
            refused = http.post("/v1/completions", json={**again, "top_p": 0.5})
            del taken
        assert refused.status_code == 503, refused.text
        error = refused.json()["error"]
        assert error["code"] == "out_of_memory"
        assert "out of memory while computing a step" in error["message"]
        assert "kv_tokens" in error["message"]

        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.post("/v1/completions", json=again).status_code == 200
        llm.engine().check()


# ---- Training ----


@pytest.mark.parametrize(
    ("gigabytes", "words"),
    [
        pytest.param(16.5, ("loading target and head", "training.target_placement"), id="the head"),
        pytest.param(24, ("out of memory while training", "training.gradient_checkpointing"), id="a step"),
    ],
)
@pytest.mark.nightly
def test_a_training_without_memory_says_what_to_change(gigabytes, words, tmp_path):
    from eagle_kit.train.run.loop import RunOptions, train

    config = recipe("llama-3.1-8b-eagle3", tmp_path, "validation.every=0")
    with unsaved(), memory_of(memory_in_use(int(gigabytes * GB))), pytest.raises(UserError) as raised:
        train(config, RunOptions(max_steps=1))
    assert words[0] in raised.value.cause and words[1] in raised.value.remedy, str(raised.value)


def test_the_trainer_ends_with_exit_code_2_and_two_sentences(tmp_path):
    path = make_config(tmp_path)
    settings = {"EAGLE_KIT_DEVICE_MEMORY_GB": "0.004", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "eagle_kit", "train", str(path)],
        env=environment(settings),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "out of memory while" in done.stderr


# ---- Steps in parts ----


def test_a_step_that_does_not_fit_runs_in_parts():
    """Three prompts together need more than the 64 MiB that are left, each alone does not."""
    llm = wide_llm()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with made_up_results():
        llm.generate([[1, 2, 3]] * 2, params)
        engine = llm.engine()
        with memory_of(memory_in_use(64 << 20)):
            taken = everything()
            assert taken[0].nbytes == 64 << 20
            del taken[0]
            responses = llm.generate([[5] * 300, [6] * 300, [7] * 900], params)
            del taken
        assert [len(response.token_ids) for response in responses] == [4, 4, 4]
        assert engine.totals.num_steps_in_parts >= 1
        assert engine.totals.num_finished["error"] == 0
        engine.check()
