"""Whether a draft fits a target: every mismatch is named, and what may be right is only warned about."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_dspark, tiny_head, tiny_target

from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.template import template_hash
from eagle_kit.drafts.eagle1.head import Eagle1Config, Eagle1Head
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.files.config_json import LAYER_SIZES
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.drafts.files.draft_files import open_draft
from eagle_kit.drafts.files.findings import Finding, check_values, raise_on_errors, target_name
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.drafts.mtp.head import MTPConfig, MTPHead


def make_target(folder, **changes):
    """A target folder without weights: a check reads none."""
    config = asdict(tiny_target(num_layers=12).config)
    names = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    names["num_kv_heads"] = "num_key_value_heads"
    config = {names.get(key, key): value for key, value in config.items()}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], **config, **changes})
    )
    return folder


def make_draft(folder, *, target="small", template="", **changes):
    head = tiny_head(tiny_target(num_layers=12, **changes))
    head.config = replace(head.config, target=target, template_hash=template)
    save_draft(head, folder, metadata={})
    return folder


def set_layer_ids(folder, ids, **eagle):
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, **eagle}
    (folder / "config.json").write_text(json.dumps(config))


def by_subject(findings):
    return {finding.subject: finding for finding in findings}


@pytest.fixture
def target(tmp_path):
    return make_target(tmp_path / "small")


@pytest.fixture
def draft(tmp_path):
    return make_draft(tmp_path / "draft")


def test_a_draft_of_this_target_passes(draft, target):
    assert [path.name for path in target.iterdir()] == ["config.json"]  # no weight of the target is read
    findings = validate_draft(draft, target)
    raise_on_errors(findings)
    fine = {finding.subject for finding in findings if finding.level == "ok"}
    assert fine == {
        "layout",
        "hidden size",
        "embedding size",
        "vocabulary",
        "layer ids",
        "context",
        "rope",
        "target",
        "weights",
    }


def test_every_mismatch_with_another_target_is_named(draft, tmp_path):
    other = make_target(tmp_path / "large", hidden_size=64, vocab_size=200, num_hidden_layers=2)
    set_layer_ids(draft, [2, 6, 9])
    with pytest.raises(UserError) as error:
        raise_on_errors(validate_draft(draft, other))
    cause = error.value.cause
    assert "hidden size: the draft was made for 48, the target has 64" in cause
    assert "vocabulary: the draft was made for 131, the target has 200" in cause
    assert "layer ids: the draft reads the inputs of layers [2, 6, 9], the target has 2 layers" in cause
    assert cause.count(".") == 1 and cause.endswith(".")
    assert "train a draft for this one" in error.value.remedy


def test_the_other_numbering_of_layers_is_noticed(draft, target):
    set_layer_ids(draft, [1, 5, 8])  # 2, L // 2, L - 3 of 12 layers, minus one
    finding = by_subject(validate_draft(draft, target))["layer ids"]
    assert finding.level == "warning"
    assert "output of layer i" in finding.cause
    assert '"eagle_aux_hidden_state_convention": "output"' in finding.remedy


@pytest.mark.parametrize("convention", ["input", "output"])
def test_a_stated_numbering_is_believed(draft, target, convention):
    set_layer_ids(draft, [1, 5, 8], eagle_aux_hidden_state_convention=convention)
    finding = by_subject(validate_draft(draft, target))["layer ids"]
    assert finding.level == "ok"
    assert str([1, 5, 8] if convention == "input" else [2, 6, 9]) in finding.cause


def test_unusual_layer_ids_are_nobodys_mistake(draft, target):
    set_layer_ids(draft, [0, 4, 11])
    assert by_subject(validate_draft(draft, target))["layer ids"].level == "ok"


def test_missing_layer_ids_are_a_warning_that_says_which_are_taken(draft, target):
    config = json.loads((draft / "config.json").read_text())
    del config["eagle_config"]
    (draft / "config.json").write_text(json.dumps(config))
    finding = by_subject(validate_draft(draft, target))["layer ids"]
    assert finding.level == "warning"
    assert "[2, 6, 9]" in finding.cause


def test_a_shorter_context_is_a_warning(tmp_path, target):
    short = make_draft(tmp_path / "short", max_position_embeddings=256)
    finding = by_subject(validate_draft(short, target))["context"]
    assert (finding.level, "256" in finding.cause) == ("warning", True)


def spoil(folder, change):
    """Give every floating tensor of a draft ``change(tensor)``."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    new = {name: change(value) if value.is_floating_point() else value for name, value in tensors.items()}
    save_file(new, path)


