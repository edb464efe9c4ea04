"""The target of a command: given, or named by drafts and found on this machine by the hash of its weights."""

import json
from pathlib import Path

import pytest

from eagle_kit.cli.app import main
from eagle_kit.core.errors import TargetError, UserError
from eagle_kit.drafts.files.named_target import NamedTarget, naming, target_of
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.models.loading.loader import target_fingerprint
from eagle_kit.models.loading.target_folders import find_folder, note_path, remember_folder
from tests.drafts.test_validate import by_subject, make_draft, make_target


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def trained_for(folder: Path, target: Path) -> Path:
    """A draft whose files name the target by its last part and by the hash of its weights."""
    draft = make_draft(folder, target=target.name)
    about = {"target": target.name, "target_weights": target_fingerprint(target)}
    (draft / "eagle_kit.json").write_text(json.dumps(about))
    return draft


def test_a_target_is_found_from_any_folder_by_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(tmp_path / "models" / "small")
    draft = trained_for(tmp_path / "draft", target)
    # A folder of the same name in the working directory is another model.
    make_target(tmp_path / "work" / "small", rms_norm_eps=0.5)
    monkeypatch.chdir(tmp_path / "work")

    remember_folder(target_fingerprint(target), target)
    found = target_of([draft], None, "usual")
    assert Path(found.name) == target and str(note_path(target_fingerprint(target))) in found.origin
    assert target_of([draft], "mine", "usual") == ("mine", "given with --target")


def test_a_place_with_other_weights_by_now_is_none(tmp_path: Path) -> None:
    target = make_target(tmp_path / "small")
    weights = target_fingerprint(target)
    remember_folder(weights, target)
    assert find_folder(weights) == target
    assert find_folder(f"../places/{weights}") is None
    (target / "config.json").write_text("{}")
    assert find_folder(weights) is None


@pytest.mark.parametrize("note", ["", "[]", '{"folder": 3}', '{"folder": "/nowhere"}'])
def test_a_damaged_note_is_none(cache: Path, note: str) -> None:
    (cache / "places").mkdir(parents=True)
    (cache / "places" / "ab12.json").write_text(note)
    assert find_folder("ab12") is None


def test_a_target_that_is_not_known_here_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = make_draft(tmp_path / "draft", target="gemma-chat")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"names its target 'gemma-chat', and no folder of that name"):
        target_of([draft], None, "usual")
    (tmp_path / "gemma-chat").mkdir()
    assert target_of([draft], None, "usual").name == "gemma-chat"


def test_drafts_without_a_name_have_the_usual_target_and_two_names_are_refused(tmp_path: Path) -> None:
    nameless = make_draft(tmp_path / "nameless", target="")
    one = make_draft(tmp_path / "one", target="org/one")
    two = make_draft(tmp_path / "two", target="org/two")
    assert target_of([nameless], None, "usual").name == "usual"
    assert target_of([], None, "usual").name == "usual"
    assert target_of([nameless, one], None, "usual").name == "org/one"
    with pytest.raises(UserError, match="name different targets: org/one is named by"):
        target_of([one, two], None, "usual")


def test_a_check_compares_weights_where_the_draft_has_their_hash(tmp_path: Path) -> None:
    target = make_target(tmp_path / "small")
    draft = trained_for(tmp_path / "draft", target)
    same = by_subject(validate_draft(draft, target))
    assert same["target weights"].level == "ok" and "target" not in same
    other = make_target(tmp_path / "other" / "small", rms_norm_eps=0.5)
    assert by_subject(validate_draft(draft, other))["target weights"].level == "warning"


def test_an_error_about_a_target_says_where_its_name_came_from(tmp_path: Path) -> None:
    target = NamedTarget("gemma", "given with --target")
    with pytest.raises(UserError) as caught, naming(target):
        raise TargetError("The draft does not fit the target.", "Give another.")
    assert caught.value.cause.endswith("The target gemma is given with --target.")
    assert caught.value.remedy == "Give another."
    with pytest.raises(UserError) as other, naming(target):
        raise UserError("The disk is full.", "Free some space.")
    assert other.value.cause == "The disk is full."


def test_a_draft_that_does_not_fit_and_a_target_that_is_not_there_name_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target(tmp_path / "small")
    draft = trained_for(tmp_path / "draft", target)
    remember_folder(target_fingerprint(target), target)
    nowhere = str(tmp_path / "nowhere")
    for command in (["generate", "--prompt", "Hi", "--draft"], ["tune"], ["diagnose"], ["validate"]):
        assert main([*command, str(draft), "--target", nowhere]) == 2
        error = capsys.readouterr().err
        assert f"The target {nowhere} is given" in error, command
    # A head without weights that fit.
    assert main(["generate", "--prompt", "Hi", "--draft", str(draft)]) == 2
    assert str(target) in capsys.readouterr().err
