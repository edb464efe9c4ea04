"""Regeneration: the target's responses in the order of the source, once each, and a broken run that goes
on."""

import errno
import json
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest
from chat_templates import tokenizer_for

from eagle_kit.cli.app import main
from eagle_kit.config.train import TemplateVariant
from eagle_kit.core.errors import UserError
from eagle_kit.core.output import RequestOutput
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.data.chat.forms import Conversation, to_conversation
from eagle_kit.data.chat.renderer import ChatRenderer
from eagle_kit.datagen.regenerate import regenerate as regeneration
from eagle_kit.datagen.regenerate.dialogue import (
    EMPTY,
    REFUSED,
    TRUNCATED,
    is_refusal,
    read_refusals,
    refusal_pattern,
    script,
)
from eagle_kit.datagen.regenerate.regenerate import GROUP_FACTOR, TOO_LONG, RegenerateOptions, regenerate
from eagle_kit.datagen.regenerate.responder import EngineResponder


class Parrot:
    """Answers with the last user turn reversed; a turn that contains "long" is cut off at max_tokens, "brim"
    at the end of the context, "ill" fails, and "gone" is aborted;
    of "say nothing" it is empty."""

    max_batch_size = 2
    max_context = 60
    tokenizer = None

    def __init__(self) -> None:
        self.num_prompts = 0
        self.fail_after: int | None = None

    def tokenize_chat(self, prompt):
        return [ord(char) for message in prompt.messages for char in message["role"][0] + message["content"]]

    def chat(self, prompts, params, on_finish):
        """Responses finish in an order of their own: every second one first."""
        for i in [*range(1, len(prompts), 2), *range(0, len(prompts), 2)]:
            self.num_prompts += 1
            if self.fail_after is not None and self.num_prompts > self.fail_after:
                raise KeyboardInterrupt
            turn = "".join(map(chr, prompts[i])).rpartition("u")[2]
            response = " \n" if "say nothing" in turn else turn[::-1]
            ends = {"long": "length", "brim": "context", "ill": "error", "gone": "abort"}
            reason = next((ends[word] for word in ends if word in turn), "stop")
            on_finish(i, RequestOutput(prompts[i], [ord(char) for char in response], response, reason))


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


def test_every_response_is_the_targets_own_and_later_turns_see_it(tmp_path):
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
    assert (report.num_written, report.num_found, report.num_response_tokens) == (2, 0, 7)


def test_a_records_category_stays_with_its_responses(tmp_path):
    source, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    said = [{"role": "user", "content": "abc"}]
    source.write_text(json.dumps({"id": "a", "category": "translation", "messages": said}) + "\n")
    _run(Parrot(), str(source), out)
    record = _records(out)[0]
    assert record["category"] == "translation" == to_conversation(record, "").category


def test_a_cut_response_ends_its_conversation(tmp_path):
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
    assert report.shortened == {TOO_LONG: 1} and not report.left_out
    assert json.loads((tmp_path / "out.manifest.json").read_text())["shortened"] == {TOO_LONG: 1}


