"""What a command line names, the self-test, and the command's own arguments."""

import argparse
import copy
import json
import socket
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_run import make_target

from eagle_kit.cli import main
from eagle_kit.cli.serve import configure
from eagle_kit.cli.serve_flags import check_algorithm, shape_of
from eagle_kit.config.server import ServerConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.output import RequestOutput
from eagle_kit.core.shape import ShapeTable, SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.server.api.server import bind
from eagle_kit.server.api.startup import (
    SelfTest,
    ServedModel,
    causes_of_low_acceptance,
    find_model,
    report,
    self_test,
    warnings_as_lines,
)
from tests.drafts import test_validate


def folder(path, config=None, metadata=None):
    path.mkdir()
    for name, value in (("config.json", config), ("eagle_kit.json", metadata)):
        if value is not None:
            (path / name).write_text(json.dumps(value), encoding="utf-8")
    return str(path)


def test_a_folder_with_a_drafts_config_names_its_own_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "small")
    ours = folder(
        tmp_path / "ours", {"architectures": ["LlamaForCausalLMEagle3"], "eagle_kit": {"target": "small"}}
    )
    older = folder(tmp_path / "older", {"architectures": ["LlamaForCausalLMEagle3"]}, {"target": "older/one"})
    foreign = folder(tmp_path / "foreign", {"architectures": ["Eagle3LlamaForCausalLM"]})
    target = folder(tmp_path / "target", {"architectures": ["LlamaForCausalLM"]})
    assert find_model(ours, None, "usual") == ServedModel("small", ours)
    assert find_model(older, None, "usual") == ServedModel("older/one", older)
    assert find_model(foreign, None, "usual") == ServedModel("usual", foreign)
    assert find_model(target, None, "usual") == ServedModel(target, None)
    assert find_model(target, "big", "usual") == ServedModel("big", target)


def arguments(*words, model="model"):
    parser = argparse.ArgumentParser()
    configure(parser)
    return parser.parse_args([model, *words])


QWEN3_MOE = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_single_numbers_are_completed_for_the_targets_architecture(tmp_path):
    steps = "--speculative-num-steps"
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    mixture = folder(tmp_path / "mixture", {**QWEN3_MOE, **config})
    assert shape_of(arguments(steps, "5", model=mixture)) == SpecShape(5, 1, 6)
    assert shape_of(arguments("--speculative-algorithm", "standalone", steps, "2")) == SpecShape(2, 1, 3)
    assert shape_of(arguments("--speculative-algorithm", "NGRAM", steps, "2")) == SpecShape(2, 4, 12)


def test_single_numbers_make_a_shape_with_the_usual_ones(capsys):
    steps, topk, tokens = (
        f"--speculative-{name}" for name in ("num-steps", "eagle-topk", "num-draft-tokens")
    )
    assert shape_of(arguments()) is None
    assert shape_of(arguments("--shape", "auto")) is None
    assert shape_of(arguments("--shape", "3,2,6")) == ShapeTable.parse("3,2,6")
    assert shape_of(arguments("--shape", "3,2,6 8:none")) == ShapeTable.parse("3,2,6 8:none")
    assert shape_of(arguments(steps, "3")) == SpecShape(3, 4, 8)
    assert shape_of(arguments(steps, "3", topk, "1")) == SpecShape(3, 1, 4)
    assert "shape      3,4,8, completed" in capsys.readouterr().err
    assert shape_of(arguments(steps, "3", topk, "2", tokens, "6")) == SpecShape(3, 2, 6)
    assert capsys.readouterr().err == ""
    assert shape_of(arguments(steps, "3", topk, "1", tokens, "9")) == SpecShape(3, 1, 4)
    assert "so 9 is ignored" in capsys.readouterr().err
    for words in (
        ["--shape", "3,2,6", steps, "3"],
        ["--speculative-algorithm", "NONE", steps, "3"],
        ["--speculative-algorithm", "NONE", "--shape", "3,2,6"],
        [topk, "0"],
    ):
        with pytest.raises(UserError):
            shape_of(arguments(*words))


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_an_algorithm_without_the_draft_it_needs_is_refused(name, capsys, tmp_path):
    target = str(make_target(tmp_path / "target"))
    assert main(["serve", target, "--speculative-algorithm", name, "--port", "0"]) == 2
    assert f"The algorithm {name} needs a draft." in capsys.readouterr().err


def test_a_target_without_modules_of_its_own_is_refused(tmp_path, capsys):
    target = str(make_target(tmp_path / "target"))
    assert main(["serve", target, "--speculative-algorithm", "NEXTN", "--port", "0"]) == 2
    assert "has no MTP module" in capsys.readouterr().err


def test_an_algorithm_without_use_for_the_draft_leaves_it_out(tmp_path):
    model = ServedModel("small", tmp_path)
    assert check_algorithm(arguments("--speculative-algorithm", "NONE"), model) == ServedModel("small", None)
    assert check_algorithm(arguments("--speculative-algorithm", "NEXTN"), model) == model
    with pytest.raises(UserError, match="without a draft"):
        check_algorithm(arguments(), ServedModel("small", None), Path("map"))


def test_a_port_in_use_is_a_users_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="cannot be used"):
            bind("127.0.0.1", taken.getsockname()[1])
    for host, port in (("no.such.host.invalid", 80), ("127.0.0.1", 70000)):
        with pytest.raises(UserError, match="cannot be used"):
            bind(host, port)


