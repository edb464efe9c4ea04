"""Command lines of SGLang and vLLM: their flags mean options of ours, or are refused by name."""

import pytest

from eagle_kit.cli import app
from eagle_kit.cli.other_flags import RULES
from eagle_kit.cli.serve_flags import (
    EngineFlags,
    ServeFlags,
    add_engine_flags,
    engine_values,
    parse_serve_flags,
)
from eagle_kit.config.engine import EngineConfig, NgramConfig
from eagle_kit.config.loading.flags import Parser
from eagle_kit.config.other_engines import other_flags
from eagle_kit.config.server import ServerConfig
from eagle_kit.core.errors import UserError

FLAGS = other_flags().flags
VALUES = {
    "chat_template": "chat.jinja",
    "token_map": "ids.json",
    "gpu_memory_utilization": "0.5",
    "shape": "4",
    "match_type": "PROB",
    "log_level": "info",
    "device": "cpu",
    "accept_threshold_single": "0.5",
    "accept_threshold_acc": "0.5",
    "max_match_window_size": "20",
    "capacity": "500",
    "reasoning_parser": "qwen3",
    "tool_call_parser": "hermes",
}
"""A value for options that take no number."""


def values_of(options, *names):
    found = {}
    for name in names:
        for part in (options.engine, options.engine.ngram, options.flags, options.args):
            if hasattr(part, name):
                found[name] = getattr(part, name)
                break
    return found