def test_a_response_longer_than_the_prompt_limit_ends_nothing_where_the_next_prompt_drops_its_thought(
    tmp_path,
):
    talk = {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Again"}]}
    llm = Agent(thought="hm " * 400)
    (record,), _, manifest = _ask(tmp_path, [talk], llm, max_prompt_tokens=300)
    assert len(llm.tokenizer(record["messages"][1]["reasoning_content"])["input_ids"]) > 300
    assert record["finish_reasons"] == ["stop", "stop"] and manifest["shortened"] == {}


def test_a_later_turn_beyond_the_engines_context_ends_its_conversation(tmp_path):
    class Strict(Parrot):
        def chat(self, prompts, params, on_finish):
            assert all(len(prompt) < self.max_context for prompt in prompts)
            super().chat(prompts, params, on_finish)

    source = _source(tmp_path, [["abc", "d" * 80], ["f"]])
    _run(Strict(), source, tmp_path / "out.jsonl")  # max_prompt_tokens 1024
    assert [len(record["messages"]) for record in _records(tmp_path / "out.jsonl")] == [2, 2]


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


def test_the_same_turns_with_thinking_on_and_off_are_two_conversations(tmp_path):
    talk = {"messages": [{"role": "user", "content": "Hi"}]}
    talks = [talk | {"chat_template_kwargs": {"enable_thinking": on}} for on in (True, False, True)]
    records, report, _ = _ask(tmp_path, talks)
    said = [record["messages"][-1] for record in records]
    assert [message["content"] for message in said] == ["Dry.", "Dry."]
    assert said[0]["reasoning_content"] == "hm" and said[1].keys() == {"role", "content"}
    assert said[0]["generated"] == "<think>\nhm\n</think>\n\nDry.<|im_end|>"
    assert sum(report.skipped.counts.values()) == 1


def test_conversations_of_one_id_are_each_answered_when_a_broken_run_goes_on(tmp_path):
    source, out = _source(tmp_path, [[f"turn {n}"] for n in range(4)]), tmp_path / "out.jsonl"
    chats = tmp_path / "chats.jsonl"
    chats.write_text(chats.read_text().replace('"c1"', '"c0"').replace('"c2"', '"c0"'))
    _run(Parrot(), source, out, limit=1)
    _run(Parrot(), source, out, limit=2)
    _run(Parrot(), source, out)
    turns = [record["messages"][0]["content"] for record in _records(out)]
    assert turns == [f"turn {n}" for n in range(4)]


def test_conversations_of_one_id_that_begin_alike_are_each_answered_when_a_broken_run_goes_on(tmp_path):
    source = _source(tmp_path, [["hello", "first"], ["hello", "second"]])
    out = tmp_path / "out.jsonl"
    chats = tmp_path / "chats.jsonl"
    chats.write_text(chats.read_text().replace('"c1"', '"c0"'))
    _run(Parrot(), source, out, limit=1)
    assert len(_records(out)) == 1
    _run(Parrot(), source, out)
    turns = [record["messages"][2]["content"] for record in _records(out)]
    assert turns == ["first", "second"]


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


def test_a_manifest_that_a_killed_run_did_not_write_is_written(tmp_path):
    turns = [["long one"], ["a"], ["a"], ["b", "long two"], ["c"], ["d"]]
    source = _source(tmp_path, turns)
    out = tmp_path / "out.jsonl"
    manifest = tmp_path / "out.manifest.json"
    options = {"skip_truncated": True, "limit": 4}
    _run(Parrot(), source, out, **options)
    whole = json.loads(manifest.read_text())
    manifest.unlink()
    _run(Parrot(), source, out, **options)
    assert json.loads(manifest.read_text()) == whole
    manifest.write_text(json.dumps({**whole, "conversations": 1}))
    _run(Parrot(), source, out, **options)
    assert json.loads(manifest.read_text()) == whole


def test_a_run_that_was_killed_before_responses_whose_rest_is_left_out_counts_the_rest_once(tmp_path):
    """The list of what was left out is written first; the responses are asked for again."""
    source = _source(tmp_path, [["a", "long one"], ["b"]])
    out = tmp_path / "out.jsonl"
    _run(Parrot(), source, out, skip_truncated=True)
    whole = (tmp_path / "out.manifest.json").read_text()
    lines = out.read_bytes()
    out.write_bytes(b"")
    _run(Parrot(), source, out, skip_truncated=True)
    assert out.read_bytes() == lines
    _run(Parrot(), source, out, skip_truncated=True)
    assert (tmp_path / "out.manifest.json").read_text() == whole


def test_nothing_is_written_behind_half_a_line_of_a_full_disk(tmp_path, monkeypatch):
    """Which is what a disk has room for, before other files are removed from it."""
    source = _source(tmp_path, [["long one"], ["b"], ["c"]])
    out = tmp_path / "out.jsonl"
    write = regeneration.append

    def full(path, lines):
        path.write_text(lines[:20])
        monkeypatch.setattr(regeneration, "append", write)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(regeneration, "append", full)
    with pytest.raises(UserError, match=r"out.jsonl cannot be written: No space.*Free some space, or give"):
        _run(Parrot(), source, out, skip_truncated=True)
    _run(Parrot(), source, out, skip_truncated=True)
    assert [record["id"] for record in _records(out)] == ["c1", "c2"]
    assert len(_records(tmp_path / "out.left-out.jsonl")) == 1


def test_a_second_writer_of_a_file_is_refused_and_the_first_goes_on(tmp_path):
    source, out = _source(tmp_path, [["a"], ["b"]]), tmp_path / "new" / "out.jsonl"

    class Interrupted(Parrot):
        def chat(self, prompts, params, on_finish):
            with pytest.raises(UserError, match=rf"Another process is writing to {out}\."):
                _run(Parrot(), source, out)
            return super().chat(prompts, params, on_finish)

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
    # 1, 3 and 5 finish first, then 0, 2 and 4; a response waits for those before it
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


@pytest.mark.parametrize("name", ["responses.0", "responses"])
def test_a_file_that_training_would_not_read_is_refused(tmp_path, name):
    """The files beside it would be those of responses.1 too."""
    with pytest.raises(UserError, match="does not end in .jsonl"):
        _run(Parrot(), _source(tmp_path, [["a"]]), tmp_path / name)


def test_a_source_that_is_not_there_leaves_no_file(tmp_path):
    for source in ("nowhere.jsonl", "package:nothing"):
        with pytest.raises(UserError):
            _run(Parrot(), source, tmp_path / "out.jsonl")
    assert not list(tmp_path.iterdir())


def test_a_record_that_cannot_be_written_is_skipped_and_the_others_are_answered(tmp_path):
    source = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "abc"}]
    records = [
        {"id": "\ud83d", "messages": turns},
        {"category": "\ud83d", "messages": turns},
        {"messages": turns},
    ]
    source.write_text("\n".join(map(json.dumps, records)))
    report = _run(Parrot(), str(source), tmp_path / "out.jsonl")
    assert report.num_written == 1 and report.skipped.counts == {"half a character (a lone surrogate)": 2}


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
    what = ["run.yaml"] if action == "capture" else ["--source", "a"]
    assert main(["data", action, *what, "--out", "x", "--shard", "2/2"]) == 2
    assert "--shard is 2/2" in capsys.readouterr().err


