"""Launch lines of SGLang and vLLM as documents print them start our server, here with tiny models."""

import re
import shlex

import httpx
import pytest
from server_process import ServerProcess
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.cli.serve_flags import find_served_model, parse_serve_flags
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.models.loading.loader import load_target
from tests.server.api.serving import wait_until

MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "target",
    "meta-llama/Llama-3.1-70B-Instruct": "target",
    "Meta-Llama-3.1-8B-Instruct": "target",
    "EAGLE3-Llama-3.1-8B-Instruct": "head",
    "EAGLE3-Llama-3.1-70B-Instruct": "head",
    "sglang-EAGLE3-Llama-3.1-Instruct-8B": "head",
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "head",
}
"""Models of the lines -> a folder of the fixture ``folders``."""
EAGLE3 = """python -m sglang.launch_server
    --model-path meta-llama/Llama-3.1-8B-Instruct
    --speculative-algorithm EAGLE3
    --speculative-draft-model-path EAGLE3-Llama-3.1-8B-Instruct
    --speculative-num-steps 5
    --speculative-eagle-topk 4"""
NGRAM = """python -m sglang.launch_server
    --model-path meta-llama/Llama-3.1-8B-Instruct
    --speculative-algorithm NGRAM"""
HIGH_THROUGHPUT = """python -m sglang.launch_server
    --model-path meta-llama/Llama-3.1-70B-Instruct
    --speculative-algorithm EAGLE3
    --speculative-draft-model-path EAGLE3-Llama-3.1-70B-Instruct
    --speculative-num-steps 6
    --speculative-eagle-topk 8
    --speculative-num-draft-tokens 64
    --tp-size 4"""
