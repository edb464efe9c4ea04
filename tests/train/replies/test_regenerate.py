"""Regeneration: the target's replies in the order of the source, once each, and a broken run that goes on."""

import json
from pathlib import Path

import pytest

from eagle_kit.cli.app import main
from eagle_kit.core.errors import UserError
from eagle_kit.core.output import RequestOutput
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.train.replies.regenerate import GROUP_FACTOR, RegenerateOptions, regenerate
from eagle_kit.train.replies.responder import EngineResponder


class Parrot:
    """Answers with the last user turn reversed; a turn that contains "long" is cut off at max_tokens."""

    max_batch_size = 2
    max_context = 60

    def __init__(self) -> None:
        self.num_prompts = 0
        self.fail_after: int | None = None

    def tokenize(self, prompt):
        return [ord(char) for message in prompt.messages for char in message["role"][0] + message["content"]]

    def generate(self, prompts, params, on_finish):
        """Replies finish in an order of their own: every second one first."""
        for i in [*range(1, len(prompts), 2), *range(0, len(prompts), 2)]:
            self.num_prompts += 1
            if self.fail_after is not None and self.num_prompts > self.fail_after:
                raise KeyboardInterrupt
            turn = "".join(map(chr, prompts[i])).rpartition("u")[2]
            reply = turn[::-1]
            reason = "length" if "long" in turn else "stop"
            on_finish(i, RequestOutput(prompts[i], [ord(char) for char in reply], reply, reason))


def _source(folder: Path, dialogues: list[list[str]], system: str | None = None) -> str:
    lines = []
    for number, turns in enumerate(dialogues):
        messages = [{"role": "system", "content": system}] if system else []
        for turn in turns:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "theirs"}]
        lines.append(json.dumps({"id": f"c{number}", "messages": messages}))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder / "chats.jsonl")


def _records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _run(llm: Parrot, source: str, out: Path, **options):
    options = {"sampling": SamplingParams(max_tokens=512, seed=0), **options}
    return regenerate(EngineResponder(llm), source, out, RegenerateOptions(**options), progress=False)


def test_every_reply_is_the_targets_own_and_later_turns_see_it(tmp_path):
    source, out = (
        _source(tmp_path, [["abc", "xyz", "third"], ["q"]], system="be kind"),
        tmp_path / "out.jsonl",
    )
    report = _run(Parrot(), source, out, max_turns=2, with_ids=True)
    first, second = _records(out)
    assert [(m["role"], m["content"]) for m in first["messages"]] == [
        ("system", "be kind"), ("user", "abc"), ("assistant", "cba"), ("user", "xyz"), ("assistant", "zyx"),
    ]  # fmt: skip
    assert first["finish_reasons"] == ["stop", "stop"] and second["finish_reasons"] == ["stop"]
    assert "".join(map(chr, first["ids"])) == "sbe kinduabcacbauxyzzyx"
    assert (report.num_written, report.num_found, report.num_reply_tokens) == (2, 0, 7)


def test_a_cut_reply_ends_its_conversation(tmp_path):
    out = tmp_path / "out.jsonl"
    _run(Parrot(), _source(tmp_path, [["long", "next"]]), out)
    record = _records(out)[0]
    assert record["finish_reasons"] == ["length"] and len(record["messages"]) == 2


def test_a_turn_beyond_the_prompt_limit_ends_its_conversation_and_a_first_one_is_skipped(tmp_path):
    out = tmp_path / "out.jsonl"
    report = _run(
        Parrot(), _source(tmp_path, [["abc", "d" * 30], ["e" * 30], ["f"]]), out, max_prompt_tokens=20
    )
    assert [record["id"] for record in _records(out)] == ["c0", "c2"]
    assert len(_records(out)[0]["messages"]) == 2
    assert sum(report.skipped.counts.values()) == 1


def test_the_same_human_turns_are_answered_once(tmp_path):
    out = tmp_path / "out.jsonl"
    report = _run(Parrot(), _source(tmp_path, [["a"], ["b"], ["a"], ["a", "c"]]), out)
    assert [record["id"] for record in _records(out)] == ["c0", "c1", "c3"]
    assert sum(report.skipped.counts.values()) == 1


def test_the_same_turns_under_other_system_messages_are_other_conversations(tmp_path):
    kind = _source(tmp_path, [["a"], ["a"]], system="be kind")
    lines = (tmp_path / "chats.jsonl").read_text().splitlines()
    (tmp_path / "chats.jsonl").write_text("\n".join([*lines, lines[0].replace("kind", "brief")]) + "\n")
    _run(Parrot(), kind, tmp_path / "out.jsonl")
    assert [r["messages"][0]["content"] for r in _records(tmp_path / "out.jsonl")] == ["be kind", "be brief"]


def test_conversations_of_one_id_are_each_answered_when_a_broken_run_goes_on(tmp_path):
    source, out = _source(tmp_path, [[f"turn {n}"] for n in range(4)]), tmp_path / "out.jsonl"
    chats = tmp_path / "chats.jsonl"
    chats.write_text(chats.read_text().replace('"c1"', '"c0"').replace('"c2"', '"c0"'))
    _run(Parrot(), source, out, limit=1)
    _run(Parrot(), source, out, limit=2)
    _run(Parrot(), source, out)
    turns = [record["messages"][0]["content"] for record in _records(out)]
    assert turns == [f"turn {n}" for n in range(4)]