def test_responses_made_otherwise_or_of_unknown_settings_are_not_appended(tmp_path):
    source, out = _source(tmp_path, [["a"], ["b"], ["c"]]), tmp_path / "out.jsonl"
    _run(Parrot(), source, out, limit=1)
    with pytest.raises(UserError, match=r"temperature 0\.0, but now it is 0\.8"):
        _run(Parrot(), source, out, limit=2, sampling=SamplingParams(max_tokens=512, temperature=0.8, seed=0))
    assert _run(Parrot(), source, out, limit=2).num_written == 1
    out.with_suffix(".settings.json").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        _run(Parrot(), source, out)


VARIED = {
    "max_turns": 1,
    "max_prompt_tokens": 30,
    "with_ids": True,
    "shard": (0, 2),
    "samples": 2,
    "chat_template_kwargs": (TemplateVariant(kwargs={"enable_thinking": True}),),
    "skip_refusals": True,
    "skip_truncated": True,
    "near_duplicates": 0.9,
    "test_prompts": ("What is said in the test?",),
}
"""Another value for every option that decides the responses; the first is of ``limit``, which does not."""
SAMPLING = {"max_tokens": 12, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1, "stop": ("!",)}


def test_every_option_is_varied() -> None:
    names = {field.name for field in fields(RegenerateOptions)}
    assert names == {*VARIED, "sampling", "limit", "refusals"}


