"""A target folder that holds an MTP module is served with it by its name alone."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
from tiny import tiny_dflash
from tiny_mtp import save_target
from tiny_run import make_target

from eagle_kit.cli import app
from eagle_kit.cli.serve_flags import check_algorithm
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.models.loading.loader import load_target
from eagle_kit.server.api.startup import find_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("nextn")
    make_target(root / "target")
    save_target(root / "made", vocab_size=300, eos_token_id=2, bos_token_id=1)
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.move(root / "made" / name, root / "target" / name)
    return root / "target"


def test_generate_says_the_same_with_the_targets_own_module(folder, capsys):
    common = ["generate", "--target", str(folder), "--prompt", "a cat", "--max-tokens", "12", "--json"]
    assert app.main(common) == 0
    plain = json.loads(capsys.readouterr().out)
    assert app.main([*common, "--algorithm", "NEXTN", "--shape", "3,4,8"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["token_ids"] == plain["token_ids"]
    assert 0 < drafted["num_verifies"] < len(plain["token_ids"])


def test_serve_asks_for_no_draft(folder):
    def check(algorithm):
        args = Namespace(speculative_algorithm=algorithm)
        return check_algorithm(args, find_model(str(folder), None, "none"))

    assert check("NEXTN").draft is None and str(check("NEXTN").target) == str(folder)
    with pytest.raises(UserError, match="EAGLE needs a draft"):
        check("EAGLE")


def test_serve_takes_the_draft_in_its_targets_folder(tmp_path):
    target = make_target(tmp_path / "target")
    save_draft(tiny_dflash(load_target(target)), target / "DFlash", metadata={})
    args = Namespace(speculative_algorithm="DFLASH")
    model = check_algorithm(args, find_model(str(target), None, "none"))
    assert Path(model.draft) == target / "DFlash" and model.target == str(target)