@pytest.mark.parametrize(
    "wrong",
    [{"max_queued": -1}, {"grace_period_s": -1}, {"max_body_bytes": 0}, {"api_key": ""}, {"model_name": ""}],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(UserError):
        ServerConfig(**{"model_name": "m", **wrong})


def test_user_warnings_become_lines():
    lines = []
    with warnings_as_lines(lines.append):
        for text in ("one", "one", "two"):
            warnings.warn(text, stacklevel=1)
        warnings.warn("not for users", DeprecationWarning, stacklevel=1)
    assert lines == ["warning: one", "warning: two"]


class TwoFacedLLM:
    """Decodes ``plain`` without speculation and ``drafted`` with it, two tokens a verify."""

    def __init__(self, tokenizer, plain, drafted):
        self.tokenizer, self.max_context, self.plain, self.drafted = tokenizer, 64, plain, drafted
        self.totals = {"used": 1}
        self.clock = 0.0

    def tokenize_task(self, prompt):
        return list(prompt.encode())

    def generate(self, prompts, params, *, shape):
        assert params.is_greedy and all(len(prompt) + params.max_tokens <= 48 for prompt in prompts)
        self.clock += 2.0 if shape.steps else 5.0
        stats = SpecStats()
        stats.observe(2, 1)
        ids = self.drafted if shape.steps else self.plain
        return [RequestOutput(prompt, list(ids), "", "length", stats) for prompt in prompts]

    def engine(self, shape):
        assert not shape.steps
        return self


def test_the_self_test_compares_with_plain_decoding_and_resets_the_counters(tokenizer, monkeypatch):
    llm = TwoFacedLLM(tokenizer, [1, 2, 3], [1, 2, 3])
    with monkeypatch.context() as patched:
        clock = SimpleNamespace(perf_counter=lambda: llm.clock)
        patched.setattr("eagle_kit.server.api.startup.time", clock)
        test = self_test(llm, SpecShape(3, 1, 4))
    assert (test.accept_length, test.num_tokens, test.differing) == (2.0, 12, None) and llm.totals == {}
    assert (test.seconds, test.plain_seconds, test.is_tree) == (2.0, 5.0, False)
    tree = self_test(TwoFacedLLM(tokenizer, [1, 2, 3], [1, 2, 3]), SpecShape(3, 2, 4))
    assert tree.is_tree
    bare = copy.copy(tokenizer)
    bare.chat_template = None
    assert self_test(TwoFacedLLM(bare, [1, 2, 3], [1, 2, 3]), SpecShape(3, 1, 4)).num_tokens == 12
    assert self_test(TwoFacedLLM(tokenizer, [1, 2, 3], [1, 5, 3]), SpecShape(3, 1, 4)).differing == (0, 1)
    assert self_test(TwoFacedLLM(tokenizer, [1, 2], [1, 2, 3]), SpecShape(3, 1, 4)).differing == (0, 2)


def test_causes_of_low_acceptance_are_those_that_a_check_does_not_rule_out(tmp_path):
    target = str(test_validate.make_target(tmp_path / "small"))
    draft = test_validate.make_draft(tmp_path / "draft", target="another", template="0123456789abcdef")
    (draft / "eagle_kit.json").write_text(json.dumps({"step": 24, "tokens_seen": 4954}))

    # What a check found wrong comes first, with its remedy.
    findings = {finding.subject: finding for finding in validate_draft(draft, target)}
    causes = causes_of_low_acceptance(str(draft), target, "bfloat16")
    assert findings["target"].cause in causes[0] and findings["target"].remedy in causes[0]
    assert findings["chat template"].cause in causes[1]
    assert "4,954 tokens in 24 steps" in causes[2]
    assert "bfloat16" in causes[3] and f"eagle-kit diagnose {draft}" in causes[3] and len(causes) == 4

    # A target of the right name may still be another one; fp32 is no cause.
    right = test_validate.make_draft(tmp_path / "right", target="small")
    causes = causes_of_low_acceptance(str(right), target, "float32")
    assert [cause.partition(",")[0].partition(":")[0] for cause in causes][-2:] == [
        "A head that was trained too little",
        "Another target of the same name",
    ]


def test_the_report_names_causes_in_order_only_when_acceptance_is_low():
    asked = []

    def causes():
        asked.append(True)
        return ["another target", "another template"]

    good = report(SelfTest(2.5, 100, 1.0, 2.0, None), exact=True, low_causes=causes)
    assert len(good) == 1 and "2.50 tokens per verify" in good[0] and not asked
    low = report(SelfTest(1.02, 100, 1.0, 2.0, None), exact=True, low_causes=causes)
    assert "suspiciously" in low[1] and low[2:] == ["  1. another target", "  2. another template"]
    for length, is_tree, is_low in (
        (1.19, False, True),
        (1.21, False, False),
        (1.21, True, True),
        (1.31, True, False),
        (0.0, True, False),
    ):
        assert SelfTest(length, 100, 1.0, 2.0, None, is_tree).is_low is is_low
    slow = report(SelfTest(2.5, 100, 2.5, 2.0, None), exact=True, low_causes=causes)
    assert len(slow) == 2 and slow[1].startswith("note: these responses are slower with speculation")
    own = SelfTest(2.5, 100, 2.5, 2.0, None)
    assert len(report(own, exact=True, low_causes=causes, is_given=False)) == 1
    differing = SelfTest(2.5, 100, 1.0, 2.0, (3, 7))
    assert report(differing, exact=True, low_causes=causes)[1].startswith("warning: response 3 differs")
    assert report(differing, exact=False, low_causes=causes)[1].startswith("note: ")