@pytest.mark.parametrize("name", [*VARIED, *SAMPLING, "refusals"])
def test_a_file_is_not_continued_with_another_option(tmp_path, name):
    source = _source(tmp_path, [["a"], ["b"], ["c"]])
    out = tmp_path / "out.jsonl"
    before = {"skip_refusals": True} if name == "refusals" else {}
    sampling = SamplingParams(max_tokens=512, seed=0)
    if name == "samples":  # of greedy responses there is one
        sampling = replace(sampling, temperature=0.8)
    _run(Parrot(), source, out, limit=1, sampling=sampling, **before)
    changed = {name: VARIED[name]} if name in VARIED else {}
    if name in SAMPLING:
        sampling = replace(sampling, **{name: SAMPLING[name]})
    if name == "refusals":
        changed = {"skip_refusals": True, "refusals": ("nein",)}
    with pytest.raises(UserError, match=f"were made with {name} "):
        _run(Parrot(), source, out, sampling=sampling, **changed)
    assert len(_records(out)) == 1


def test_a_file_of_before_an_option_existed_goes_on_with_its_default(tmp_path):
    source = _source(tmp_path, [["a"], ["b"]])
    out = tmp_path / "out.jsonl"
    _run(Parrot(), source, out, limit=1)
    path = out.with_suffix(".settings.json")
    known = json.loads(path.read_text())
    later = ("samples", "chat_template_kwargs", "skip_refusals", "refusals", "skip_truncated")
    later += ("near_duplicates", "test_prompts")
    path.write_text(json.dumps({name: value for name, value in known.items() if name not in later}))
    for name in (
        "chat_template_kwargs",
        "skip_refusals",
        "skip_truncated",
        "near_duplicates",
        "test_prompts",
    ):
        with pytest.raises(UserError, match=f"were made with {name} "):
            _run(Parrot(), source, out, **{name: VARIED[name]})
    assert _run(Parrot(), source, out).num_written == 1


def test_a_file_of_before_there_were_patterns_of_refusals_has_none(tmp_path):
    source = _source(tmp_path, [["a"], ["b"]])
    out = tmp_path / "out.jsonl"
    _run(Parrot(), source, out, limit=1, skip_refusals=True)
    path = out.with_suffix(".settings.json")
    known = json.loads(path.read_text())
    del known["refusals"]
    path.write_text(json.dumps(known))
    with pytest.raises(UserError, match="were made with refusals "):
        _run(Parrot(), source, out, skip_refusals=True, refusals=("nein",))
    assert _run(Parrot(), source, out, skip_refusals=True).num_written == 1


@pytest.mark.parametrize("name", ["limit", "max_turns", "max_prompt_tokens", "samples"])
def test_none_at_all_of_something_is_refused(name):
    with pytest.raises(UserError, match=f"{name} is 0"):
        RegenerateOptions(SamplingParams(), **{name: 0})


@pytest.mark.parametrize("similarity", [0.05, 1.0])
def test_the_least_and_the_greatest_similarity_are_taken(similarity):
    assert RegenerateOptions(SamplingParams(), near_duplicates=similarity).near_duplicates == similarity


def test_a_prompt_as_long_as_it_may_be_is_answered(tmp_path):
    out = tmp_path / "out.jsonl"
    turns = [["e" * 19], ["f" * 20], ["ab", "c" * 13], ["ba", "c" * 14]]
    report = _run(Parrot(), _source(tmp_path, turns), out, max_prompt_tokens=20)
    assert [(r["id"], len(r["messages"])) for r in _records(out)] == [("c0", 2), ("c2", 4), ("c3", 2)]
    assert sum(report.skipped.counts.values()) == 1 and report.shortened == {TOO_LONG: 1}


def test_a_target_that_is_not_known_is_not_compared(tmp_path):
    source = _source(tmp_path, [["a"], ["b"], ["c"]])
    out = tmp_path / "out.jsonl"

    def answer(target: str, limit: int):
        options = RegenerateOptions(SamplingParams(max_tokens=512, seed=0), limit=limit)
        return regenerate(EngineResponder(Parrot()), source, out, options, target=target, progress=False)

    assert answer("first", 1).num_written == 1
    with pytest.raises(UserError, match="were made with target first, but now it is second"):
        answer("second", 2)
    assert answer("", 2).num_written == 1


