"""Options of the engine: documented, refused with a sentence, resolved by device, and made into flags."""

import argparse

import pytest

from eagle_kit.cli import evaluate, generate, serve
from eagle_kit.cli.arguments import DECODING
from eagle_kit.config.diagnose import DiagnoseConfig
from eagle_kit.config.engine import EngineConfig, NgramConfig, parse_size
from eagle_kit.config.eval import EvalConfig
from eagle_kit.config.loading.flags import add_flags, options_of
from eagle_kit.config.server import ServerConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import ShapeTable


@pytest.mark.parametrize("schema", [EngineConfig, NgramConfig, ServerConfig, EvalConfig, DiagnoseConfig])
def test_every_option_is_documented(schema):
    assert [name for name in schema.model_fields if not schema.help_of(name)] == []


def test_documentation_of_an_option_ends_where_the_next_begins():
    assert EngineConfig.help_of("page_size") == "Tokens per page of the key-value pool."
    assert EngineConfig.help_of("ngram") == "Matching of n-grams."


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_batchsize": 1}, "no option max_batchsize. Did you mean max_batch_size"),
        ({"shape": "4,1,9"}, "The chain 4,1,9"),
        ({"kv_tokens": 5, "kv_memory": "1G"}, "Give one or the other"),
        ({"accept_threshold_acc": 0.5, "sampled_drafts": True}, "Leave one of the two out"),
        ({"accept_threshold_acc": 0.5, "verifier": "block"}, "Leave one of the two out"),
        ({"accept_threshold_single": 0.5, "sampled_drafts": True}, "Leave one of the two out"),
        ({"accept_threshold_single": 0.5, "verifier": "target-only"}, "for the verifier target-only"),
        ({"state_snapshots": 2, "prefix_cache": False}, "Snapshots are for the prefix cache"),
        ({"expert_parallel": True}, "among the ranks of tensor parallelism, and there is one"),
        ({"data_parallel_attention": True}, "shares requests among the ranks of tensor parallelism"),
        ({"ngram": {"min_match_window_size": 20}}, "min_match_window_size is 20"),
        ({"ngram": {"min_bfs_breadth": 11}}, "min_bfs_breadth is 11 and max_bfs_breadth is 10"),
        ({"ngram": {"capacity": 11}}, "capacity is 11"),
    ],
)
def test_a_wrong_option_is_a_users_error(wrong, cause):
    with pytest.raises(UserError, match=cause):
        EngineConfig(**wrong)


def test_a_replaced_option_is_validated_and_the_original_stays():
    config = EngineConfig(shape="5,4,16 8:none")
    assert config.replace(max_batch_size=3).shape == config.shape == ShapeTable.parse("5,4,16 8:none")
    with pytest.raises(UserError, match="page_size is 0"):
        config.replace(page_size=0)


@pytest.mark.parametrize(
    "allowed",
    [
        {"accept_threshold_acc": 0.5, "verifier": "relaxed"},
        {"state_snapshots": 0, "prefix_cache": False},
        {"expert_parallel": True, "data_parallel_attention": True, "tensor_parallel": 2},
        {"ngram": {"min_match_window_size": 12, "capacity": 12, "min_bfs_breadth": 10}},
    ],
)
def test_options_that_go_together_are_taken(allowed):
    assert EngineConfig(**allowed).model_dump(exclude_defaults=True) == allowed


def test_devices_decide_what_was_left_open():
    cpu = EngineConfig(max_batch_size=5).resolve(on_gpu=False, max_positions=700)
    assert (cpu.max_context, cpu.prefill_tokens, cpu.lag, cpu.graph_mode) == (700, 512, 0, "cycle")
    assert cpu.batch_sizes == (1, 2, 3, 4, 5) and cpu.shape.steps == 0
    gpu = EngineConfig(max_batch_size=5, lag=0).resolve(on_gpu=True)
    assert (gpu.max_context, gpu.prefill_tokens, gpu.lag, gpu.batch_sizes) == (8192, 8192, 0, (1, 2, 4, 5))
    assert EngineConfig().resolve(on_gpu=False, can_record=False).graph_mode == "off"
    assert (cpu.mixed_prefill_tokens, gpu.mixed_prefill_tokens) == (12, 1024)
    assert (cpu.decode_prefill_tokens, gpu.decode_prefill_tokens) == (512, 1024)
    large = EngineConfig(max_batch_size=44).resolve(on_gpu=True)
    assert large.batch_sizes == (1, 2, 4, 8, 16, 24, 32, 40, 44)
    assert EngineConfig(prefill_tokens=8).resolve(on_gpu=False).mixed_prefill_tokens == 8
    sized = cpu.replace(kv_tokens=100, page_size=8)
    assert (sized.num_pages, sized.num_lookahead_tokens(4), sized.max_pages) == (13, 7, -(-(700 + 66) // 8))


def test_sizes_have_units():
    sizes = {"4G": 4 * 10**9, "512Mi": 2**29, "2.5gb": 25 * 10**8, "1000": 1000, None: None}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "G", "4T", "-1", "0", "4 GGB"):
        with pytest.raises(UserError, match="cannot be read"):
            parse_size(text)


def test_flags_that_are_not_given_leave_the_defaults_and_errors_name_the_flag():
    parser = argparse.ArgumentParser()
    flags = {**DECODING, "prefix_cache": "--no-prefix-cache", "kv_memory": "--kv-memory"}
    add_flags(parser, EngineConfig, flags, max_batch_size=3)
    assert options_of(parser.parse_args([]), EngineConfig, flags) == EngineConfig(max_batch_size=3)
    given = parser.parse_args(["--no-prefix-cache", "--kv-memory", "1k", "--shape", "none"])
    config = options_of(given, EngineConfig, flags)
    assert (config.prefix_cache, config.kv_memory, str(config.shape)) == (False, 1000, "none")
    with pytest.raises(UserError, match="--batch-size is 0"):
        options_of(parser.parse_args(["--batch-size", "0"]), EngineConfig, flags)


def test_commands_keep_their_flags():
    texts = []
    for command in (serve, generate, evaluate):
        parser = argparse.ArgumentParser()
        command.configure(parser)
        texts.append(parser.format_help())
    for flag in ("--max-running-requests", "--speculative-ngram-capacity", "--kv-memory", "--grace-period"):
        assert flag in texts[0]
    assert all(flag in texts[1] for flag in ("--algorithm", "--token-map", "--batch-size", "--max-context"))
    assert all(flag in texts[2] for flag in ("--tasks", "--shapes", "--no-plots", "--batch-size", "--limit"))
