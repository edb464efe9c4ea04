"""Targets without a chat template: texts are continued, and a template comes from a file."""

import json
import shutil

import pytest
from accelerate import PartialState

from eagle_kit import LLM
from eagle_kit.cli.app import main
from eagle_kit.cli.serve import describe_template
from eagle_kit.config import load_config
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.template import read_chat_template
from eagle_kit.models.loading.source import load_tokenizer
from eagle_kit.train.run.setup import load_components
from tests.support.tiny_run import TEMPLATE, make_config, make_conversations, make_target, tokens_of

CHAT = [{"role": "user", "content": "Hi"}]


def remove_template(folder):
    """Leave a target's folder without a chat template."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("chat_template", None)
    path.write_text(json.dumps(settings))
    return folder


@pytest.fixture
def base(tmp_path):
    return remove_template(make_target(tmp_path / "target"))


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


def test_a_text_is_continued_as_it_is_and_messages_are_refused_with_a_remedy(base):
    llm = LLM(base)
    assert llm.tokenize_task("Hi") == tokens_of("Hi")
    with pytest.raises(UserError, match="no chat template") as error:
        llm.tokenize_chat(CHAT)
    assert "--chat-template" in error.value.remedy


def test_acceptance_is_measured_on_texts_that_are_continued(base):
    llm = LLM(base, algorithm="NGRAM")
    stats = llm.acceptance(["abababab", "Hi"], max_tokens=80)
    assert 0 < stats.num_emitted_tokens <= 160
    with pytest.raises(UserError, match="no chat template"):
        llm.acceptance(CHAT)


def test_messages_are_rendered_by_the_template_of_a_file(base, template):
    own = load_tokenizer(base)
    llm = LLM(base, tokenizer=own, chat_template=template)
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert llm.tokenize_chat(CHAT) == llm.tokenize_task("Hi") == tokens_of(prompt)
    assert own.chat_template is None


def test_the_template_of_a_file_comes_before_the_targets_own(base, tmp_path):
    (base / "chat_template.jinja").write_text(TEMPLATE)
    file = tmp_path / "other.jinja"
    file.write_text("{{ messages[0]['content'] }}!")
    assert LLM(base, chat_template=file).tokenize_chat(CHAT) == tokens_of("Hi!")


def test_a_training_learns_by_the_template_of_a_file_what_it_would_by_the_targets_own(tmp_path, template):
    path = make_config(tmp_path)
    own = load_components(load_config(TrainConfig, path), PartialState()).data
    own_rows = [own.row(n).ids.tolist() for n in range(len(own))]
    remove_template(tmp_path / "target")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match="no chat template"):
        load_components(load_config(TrainConfig, path), PartialState())
    given = load_config(TrainConfig, path, [f"data.chat_template={template}"])
    rows = load_components(given, PartialState()).data
    assert [rows.row(n).ids.tolist() for n in range(len(rows))] == own_rows


def test_the_server_says_at_its_start_which_template_it_has(base, template):
    assert describe_template(LLM(base)) == "no template, /v1/completions only"
    assert describe_template(LLM(base, chat_template=template)) == f"the template of {template}"
    (base / "chat_template.jinja").write_text(TEMPLATE)
    assert describe_template(LLM(base)) == "the target's template"


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"{% for m in messages %}", "no template"),
        (b'{"chat_template": "{{ messages }}"}', "is JSON"),
        (b"Hello {{ name }}", "does not read messages"),
        (b"", "does not read messages"),
        (b"\xff{{ messages }}", "not UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_chat_template_is_one_sentence(tmp_path, content, cause):
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=cause):
        read_chat_template(path)


def test_responses_to_chats_are_refused_before_weights_are_read_and_files_are_written(base, tmp_path, capsys):
    (base / "model.safetensors").unlink()
    chats = make_conversations(tmp_path / "chats.jsonl")
    out = tmp_path / "out" / "responses.jsonl"
    command = ["data", "regenerate", "--target", str(base), "--source", str(chats), "--out", str(out)]
    assert main(command) == 2
    assert "no chat template" in capsys.readouterr().err and not out.parent.exists()


def test_a_draft_within_a_time_is_refused_before_the_budget_is_compared(base, tmp_path, capsys):
    command = ["make-draft", str(base), "--budget", "1s", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "no chat template" in error and "--chat-template FILE" in error