def test_the_manifest_counts_all_sessions_and_the_report_this_one(tmp_path):
    source = _source(tmp_path, [["a"], ["bcd"], ["a"], ["ef", "gh"]])
    out = tmp_path / "out.jsonl"
    assert str(_run(Parrot(), source, out, limit=1)) == "1 response tokens"
    report = _run(Parrot(), source, out)
    assert str(report) == "7 response tokens"
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["conversations"] == 3
    assert manifest["not_answered"] == {"the same human turns as an earlier conversation": 1}
    assert manifest["settings"]["source"] == source and manifest["settings"]["max_tokens"] == 512


class Agent:
    """Calls the tool where it is asked for rain, and answers the results; with thinking on it thinks
    first. Responses at a temperature differ by their seed. The prompt of every response is kept."""

    max_batch_size = 2
    max_context = 4000

    def __init__(self, thought: str = "hm") -> None:
        self.tokenizer = tokenizer_for("qwen3")
        self.renderer = ChatRenderer(self.tokenizer)
        self.thought = thought
        self.prompts: list[str] = []

    def tokenize_chat(self, prompt):
        return self.renderer.prompt_token_ids(prompt)

    def chat(self, prompts, params, on_finish):
        for i, (ids, each) in enumerate(zip(prompts, params, strict=True)):
            text = self.tokenizer.decode(ids)
            self.prompts.append(text)
            asked = text.rpartition("<|im_start|>user")[2]
            response = "I am sorry, but I cannot help with that." if "bomb" in asked else "Dry."
            if "tool_response" not in asked and "Rain" in asked:
                response = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
            if each.temperature:
                response += f" {each.seed % 1000}"
            if not text.endswith("</think>\n\n"):
                response = f"<think>\n{self.thought}\n</think>\n\n{response}"
            reason = "length" if "novel" in asked else "stop"
            said = response + "<|im_end|>" * (reason == "stop")
            on_finish(i, RequestOutput(ids, self.tokenizer(said)["input_ids"], response, reason))


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
RECORDED = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Rain?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "none", "tool_call_id": "a"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Thanks"},
]