def refusal(*words):
    with pytest.raises(UserError) as error:
        parse_serve_flags(["a-target", *words])
    return error.value


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        # Models.
        ("--model-path T", {"model": "T"}),
        ("--model T --speculative-draft-model-path D", {"model": "T", "draft": "D"}),
        ("T --speculative_draft_model=D", {"model": "T", "draft": "D"}),
        ("--model org/t --revision r1", {"model": "org/t@r1"}),
        ("--revision r1 org/t", {"model": "org/t@r1"}),
        (
            "org/t --speculative-draft-model-revision r2 --speculative-draft-model-path org/d",
            {"draft": "org/d@r2"},
        ),
        ("T --tokenizer-path T --load-format auto", {"model": "T"}),
        ("T --served-model-name a b c", {"model_name": "a", "model_aliases": ["b", "c"]}),
        ("--served-model-name a T", {"model": "T", "model_name": "a"}),
        ("T --api-key k", {"api_key": "k"}),
        # Batches and memory.
        ("T --context-length 4096", {"max_context": 4096}),
        ("T --max-model-len 8k", {"max_context": 8000}),
        ("T --max_model_len 8K", {"max_context": 8192}),
        ("T --max-model-len auto", {"max_context": None}),
        ("T --mem-fraction-static 0.7", {"gpu_memory_utilization": 0.7}),
        ("T --mem-fraction 0.7", {"gpu_memory_utilization": 0.7}),
        ("T --kv-cache-dtype fp8", {"kv_dtype": "fp8_e4m3"}),
        ("T --kv-cache-dtype bfloat16", {"kv_dtype": "auto"}),
        ("T --chunked-prefill-size 2048", {"prefill_tokens": 2048}),
        ("T --chunked-prefill-size -1", {"prefill_tokens": None}),
        ("T --max-num-batched-tokens=4096 --enable-chunked-prefill", {"prefill_tokens": 4096}),
        ("T --disable-radix-cache", {"prefix_cache": False}),
        ("T --no-enable-prefix-caching", {"prefix_cache": False}),
        ("T --enable-prefix-caching", {"prefix_cache": True}),
        ("T --max-num-seqs 4 --block-size 32", {"max_batch_size": 4, "page_size": 32}),
        ("T --kv-cache-memory-bytes 4G", {"kv_memory": 4 * 2**30}),
        ("T --max-total-tokens 1000", {"kv_tokens": 1000}),
        ("T --random-seed 7", {"seed": 7}),
        # Devices and kernels.
        ("T --dtype half", {"dtype": "float16"}),
        ("T --dtype bfloat16", {"dtype": "bfloat16"}),
        ("T --quantization modelopt_fp8", {"quantization": "auto"}),
        ("T -q fp8", {"quantization": "fp8"}),
        ("T --disable-overlap-schedule", {"lag": 0}),
        ("T --no-async-scheduling", {"lag": 0}),
        ("T --async-scheduling", {"lag": 1}),
        ("T --enforce-eager", {"graph_mode": "off"}),
        ("T --enforce-eager --disable-cuda-graph", {"graph_mode": "off"}),
        ("T --cuda-graph-bs 1 2 4 8", {"batch_sizes": (1, 2, 4, 8)}),
        ("T --cuda-graph-max-bs 160", {"batch_sizes": None}),
        ("--tp 4 T --ep-size 1", {"tensor_parallel": 4, "expert_parallel": False, "model": "T"}),
        ("T -tp 2 --ep-size 2", {"tensor_parallel": 2, "expert_parallel": True}),
        ("T --tp-size 2 --enable-ep-moe", {"tensor_parallel": 2, "expert_parallel": True}),
        (
            "T --tp-size 2 --dp-size 2 --enable-dp-attention",
            {"tensor_parallel": 2, "data_parallel_attention": True},
        ),
        ("T --nnodes 1 --node-rank 0 --pp-size 1 --dp-size 1", {"tensor_parallel": 1}),
        ("T --attention-backend fa3", {"prefill_backend": "flash-attn"}),
        ("T --attention-backend FLASHINFER", {"prefill_backend": "flashinfer"}),
        ("T --attention-backend triton --prefill-backend triton", {"prefill_backend": "triton"}),
        (
            "T --attention-backend triton --prefill-attention-backend fa3",
            {"prefill_backend": "flash-attn"},
        ),
        (
            "T --attention-backend flashmla --prefill-attention-backend flashinfer "
            "--decode-attention-backend triton",
            {"prefill_backend": "flashinfer"},
        ),
        # Speculation.
        ("T --speculative-attention-mode prefill --deepep-mode auto", {"algorithm": "auto"}),
        ("T --enable-multi-layer-eagle --speculative-algorithm eagle", {"algorithm": "NEXTN"}),
        ("T --draft D --enable-multi-layer-eagle --speculative-algorithm EAGLE", {"algorithm": "EAGLE"}),
        (
            "T --speculative-algorithm EAGLE --speculative-draft-model-path T",
            {"algorithm": "NEXTN", "draft": None},
        ),
        (
            "T --speculative-model [ngram] --num-speculative-tokens 3",
            {"algorithm": "NGRAM", "shape": "3,1,4"},
        ),
        ("T --spec-method eagle3 --spec-model D --spec-tokens 3", {"algorithm": "EAGLE3", "shape": "3,1,4"}),
        ("T --speculative-use-block-verification", {"verifier": "block", "sampled_drafts": True}),
        ("T --speculative-verifier relaxed --lag 0", {"verifier": "relaxed", "lag": 0}),
        # The server.
        ("T --log-level-http DEBUG", {"log_level": "DEBUG"}),
        ("T --uvicorn-log-level info --log-level info", {"log_level": "info"}),
        ("T --disable-log-requests --enable-metrics --stream-interval 1", {"model": "T"}),
        ("T --schedule-policy fcfs --skip-server-warmup", {"warm_up": "none"}),
        ("T --disable-log-stats", {"log_stats_interval_s": 0}),
    ],
)
def test_flags_of_others_mean_our_options(words, wanted):
    found = values_of(parse_serve_flags(words.split()), *wanted)
    if "shape" in found:
        found["shape"] = str(found["shape"])
    assert found == wanted


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ('{"method": "eagle3", "model": "D", "num_speculative_tokens": 4}', {"draft": "D", "shape": "4,1,5"}),
        ('{"model": "D", "draft_tensor_parallel_size": 1}', {"draft": "D", "algorithm": "auto"}),
        (
            '{"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}',
            {"algorithm": "NGRAM", "max_match_window_size": 4, "min_match_window_size": 2},
        ),
        (
            '{"method": "qwen3_next_mtp", "num_speculative_tokens": 1}',
            {"algorithm": "NEXTN", "shape": "1,1,2"},
        ),
        ('{"method": "draft_model", "model": "D"}', {"algorithm": "STANDALONE", "draft": "D"}),
        ('{"method": "eagle3", "model": "D", "parallel_drafting": true}', {"algorithm": "P-EAGLE"}),
        ('{"model": "org/d", "revision": "r"}', {"draft": "org/d@r"}),
        ('{"model": "D", "draft_sample_method": "probabilistic"}', {"sampled_drafts": True}),
        ('{"model": "D", "quantization": null}', {"draft": "D"}),
    ],
)
def test_keys_of_vllms_config_mean_our_options(config, wanted):
    found = values_of(parse_serve_flags(["T", "--speculative-config", config]), *wanted)
    if "shape" in found:
        found["shape"] = str(found["shape"])
    assert found == wanted


def test_a_key_of_vllms_config_is_a_flag_too():
    words = ["T", "-sc.method", "ngram", "--speculative-config.num_speculative_tokens=2"]
    engine = parse_serve_flags(words).engine
    assert engine.algorithm == "NGRAM" and str(engine.shape) == "2,1,3"