RANDOM = {
    "normal": (lambda value: torch.randn(value.shape), "fc.weight has a root mean square of"),
    "uniform": (lambda value: torch.rand(value.shape), "fc.weight has a root mean square of 0.5"),
    "bytes": (
        lambda value: (
            torch.randint(0, 256, (2 * value.numel(),), dtype=torch.uint8)
            .view(torch.bfloat16)
            .view(value.shape)
        ),
        "values that are not finite, the first at [",
    ),
    "zeros": (torch.zeros_like, "fc.weight has a root mean square of 0,"),
    "huge": (lambda value: value * 1e30, "fc.weight has a root mean square of"),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_weights_that_nobody_trained_are_an_error_that_names_a_tensor(draft, target, kind):
    torch.manual_seed(0)
    change, words = RANDOM[kind]
    spoil(draft, change)
    finding = by_subject(validate_draft(draft, target))["weights"]
    assert finding.level == "error" and finding.cause.startswith("fc.weight has "), finding
    assert words in finding.cause and "more tensors are wrong" in finding.cause


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_named_with_its_place(draft, target, value):
    path = draft / "model.safetensors"
    tensors = load_file(path)
    tensors["midlayer.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, path)
    cause = by_subject(validate_draft(draft, target))["weights"].cause
    assert cause == "midlayer.mlp.up_proj.weight has 1 values that are not finite, the first at [3, 5]."


def test_a_norm_of_an_impossible_scale_is_an_error(draft, target):
    path = draft / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "norm.weight": tensors["norm.weight"] * 1e4}, path)
    cause = by_subject(validate_draft(draft, target))["weights"].cause
    assert cause.startswith("norm.weight has") and "between 0.001 and 100" in cause


@pytest.mark.parametrize("scale", [1e4, 1e-5])
def test_norms_of_captured_states_have_the_bounds_of_norms(tmp_path, target, scale):
    head = tiny_head(tiny_target(num_layers=12), fc_norm=True)
    head.config = replace(head.config, target="small")
    folder = tmp_path / "normed"
    save_draft(head, folder, metadata={})
    assert by_subject(validate_draft(folder, target))["weights"].level == "ok"
    tensors = load_file(folder / "model.safetensors")
    tensors["fc_norm.1.weight"] *= scale
    save_file(tensors, folder / "model.safetensors")
    finding = by_subject(validate_draft(folder, target))["weights"]
    assert finding.level == "error"
    assert finding.cause.startswith("fc_norm.1.weight has a root mean square of")


def fresh_heads():
    target = tiny_target(num_layers=12)
    like = Eagle3Config.for_target(target.config, 67)
    sizes = {key: getattr(like, key) for key in LAYER_SIZES}
    deepseek = replace(target.config, model_type="deepseek_v3", num_mtp_layers=1)
    return {
        "eagle3": Eagle3Head(replace(like, fc_norm=True)),
        "eagle1": Eagle1Head(Eagle1Config(**sizes, max_position_embeddings=512)),
        "mtp": MTPHead(MTPConfig(deepseek)),
    }


LAST_NORMS = {
    "eagle3": "norm.weight",
    "eagle1": "post_attention_layernorm.weight",
    "mtp": "layers.0.shared_head.norm.weight",
}


@pytest.mark.parametrize("kind", LAST_NORMS)
@pytest.mark.parametrize("share", [1.0, 0.1])
def test_new_heads_of_every_kind_have_the_scale_of_a_heads(kind, share):
    head = fresh_heads()[kind]
    with torch.no_grad():
        head.get_parameter(LAST_NORMS[kind]).mul_(share)  # as kinds begin
    check_values(head.state_dict().items())


def first_table(head):
    """Leave the embedding table of ``head`` as torch makes it, with an RMS of 1."""
    table = head.embed_tokens if isinstance(head, Eagle3Head) else head.markov_head.markov_w1
    with torch.no_grad():
        table.weight.copy_(torch.nn.Embedding(*table.weight.shape).weight)
    return table.weight


@pytest.mark.parametrize("make", [partial(tiny_head, own_embedding=True), tiny_dspark])
def test_a_table_may_have_the_scale_of_torchs_own(make):
    head = make(tiny_target(num_layers=12))
    table = first_table(head)
    check_values(head.state_dict().items())
    table.data *= 1e3
    with pytest.raises(UserError, match="a head's lie between .* and 100"):
        check_values(head.state_dict().items())


def test_the_shipped_head_has_the_scale_of_a_heads():
    shipped = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-eagle3"
    check_values(open_draft(shipped).tensors.items())


def test_a_draft_for_a_target_of_another_name_is_a_warning(tmp_path, target):
    for name, level in (("small", "ok"), ("org/Small", "ok"), ("org/other", "warning"), ("", "warning")):
        folder = make_draft(tmp_path / f"draft-{level}-{len(name)}", target=name)
        assert by_subject(validate_draft(folder, target))["target"].level == level


def test_a_folder_of_a_hub_cache_has_the_models_name(tmp_path):
    assert target_name(tmp_path / "models--org--Name-1B" / "snapshots" / "0a1b2c") == "Name-1B"
    assert target_name(tmp_path / "Name-1B") == "Name-1B"


class Tokenizer:
    def __init__(self, template):
        self.chat_template = template