def _ask(folder: Path, records: list[dict], llm: Agent | None = None, out: str = "out", **options):
    (folder / "agent.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    out_file = folder / f"{out}.jsonl"
    report = _run(
        llm or Agent(), str(folder / "agent.jsonl"), out_file, **{"max_prompt_tokens": 2000, **options}
    )
    manifest = json.loads((folder / f"{out}.manifest.json").read_text())
    return _records(out_file) if out_file.exists() else [], report, manifest


def test_results_of_tools_stay_where_they_were_recorded_and_rows_are_what_was_asked(tmp_path):
    llm, remarks = Agent(), Counter()
    (record,), _, _ = _ask(tmp_path, [{"messages": RECORDED, "tools": [WEATHER]}], llm)
    assert [m["role"] for m in record["messages"]] == [
        *("system", "user", "assistant", "tool", "assistant", "user", "assistant"),
    ]
    assert record["messages"][3]["content"] == "none"
    (call,) = record["messages"][2]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert call["id"] == record["messages"][3]["tool_call_id"]
    conversation = to_conversation(record, "x")
    rows = llm.renderer.tokenize_chat(conversation, 4000, remarks)
    prompts, said = [], []
    for row in rows:
        for number in range(row.response.max() + 1):
            prompts.append(llm.tokenizer.decode(row.ids[: (row.response == number).argmax()].tolist()))
            said.append(llm.tokenizer.decode(row.ids[row.response == number].tolist()))
    assert prompts == llm.prompts and not remarks
    thought = "<think>\nhm\n</think>\n\n"
    assert said == [
        thought + '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>',
        *[f"{thought}Dry.<|im_end|>"] * 2,
    ]


class Writer(Agent):
    """Calls the tool, then answers its result, in the texts given, special tokens in them."""

    def __init__(self, name: str, call: str, answer: str) -> None:
        super().__init__()
        self.tokenizer = tokenizer_for(name)
        self.renderer = ChatRenderer(self.tokenizer)
        self.texts = call, answer

    def chat(self, prompts, params, on_finish):
        for i, ids in enumerate(prompts):
            text = self.tokenizer.decode(ids)
            self.prompts.append(text)
            tokens = self.tokenizer(self.texts["It rains" in text], add_special_tokens=False)["input_ids"]
            shown = self.tokenizer.decode(tokens, skip_special_tokens=True)
            on_finish(i, RequestOutput(ids, tokens, shown, "stop"))


THOUGHT = "<|channel|>analysis<|message|>I look,  twice.<|end|>"


@pytest.mark.parametrize(
    ("name", "call", "answer", "thoughts"),
    [
        (
            "harmony",
            f"{THOUGHT}<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
            '<|message|>{"city":"Oslo"}<|call|>',
            f"{THOUGHT}<|start|>assistant<|channel|>final<|message|> Wet.<|return|>",
            ("I look,  twice.", "I look,  twice."),
        ),
        ("llama3", '{"name": "weather",  "parameters": {"city":"Oslo"}}<|eot_id|>', " Wet.<|eot_id|>", None),
        ("hermes", '<tool_call>{"name":"weather","arguments":{"city":"Oslo"}}</tool_call><|im_end|>',
         "Wet.<|im_end|>", None),
    ],
)  # fmt: skip
def test_responses_are_read_for_later_prompts_and_learned_as_they_were_written(
    tmp_path, name, call, answer, thoughts
):
    about = {
        "description": "Rain.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    about["parameters"]["required"] = ["city"]
    tool = {"type": "function", "function": {"name": "weather", **about}}
    turns = [*RECORDED[1:3], RECORDED[3] | {"content": "It rains."}]
    llm, remarks = Writer(name, call, answer), Counter()
    (record,), _, _ = _ask(tmp_path, [{"messages": turns, "tools": [tool]}], llm)
    _, called, result, answered = record["messages"]
    (made,) = called["tool_calls"]
    assert (
        made["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'} and called["content"] == ""
    )
    assert answered["content"].strip() == "Wet." and result["content"] == "It rains."
    if thoughts is not None:
        assert (called["reasoning_content"], answered["reasoning_content"]) == thoughts
    prompts, said = [], []
    for row in llm.renderer.tokenize_chat(to_conversation(record, "x"), 4000, remarks):
        for number in range(row.response.max() + 1):
            prompts.append(llm.tokenizer.decode(row.ids[: (row.response == number).argmax()].tolist()))
            said.append(llm.tokenizer.decode(row.ids[row.response == number].tolist()))
    assert prompts == llm.prompts and not remarks
    assert said == [call, answer]


def test_both_thinking_modes_and_several_samples(tmp_path):
    variants = tuple(TemplateVariant(kwargs={"enable_thinking": on}) for on in (True, False))
    sampling = SamplingParams(max_tokens=512, temperature=0.8, seed=0)
    options = {"samples": 3, "chat_template_kwargs": variants, "sampling": sampling}
    talks = [{"messages": [{"role": "user", "content": f"Question {n}"}]} for n in range(20)]
    records, _, _ = _ask(tmp_path, talks, **options)
    assert [(r["id"], r.get("sample", 0)) for r in records] == [
        (f"agent.jsonl:{n + 1}", sample) for n in range(20) for sample in range(3)
    ]
    thinks = [r["chat_template_kwargs"]["enable_thinking"] for r in records]
    assert 15 < sum(thinks) < 45  # of 60, four standard deviations
    assert thinks == ["reasoning_content" in r["messages"][-1] for r in records]
    numbers = [r["messages"][-1]["content"].rpartition(" ")[2] for r in records]
    assert len(set(numbers)) > 50
    _ask(tmp_path, talks, out="broken", limit=7, **options)
    assert _ask(tmp_path, talks, out="broken", **options)[0] == records
    with pytest.raises(UserError, match="would be the same"):
        _ask(tmp_path, talks, samples=2)


UNWANTED = [
    {"messages": [{"role": "user", "content": "Build a bomb"}]},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Write a novel"}]},
    {"messages": [{"role": "user", "content": "Write a novel now"}]},
    {"messages": [{"role": "user", "content": "Bye"}]},
]


def test_refusals_and_cut_responses_are_left_out_when_asked_and_not_asked_again(tmp_path):
    kept, _, manifest = _ask(tmp_path, UNWANTED, out="all")
    assert len(kept) == 4 and manifest["left_out"] == manifest["shortened"] == {}
    llm = Agent()
    options = {"skip_refusals": True, "skip_truncated": True}
    _ask(tmp_path, UNWANTED, llm, limit=2, **options)
    records, report, manifest = _ask(tmp_path, UNWANTED, llm, **options)
    assert [r["messages"][0]["content"] for r in records] == ["Hi", "Bye"]
    assert [len(r["messages"]) for r in records] == [2, 2]
    assert manifest["left_out"] == {"a response refuses": 1, TRUNCATED: 1}
    assert manifest["shortened"] == {TRUNCATED: 1} and manifest["conversations"] == 2
    assert len(llm.prompts) == 5 and report.num_written == 1
    straight, _, whole = _ask(tmp_path, UNWANTED, out="straight", **options)
    assert straight == records and whole["left_out"] == manifest["left_out"]
    with pytest.raises(UserError, match="skip_refusals True, but now it is False"):
        _ask(tmp_path, UNWANTED, skip_truncated=True)


def test_settings_are_compared_where_everything_was_left_out(tmp_path):
    source, out = _source(tmp_path, [["long one"], ["long two"]]), tmp_path / "out.jsonl"
    short = SamplingParams(max_tokens=16, seed=0)
    assert _run(Parrot(), source, out, skip_truncated=True, sampling=short).num_written == 0
    before = (tmp_path / "out.settings.json").read_text()
    with pytest.raises(UserError, match="max_tokens 16, but now it is 512"):
        _run(Parrot(), source, out, skip_truncated=True)
    assert (tmp_path / "out.settings.json").read_text() == before
    out.unlink()
    with pytest.raises(UserError, match="left-out.jsonl lists what was left out of .*, which does not exist"):
        _run(Parrot(), source, out, skip_truncated=True, sampling=short)
    (tmp_path / "out.left-out.jsonl").unlink()
    assert _run(Parrot(), source, out).num_written == 2


def test_failed_responses_are_left_out_and_those_cut_by_the_context_when_asked(tmp_path):
    turns = [["brim"], ["ill"], ["gone"], ["ok", "ill"], ["ok", "brim", "more"]]
    source = _source(tmp_path, turns)
    failed = {"a response ended with error": 1, "a response ended with abort": 1}
    report = _run(Parrot(), source, tmp_path / "all.jsonl", max_turns=3)
    reasons = {r["id"]: r["finish_reasons"] for r in _records(tmp_path / "all.jsonl")}
    assert reasons == {"c0": ["context"], "c3": ["stop"], "c4": ["stop", "context"]}
    assert report.left_out == failed and report.shortened == {"a response ended with error": 1}
    report = _run(Parrot(), source, tmp_path / "whole.jsonl", max_turns=3, skip_truncated=True)
    assert [r["finish_reasons"] for r in _records(tmp_path / "whole.jsonl")] == [["stop"], ["stop"]]
    assert report.left_out == {**failed, TRUNCATED: 1}
    assert report.shortened == {"a response ended with error": 1, TRUNCATED: 1}


def test_an_empty_response_is_not_written_and_those_before_it_are_kept(tmp_path):
    source = _source(tmp_path, [["abc", "say nothing", "more"], ["say nothing"], ["brim, say nothing"]])
    report = _run(Parrot(), source, tmp_path / "out.jsonl", max_turns=3)
    (record,) = _records(tmp_path / "out.jsonl")
    assert [m["content"] for m in record["messages"]] == ["abc", "cba"]
    assert record["finish_reasons"] == ["stop"]
    assert report.shortened == {EMPTY: 1} and report.left_out == {EMPTY: 2}


def test_near_duplicates_and_test_prompts_are_left_out_and_counted(tmp_path):
    long = "Write a short story about a cat who learns to sail a boat across the wide grey sea"
    asked = [
        long,
        f"{long}.",
        f"Please! {long}",
        "Another question altogether",
        "She has 3 apples and eats 1",
        "Hi",
    ]
    talks = [{"messages": [{"role": "user", "content": text}]} for text in asked]
    options = {"near_duplicates": 0.8, "test_prompts": ("Hi!", "She has 3 apples, and eats 1")}
    records, _, manifest = _ask(tmp_path, talks, **options)
    assert [r["messages"][0]["content"] for r in records] == [long, "Another question altogether"]
    assert manifest["not_answered"] == {
        "it holds a prompt of an evaluation set": 2,
        "nearly the same human turns as an earlier conversation": 2,
    }


@pytest.mark.parametrize("similarity", [0.0, 0.04, 1.1])
def test_similarities_that_are_not_found_reliably_are_refused(similarity):
    with pytest.raises(UserError, match="below which too few are found"):
        RegenerateOptions(SamplingParams(), near_duplicates=similarity)


def test_a_prompt_that_the_template_refuses_is_listed_and_the_others_are_answered(tmp_path):
    bad = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"unheard": 1}}
    records, report, _ = _ask(tmp_path, [bad, UNWANTED[3]])
    assert len(records) == 1 and "does not read unheard" in next(iter(report.skipped.counts))


@pytest.mark.parametrize(
    ("text", "refuses"),
    [
        ("I'm sorry, but I can't assist with that request.", True),
        ("I’m very sorry. I cannot help you with this.", True),
        ("As an AI language model, I am not able to provide medical advice.", True),
        ("<think>\nI can't help but wonder.\n</think>\n\nSure, here it is.", False),
        ("I can't help but smile at this.", False),
        ("Sorry for the delay. Here is the code.", False),
        ("The answer is 4. I cannot provide more.", False),
    ],
)
def test_refusals_are_told_by_their_beginning(text, refuses):
    assert is_refusal(text) == refuses


def test_refusals_of_other_languages_are_patterns_of_a_file(tmp_path):
    file = tmp_path / "german.txt"
    file.write_text("# German\n\n(?:es )?tut mir leid.{0,40}kann ich nicht\n", encoding="utf-8")
    german = "Es tut mir leid, dabei kann ich nicht helfen."
    patterns = tuple(map(refusal_pattern, read_refusals(file)))
    assert is_refusal(f"<think>\nhm\n</think>\n\n{german}", patterns) and not is_refusal(german)
    assert not is_refusal(f"Er sagte: {german}", patterns)
    llm = Writer("hermes", "", f"{german}<|im_end|>")
    talks = [{"messages": [{"role": "user", "content": "It rains"}]}]
    options = {"skip_refusals": True, "refusals": read_refusals(file)}
    records, report, manifest = _ask(tmp_path, talks, llm, **options)
    assert not records and report.left_out == {REFUSED: 1}
    assert manifest["settings"]["refusals"] == ["(?:es )?tut mir leid.{0,40}kann ich nicht"]
    for text, problem in (("ab\n(", "line 2, is no regular expression"), ("# none\n", "no pattern")):
        file.write_text(text)
        with pytest.raises(UserError, match=problem):
            read_refusals(file)
    with pytest.raises(UserError, match="refusals are kept"):
        RegenerateOptions(SamplingParams(), refusals=("a",))


def test_messages_between_turns_wait_with_the_turn_they_belong_to():
    roles = ["user", "user", "assistant", "tool", "tool", "assistant", "system", "user", "assistant", "user"]
    messages = tuple({"role": role, "content": f"{i}"} for i, role in enumerate(roles))
    conversation = Conversation("x", ({"role": "developer", "content": "d"}, *messages), "x")
    system, blocks = script(conversation, 3)
    assert [m["content"] for m in system] == ["d"]
    assert [[m["content"] for m in block] for block in blocks] == [["0"], ["1"], ["3", "4"], ["6", "7"]]


def test_a_conversation_is_asked_up_to_an_empty_turn():
    texts = ["a", " \n", "b"]
    messages = tuple({"role": "user", "content": text} for text in texts)
    _, blocks = script(Conversation("x", messages, "x"), 9)
    assert [[m["content"] for m in block] for block in blocks] == [["a"]]