LOW_LATENCY = EAGLE3.replace("--speculative-num-steps 5", "--speculative-num-steps 4")
PLAIN = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct"
WALKTHROUGH = (
    "python3 -m sglang.launch_server --model Meta-Llama-3.1-8B-Instruct --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path sglang-EAGLE3-Llama-3.1-Instruct-8B --speculative-num-steps 5 "
    "--speculative-eagle-topk 4 --speculative-num-draft-tokens 16 --mem-fraction 0.7 --dtype float16"
)
REMOTE_CODE = f"{WALKTHROUGH} --trust-remote-code"
VLLM = (
    "vllm serve meta-llama/Llama-3.1-8B-Instruct --max_model_len 256 --max-num-seqs 4 --enforce-eager "
    "--no-enable-prefix-caching --seed 1 --served-model-name a b --speculative-config "
    '\'{"method": "eagle3", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 3, '
    '"draft_tensor_parallel_size": 1}\''
)
SWITCHES = (
    f"{LOW_LATENCY} --disable-overlap-schedule --disable-radix-cache --cuda-graph-max-bs 4 --log-level info"
)
SHAPES = {
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4": "3,1,4",
    "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5": "4,1,5",
    "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4": "4,1,5",
    "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 12": "3,4,12",
    "--speculative-num-steps 6 --speculative-eagle-topk 2 --speculative-num-draft-tokens 8": "6,2,8",
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5": "3,1,4",
    "--speculative-num-steps 8 --speculative-eagle-topk 8": "8,8,16",
    "--speculative-num-steps 8": "8,4,16",
    "--speculative-num-draft-tokens 4": "3,4,4",
}
"""Numbers of the documents' examples and of their table of hints -> the shape."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("launch_lines")
    target = make_target(root / "target")
    head = save_draft(tiny_head(load_target(target)), root / "head", metadata={"target": str(target)})
    return {"target": str(target), "head": str(head or root / "head")}


def words_of(line, folders):
    """The arguments of a launch line, with the models of the fixture."""
    for name in sorted(MODELS, key=len, reverse=True):
        line = line.replace(name, folders[MODELS[name]])
    words = shlex.split(line)
    start = words.index("serve") if "serve" in words else words.index("sglang.launch_server")
    return words[start + 1 :]


@pytest.mark.parametrize(
    ("line", "shape", "wanted"),
    [
        (EAGLE3, "5,4,8", {"algorithm": "EAGLE3"}),
        (NGRAM, "None", {"algorithm": "NGRAM"}),
        (HIGH_THROUGHPUT, "6,8,64", {"tensor_parallel": 4}),
        (LOW_LATENCY, "4,4,8", {"algorithm": "EAGLE3"}),
        (PLAIN, "None", {"algorithm": "auto"}),
        (WALKTHROUGH, "5,4,16", {"gpu_memory_utilization": 0.7, "dtype": "float16"}),
        (VLLM, "3,1,4", {"max_context": 256, "max_batch_size": 4, "prefix_cache": False, "seed": 1}),
        (SWITCHES, "4,4,8", {"lag": 0, "prefix_cache": False}),
    ],
)
def test_a_launch_line_becomes_the_options_of_an_engine(line, shape, wanted, folders):
    options = parse_serve_flags(words_of(line, folders))
    assert str(options.engine.shape) == shape
    assert {name: getattr(options.engine, name) for name in wanted} == wanted
    model = find_served_model(options)
    assert model.target == folders["target"]
    has_draft = "raft-model-path" in line or "eagle3" in line
    assert model.draft == (folders["head"] if has_draft else None)


@pytest.mark.parametrize("numbers", SHAPES)
def test_numbers_of_the_examples_make_shapes(numbers, folders, capsys):
    words = [*words_of(PLAIN, folders), "--speculative-draft-model-path", folders["head"], *numbers.split()]
    assert str(parse_serve_flags(words).engine.shape) == SHAPES[numbers]
    is_changed = numbers.rpartition(" ")[2] != SHAPES[numbers].rpartition(",")[2] or len(numbers.split()) < 6
    assert bool(capsys.readouterr().err) == is_changed


def test_a_launch_line_that_trusts_remote_code_is_refused_with_the_reason(folders):
    with pytest.raises(
        UserError, match="--trust-remote-code .* Code in a model's folder is never run"
    ) as error:
        parse_serve_flags(words_of(REMOTE_CODE, folders))
    assert error.value.remedy.startswith("Leave it out")


@pytest.fixture(scope="module")
def plain_text(folders, tmp_path_factory):
    return answer_of(PLAIN, folders, tmp_path_factory.mktemp("plain") / "log")[0]


def answer_of(line, folders, log, model=None):
    """Greedy text of a server that a launch line started, the model's name in the answer, and its lines."""
    server = ServerProcess(*words_of(line, folders), "--port", 0, "--device", "cpu", log=log)
    try:
        wait_until(lambda: "Serving " in server.said or not server.is_alive, 120)
        url = re.search(r"on (http://\S+)", server.said)
        assert url is not None, server.said
        with httpx.Client(base_url=url[1], timeout=60) as http:
            name = model or http.get("/v1/models").json()["data"][0]["id"]
            body = {"model": name, "prompt": "The cat sees", "max_tokens": 24, "temperature": 0}
            answer = http.post("/v1/completions", json=body)
            answer.raise_for_status()
            return answer.json()["choices"][0]["text"], answer.json()["model"], server.said
    finally:
        server.kill()


@pytest.mark.parametrize("line", [EAGLE3, NGRAM], ids=["eagle3", "ngram"])
def test_a_launch_line_starts_a_server_with_the_text_of_plain_decoding(line, folders, plain_text, tmp_path):
    assert answer_of(line, folders, tmp_path / "log")[0] == plain_text


def test_a_line_of_vllm_starts_a_server_with_its_names(folders, plain_text, tmp_path):
    text, model, _ = answer_of(VLLM, folders, tmp_path / "log", model="b")
    assert text == plain_text and model == "a"


def test_switches_of_sglang_hold_in_a_server(folders, plain_text, tmp_path):
    text, _, said = answer_of(SWITCHES, folders, tmp_path / "log")
    assert text == plain_text and "INFO" in said
    assert "note: --cuda-graph-max-bs 4: graphs are captured" in said


def test_a_line_in_half_precision_starts_a_server(folders, tmp_path):
    on_cpu = WALKTHROUGH.replace("--mem-fraction 0.7", "")  # a share of a GPU's memory
    text, _, said = answer_of(on_cpu, folders, tmp_path / "log")
    assert text and "shape 5,4,16" in said