def test_the_chat_template_is_compared(tmp_path, target, monkeypatch):
    ours, other = Tokenizer("{{ messages }}"), Tokenizer("{{ other }}")
    draft = make_draft(tmp_path / "draft", template=template_hash(ours))
    module = "eagle_kit.drafts.files.findings.load_tokenizer"
    monkeypatch.setattr(module, lambda folder: ours)
    assert by_subject(validate_draft(draft, target))["chat template"].level == "ok"
    monkeypatch.setattr(module, lambda folder: other)
    assert by_subject(validate_draft(draft, target))["chat template"].level == "warning"


@pytest.mark.parametrize(
    ("trained_with", "file", "level"),
    [
        ("", None, "ok"),
        ("{{ messages }}", None, "warning"),
        ("{{ messages }}", "{{ messages }}", "ok"),
        ("{{ messages }}", "{{ messages[0] }}", "warning"),
    ],
)
def test_the_chat_template_of_a_file_is_compared(tmp_path, target, monkeypatch, trained_with, file, level):
    draft = make_draft(tmp_path / "draft", template=template_hash(Tokenizer(trained_with)))
    monkeypatch.setattr("eagle_kit.drafts.files.findings.load_tokenizer", lambda folder: Tokenizer(None))
    path = None
    if file is not None:
        path = tmp_path / "chat.jinja"
        path.write_text(file)
    finding = by_subject(validate_draft(draft, target, path))["chat template"]
    assert finding.level == level
    assert level == "ok" or "--chat-template" in finding.remedy


def test_a_target_without_tokenizer_leaves_the_template_open(tmp_path, target):
    draft = make_draft(tmp_path / "draft", template="00")
    finding = by_subject(validate_draft(draft, target))["chat template"]
    assert (finding.level, "no tokenizer" in finding.cause) == ("warning", True)


def test_no_template_has_no_hash():
    assert template_hash(Tokenizer(None)) == ""
    assert len(template_hash(Tokenizer("x"))) == 16
    assert template_hash(Tokenizer("x")) != template_hash(Tokenizer("y"))


def test_a_broken_file_is_a_finding_beside_the_others(draft, target):
    path = draft / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    findings = validate_draft(draft, target)
    assert by_subject(findings)["weights"].level == "error"
    assert by_subject(findings)["hidden size"].level == "ok"
    with pytest.raises(UserError, match=r"^The file .* is corrupt or truncated"):
        raise_on_errors(findings)


@pytest.mark.parametrize("change", ["nowhere", "other architecture", "no json"])
def test_what_is_no_draft_is_one_finding(draft, target, change, tmp_path):
    if change == "other architecture":
        (draft / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle"]}')
    elif change == "no json":
        (draft / "config.json").write_text("{")
    findings = validate_draft(tmp_path / "nowhere" if change == "nowhere" else draft, target)
    assert [(finding.level, finding.subject) for finding in findings] == [("error", "checkpoint")]
    with pytest.raises(UserError):
        raise_on_errors(findings)


def test_a_target_that_cannot_be_read_raises(draft, tmp_path):
    with pytest.raises(UserError, match="GPT2LMHeadModel"):
        validate_draft(draft, make_target(tmp_path / "other", architectures=["GPT2LMHeadModel"]))


def test_warnings_do_not_refuse():
    raise_on_errors([Finding("warning", "a", "b.", "c."), Finding("ok", "a", "b.")])
    with pytest.raises(UserError, match=r"\(a: b; d: e\)\. c\."):
        raise_on_errors([Finding("error", "a", "b.", "c."), Finding("error", "d", "e.", "f.")])


def make_tokenizer(folder, words):
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def test_a_whole_model_has_to_speak_in_the_targets_ids(tmp_path):
    target = make_target(tmp_path / "target")
    draft = make_target(tmp_path / "draft", num_hidden_layers=2)
    assert by_subject(validate_draft(draft, target))["weights"].level == "error"  # there are none
    save_file({"norm.weight": torch.ones(48)}, draft / "model.safetensors")
    found = by_subject(validate_draft(draft, target))
    assert {subject: finding.level for subject, finding in found.items()} == {
        "vocabulary": "ok",
        "tokenizer": "warning",
        "context": "ok",
        "weights": "ok",
    }
    save_file({"norm.weight": torch.tensor([1.0, float("nan")])}, draft / "model.safetensors")
    assert "the first at [1]" in by_subject(validate_draft(draft, target))["weights"].cause
    make_tokenizer(target, "abc")
    make_tokenizer(draft, "abc")
    assert by_subject(validate_draft(draft, target))["tokenizer"].level == "ok"
    make_tokenizer(draft, "acb")
    assert "other texts" in by_subject(validate_draft(draft, target))["tokenizer"].cause
    short = make_target(tmp_path / "short", max_position_embeddings=16)
    assert by_subject(validate_draft(short, target))["context"].level == "warning"
    other = make_target(tmp_path / "other", vocab_size=7)
    (finding,) = validate_draft(other, target)
    assert (finding.level, finding.subject) == ("error", "vocabulary")