@pytest.mark.parametrize(
    ("words", "cause", "remedy"),
    [
        (["--trust-remote-code"], "Code in a model's folder is never run", "Leave it out"),
        (["--speculative-config", "x"], "is not JSON", "JSON object"),
        (["--speculative-config", '["x"]'], "is no JSON object", "Give one"),
        (["--speculative-config", '{"no_such_key": 1}'], "has the key no_such_key", "Leave the key out"),
        (["--speculative-config", '{"method": "medusa"}'], "method medusa of vLLM is refused", "eagle3"),
        (["--speculative-config", '{"num_speculative_tokens": 0}'], "is no number of drafts", "from 1"),
        (["--speculative-config", '{"quantization": "awq"}'], "quantization awq of vLLM", "Leave it out"),
        (["--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype fp8_e5m2", "fp8_e4m3"),
        (
            ["--context-length", "4096", "--max-context", "8192"],
            "beside --max-context 8192",
            "one or the other",
        ),
        (
            ["--max-context", "8192", "--context-length", "4096"],
            "beside --max-context 8192",
            "one or the other",
        ),
        (["--max-model-len", "x"], "is no number", "whole number"),
        (["--context-length"], "without a value", "Give one"),
        (["--model", "another"], "--model another was given beside the model a-target", "one or the other"),
        (["another"], "more words than it takes: another", "--help"),
        (["--api-key", "a", "b"], "there is one value here", "Give one"),
        (["--tokenizer", "another"], "is not the target", "the tokenizer is the target's"),
        (["--no-such-flag"], "has no flag --no-such-flag", "SGLang and vLLM have no such flag either"),
        (["--enable-dp-attention", "--tp-size", "4", "--dp-size", "2"], "4 ranks share", "Give --dp-size 4"),
        (["--enable-dp-attention"], "among the ranks of tensor parallelism, and there is one", ""),
        (["--dp-size", "2"], "a server is one replica", "serve-a-fleet"),
        (["--tp-size", "4", "--ep-size", "2"], "4 ranks share", "Give --ep-size 4 or 1"),
        (
            ["--attention-backend", "fa3", "--prefill-backend", "triton"],
            "beside --prefill-backend triton",
            "one or the other",
        ),
        (
            ["--attention-backend", "flashmla", "--prefill-attention-backend", "fa3"],
            "--attention-backend flashmla of SGLang and vLLM is refused",
            "triton",
        ),
        (["--nnodes", "2", "--node-rank", "1"], "--nnodes 2 of SGLang and vLLM", "torchrun"),
        (["--stream-interval", "4"], "--stream-interval 4", "use one of 1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(words, cause, remedy):
    error = refusal(*words)
    assert cause in error.cause and remedy in error.remedy


def test_a_revision_of_a_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="is on this machine"):
        parse_serve_flags([str(tmp_path), "--revision", "main"])


def test_differences_are_printed(capsys):
    parse_serve_flags(["T", "--mem-fraction-static", "0.8", "--chunked-prefill-size", "-1"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("note: --mem-fraction-static 0.8: it counts all memory")
    assert lines[1].startswith("note: --chunked-prefill-size -1: prompts are always computed in parts")
    parse_serve_flags(["T", "--max-context", "100", "--context-length", "100"])
    assert not capsys.readouterr().err


def test_every_flag_that_has_no_counterpart_is_refused_with_a_reason_and_a_remedy():
    plain = parse_serve_flags(["a-target"]).engine.replace(seed=0)
    refused = [flag for flag in FLAGS if not flag.is_taken]
    assert len(refused) > 600
    for flag in refused:
        for name in (flag.flag, *flag.also):
            dashes = name[: len(name) - len(name.lstrip("-"))]
            with_underscores = dashes + name.lstrip("-").replace("-", "_")
            for words in ([name], [name, "1"], [f"{with_underscores}=x"]):
                error = refusal(*words)
                assert name in error.cause.replace("_", "-") and flag.why in error.cause
                assert error.remedy.endswith(".")
                assert any(engine in error.cause for engine in ("SGLang", "vLLM"))
        assert parse_serve_flags(["a-target", f"--no-{flag.name}"]).engine.replace(seed=0) == plain


def words_for(flag, value):
    """A use of a flag."""
    if value == "true" and flag.takes == "none":
        return [flag.flag]
    if value == "false" and flag.takes == "none":
        return [f"--no-{flag.name}"]
    return [f"{flag.flag}={value}"]


@pytest.mark.parametrize("flag", [each for each in FLAGS if each.is_taken], ids=lambda each: each.name)
def test_every_flag_that_is_taken_sets_an_option_that_exists(flag):
    schemas = (EngineConfig, NgramConfig, ServerConfig, ServeFlags)
    known = {name for schema in schemas for name in schema.model_fields}
    assert flag.option in ("", *known) and set(flag.sets) <= known
    assert flag.option or flag.why
    assert flag.rule in ("", "keys", *RULES)
    if flag.rule or not flag.option:
        return

    # Each value that the table lists, or one that the option takes.
    values = list(flag.values) or [VALUES.get(flag.option, "3")]
    for value in values:
        if "*" in value:
            continue
        words = ["--tp-size=2"] if flag.option in ("expert_parallel", "data_parallel_attention") else []
        model = [] if flag.option == "model" else ["a-target"]
        options = parse_serve_flags([*model, *words, *words_for(flag, value)])
        ours = flag.value_of(value)
        if ours == "auto":
            continue
        (found,) = values_of(options, flag.option).values()
        assert str(found).lower().strip("()[],'").removesuffix(".0") == ours.lower().removesuffix(".0")


def test_help_does_not_read_the_table(monkeypatch, capsys):
    monkeypatch.setattr("eagle_kit.cli.other_flags.other_flags", lambda: pytest.fail("the table was read"))
    with pytest.raises(SystemExit):
        app.parse(["serve", "--help"])
    assert "other-engines" in capsys.readouterr().out


def test_flags_of_others_hold_for_commands_with_the_engines_flags():
    parser = Parser(prog="eagle-kit another")
    add_engine_flags(parser)
    values = engine_values(parser.parse_args(["--max-model-len", "4k", "--disable-overlap-schedule"]))
    assert values == {"max_context": 4000, "lag": 0}
    assert set(values) <= {*EngineFlags.model_fields, *EngineConfig.model_fields}
    with pytest.raises(UserError, match="--uvicorn-log-level debug is a flag of servers"):
        parser.parse_args(["--uvicorn-log-level", "debug"])


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        # The beginning of a name, with a value that is not the model.
        ("--model-path T --speculative-algo EAGLE3", {"model": "T", "speculative_algorithm": "EAGLE3"}),
        ("--mem-frac 0.7 --model-path T", {"model": "T", "gpu_memory_utilization": 0.7}),
        ("--model-p T --context-len 4096", {"model": "T", "max_context": 4096}),
        ("--model T --quant fp8", {"model": "T", "quantization": "fp8"}),
        ('--model T --speculative-conf {"model":"D"}', {"model": "T", "draft": "D"}),
        ("--model T --speculative-draft D", {"model": "T", "draft": "D"}),
        ("--model T --speculative-algo NEXTN --speculative-draft T", {"draft": None}),
        # Names in another case.
        ("--MODEL-PATH T --Max-Num-Seqs 8", {"model": "T", "max_batch_size": 8}),
        ("--model T --No-Enable-Prefix-Caching", {"prefix_cache": False}),
        # Two limits of prompts, of which the smaller holds.
        ("T --chunked-prefill-size 4096 --max-prefill-tokens 16384", {"prefill_tokens": 4096}),
        ("T --max-prefill-tokens 2048 --chunked-prefill-size 4096", {"prefill_tokens": 2048}),
        ("T --max-prefill-tokens 2048 --chunked-prefill-size -1", {"prefill_tokens": 2048}),
        ("T --kv-cache-memory-bytes 10G", {"kv_memory": 10 * 2**30}),
        ("T --log-level-http warning --log-level info", {"log_level": "info"}),
        ("--model T -O 3", {"model": "T"}),
        ("--model T -O2", {"model": "T"}),
    ],
)
def test_habits_of_launch_lines(words, wanted):
    options = parse_serve_flags(words.split())
    assert values_of(options, *wanted) == wanted


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--model-path T --nonsense 3", "--nonsense"),
        ("--nonsense=3 --model-path T --tp 2", "--nonsense"),
        ("T --enable-prefix-caching --disable-radix-cache", "--disable-radix-cache"),
        ("T --no-prefix-cache --enable-prefix-caching", "--enable-prefix-caching"),
        ("T --context-length 8192.7", "--context-length"),
        ("T --speculative-config.depth 3", "--speculative-config.depth is no key"),
        ("T -cc.mode=3", "-cc.mode=3"),
        ('T --speculative-config {"speculative_token_tree":"[(0,)]"}', "speculative_token_tree"),
    ],
)
def test_what_is_not_taken_is_named(words, named):
    with pytest.raises(UserError) as error:
        parse_serve_flags(words.split())
    assert named in error.value.cause


def test_prompts_that_should_not_be_computed_in_parts_are_answered_with_a_note(capsys):
    parse_serve_flags(["T", "--no-enable-chunked-prefill"])
    assert "--no-enable-chunked-prefill" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("numbers", "shape"),
    [
        ("--speculative-num-draft-tokens 16", "15,1,16"),
        ("--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 16", "15,1,16"),
        ("--speculative-num-steps 5", "5,1,6"),
        ("--speculative-eagle-topk 4 --speculative-num-draft-tokens 16", "3,4,16"),
    ],
)
def test_a_block_of_dflash_is_a_chain(numbers, shape):
    words = f"T --speculative-algorithm DFLASH --speculative-draft-model-path D {numbers}"
    assert str(parse_serve_flags(words.split()).engine.shape) == shape
