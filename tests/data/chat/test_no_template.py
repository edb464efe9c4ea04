"""Targets without a chat template: the remedy of the error can be followed."""

import json

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.template import prompt_text
from eagle_kit.models.loading.source import load_tokenizer
from tests.support.tiny_run import TEMPLATE, make_target

CHAT = [{"role": "user", "content": "Hi"}]


def test_a_target_without_a_chat_template_takes_one_of_a_file_in_its_folder(tmp_path):
    folder = make_target(tmp_path)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="no chat template") as error:
        prompt_text(load_tokenizer(folder), CHAT)
    assert "chat_template.jinja" in error.value.remedy

    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert prompt_text(load_tokenizer(folder), CHAT).startswith("<|im_start|>user\nHi")