def test_a_broken_run_goes_on_and_ends_with_the_same_file(tmp_path):
    source = _source(tmp_path, [[f"turn {n}", f"more {n}"] for n in range(40)])
    straight, broken = tmp_path / "straight.jsonl", tmp_path / "broken.jsonl"
    _run(Parrot(), source, straight)
    llm = Parrot()
    llm.fail_after = 3 * GROUP_FACTOR * llm.max_batch_size
    with pytest.raises(KeyboardInterrupt):
        _run(llm, source, broken)
    num_done = len(_records(broken))
    assert 0 < num_done < 40
    with broken.open("a", encoding="utf-8") as file:
        file.write('{"id": "c')
    again = Parrot()
    report = _run(again, source, broken)
    assert broken.read_text() == straight.read_text()
    assert (report.num_found, report.num_written) == (num_done, 40 - num_done)
    assert again.num_prompts == 2 * (40 - num_done)


def test_a_second_writer_of_a_file_is_refused_and_the_first_goes_on(tmp_path):
    source, out = _source(tmp_path, [["a"], ["b"]]), tmp_path / "new" / "out.jsonl"

    class Interrupted(Parrot):
        def generate(self, prompts, params, on_finish):
            with pytest.raises(UserError, match=rf"Another process is writing to {out}\."):
                _run(Parrot(), source, out)
            return super().generate(prompts, params, on_finish)

    assert _run(Interrupted(), source, out).num_written == 2
    assert _run(Parrot(), source, out).num_found == 2
    assert {path.name for path in out.parent.iterdir()} == {
        "out.jsonl",
        "out.settings.json",
        "out.manifest.json",
    }


@pytest.mark.parametrize("answered", range(7))
def test_what_is_answered_in_order_is_kept_inside_a_group(tmp_path, answered):
    source, out = _source(tmp_path, [[f"turn {n}"] for n in range(6)]), tmp_path / "out.jsonl"
    llm = Parrot()
    llm.fail_after = answered
    if answered < 6:
        with pytest.raises(KeyboardInterrupt):
            _run(llm, source, out)
    else:
        _run(llm, source, out)
    kept = [record["id"] for record in _records(out)]
    # 1, 3 and 5 finish first, then 0, 2 and 4; a reply waits for those before it
    assert kept == [f"c{n}" for n in range({4: 2, 5: 4, 6: 6}.get(answered, 0))]


def test_the_limit_counts_what_an_earlier_run_wrote(tmp_path):
    source, out = _source(tmp_path, [[f"turn {n}"] for n in range(9)]), tmp_path / "out.jsonl"
    _run(Parrot(), source, out, limit=4)
    assert _run(Parrot(), source, out, limit=4).num_written == 0
    assert _run(Parrot(), source, out, limit=6).num_written == 2
    assert [record["id"] for record in _records(out)] == [f"c{n}" for n in range(6)]


def test_another_file_is_not_appended_to(tmp_path):
    source, out = _source(tmp_path, [["a"]]), tmp_path / "out.jsonl"
    out.write_text('{"id": "c0", "messages": []}\n', encoding="utf-8")
    with pytest.raises(UserError, match="line 1, was not written by regeneration"):
        _run(Parrot(), source, out)
    assert len(_records(out)) == 1


def test_shards_together_are_the_whole(tmp_path):
    source = _source(tmp_path, [["a"], ["b"], ["a"], ["c"], ["d"]])
    _run(Parrot(), source, tmp_path / "whole.jsonl")
    for part in range(2):
        _run(Parrot(), source, tmp_path / f"{part}.jsonl", shard=(part, 2))
    parts = [_records(tmp_path / f"{part}.jsonl") for part in range(2)]
    assert [record["id"] for record in parts[0]] == ["c0", "c3"]
    assert sorted(parts[0] + parts[1], key=lambda record: record["id"]) == _records(tmp_path / "whole.jsonl")


@pytest.mark.parametrize("action", ["regenerate", "capture"])
def test_a_shard_that_does_not_exist_is_refused(action, capsys):
    with pytest.raises(SystemExit):
        main(["data", action, "--shard", "2/2"])
    assert "--shard: 2/2 is none" in capsys.readouterr().err


def test_replies_made_otherwise_or_of_unknown_settings_are_not_appended(tmp_path):
    source, out = _source(tmp_path, [["a"], ["b"], ["c"]]), tmp_path / "out.jsonl"
    _run(Parrot(), source, out, limit=1)
    with pytest.raises(UserError, match=r"temperature 0\.0, but now it is 0\.8"):
        _run(Parrot(), source, out, limit=2, sampling=SamplingParams(max_tokens=512, temperature=0.8, seed=0))
    assert _run(Parrot(), source, out, limit=2).num_written == 1
    out.with_suffix(".settings.json").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        _run(Parrot(), source, out)
