"""Prompts of the tasks that chats are short of: what they are made of, and that other commands read them."""

import json
import random
import re
from collections import Counter, deque
from pathlib import Path

import pytest

from eagle_kit.cli.app import main
from eagle_kit.data.chat.forms import to_conversation
from eagle_kit.data.chat.records import SkipLog, read_conversations
from eagle_kit.data.tasks.sets import load_task
from eagle_kit.datagen.task_prompts import CATEGORIES, Material, material_of, task_prompts

ENGLISH = (
    "The bridge number {n} was opened to the public in the spring of that year, and the people of the "
    "town came to see it with their families. It is the longest bridge in the region. The work on it "
    "had begun five years before, with the money of a lottery that was held for this purpose. The "
    "first train crossed it on a cold morning."
)
GERMAN = (
    "Die Brücke {n} ist nicht mit dem Geld der Stadt gebaut worden. Das Land hat für sich eine andere Lösung."
)
FUNCTION = (
    'def add_{n}(x: int) -> int:\n    """Return x and {n} more."""\n    total = x + {n}\n    return total'
)
ANSWERS = {
    r"has (\d+) \w+ and buys (\d+) packs of (\d+) more. \w+ takes (\d+)": lambda a, b, c, d: a + b * c - d,
    r"for \$(\d+) each. \w+ buys (\d+) of them with \$(\d+)": lambda c, b, big: big - b * c,
    r"reads (\d+) pages on Monday and (\d+) times": lambda a, b: a + a * b,
    r"goes (\d+) miles per hour for (\d+) hours, then (\d+)": lambda s, b, a: s * b + a,
    r"earns \$(\d+) an hour and works (\d+) hours a week.* in (\d+) weeks": lambda c, a, b: a * b * c,
    r"There are (\d+) .*gets (\d+) of the rest": lambda e, d: e / 2 - d,
    r"is (\d+) years old and \w+ is (\d+) times as old.*in (\d+) years": lambda a, b, d: a * b + d,
    r"is (\d+) cm long and (\d+) cm wide": lambda a, c: a * c,
    r"needs (\d+) cups of flour for (\d+) cakes": lambda c, b: c * b,
    r"saves \$(\d+) every week. After (\d+) weeks \w+ spends \$(\d+)": lambda c, a, d: a * c - d,
    r"A class has (\d+) students. (\d+)%": lambda e, p: e - e * p / 100,
    r"Solve for x: (\d+)x \+ (\d+) = (\d+)": lambda c, d, s: (s - d) / c,
    r"What is (\d+) \* (\d+) - (\d+)\?": lambda a, c, d: a * c - d,
    r"walks (\d+) miles a day and \w+ walks (\d+) miles a day.*in (\d+) days": lambda b, c, a: (b + c) * a,
}


def _chats(folder: Path, count: int) -> str:
    lines = []
    for n in range(count):
        text = (GERMAN if n % 7 == 3 else ENGLISH).format(n=n)
        turns = [{"role": "user", "content": f"When was the bridge number {n} opened to the public?"}]
        code = FUNCTION.format(n=n) if n % 2 else f"print({n})"
        turns.append({"role": "assistant", "content": f"Sure:\n\n{text}\n\n```python\n{code}\n```"})
        lines.append(json.dumps({"id": f"c{n}", "messages": turns}))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder / "chats.jsonl")


def test_prompts_are_spread_over_the_categories_and_made_of_the_conversations_text(tmp_path: Path) -> None:
    chats = list(read_conversations(_chats(tmp_path, 84), skipped=SkipLog()))
    made = list(task_prompts(chats, seed=0))
    counts = Counter(one["category"] for one in made)
    assert set(counts) == set(CATEGORIES) and max(counts.values()) - min(counts.values()) <= 4
    for one in made:
        category, conversation = one["id"].split("-c")
        text = one["messages"][0]["content"]
        assert category == one["category"] and "print(" not in text and "Sure" not in text
        assert ("def add_" in text) == (category in ("completion", "code"))
        if category == "completion":
            beginning, body = FUNCTION.format(n=conversation).split("\n    total")
            assert beginning in text and body not in text
        if category == "code":
            assert f"```python\n{FUNCTION.format(n=conversation)}\n```" in text
        if category in ("summarising", "extraction", "rewriting", "retrieval"):
            assert ENGLISH.format(n=conversation) in text
        if category == "retrieval":
            assert len(set(re.findall(r"bridge number (\d+) was", text))) == 3
            assert f"When was the bridge number {conversation} opened" in text
        if "Die Brücke" in text:
            assert category == "translation" and "English" in text


def test_categories_that_no_text_serves_hold_up_no_others_and_are_not_made_up_by_arithmetic(
    tmp_path: Path,
) -> None:
    chats = [one for one in read_conversations(_chats(tmp_path, 2800), skipped=SkipLog())]
    german = [chat for number, chat in enumerate(chats) if number % 7 == 3]
    counts = Counter(one["category"] for one in task_prompts(german, seed=0))
    assert counts["translation"] > 30 and counts["questions"] > 30
    assert not counts["summarising"] and counts["mathematics"] <= max(counts.values()) + 3
    turns = [{"role": "user", "content": "写一首诗"}, {"role": "assistant", "content": "春天来了。"}]
    chinese = [to_conversation({"id": str(n), "messages": turns}, "") for n in range(400)]
    assert Counter(one["category"] for one in task_prompts(chinese, seed=0)) == {"mathematics": 3}


BODY = "    total = x\n    return total"


@pytest.mark.parametrize(
    ("code", "beginning"),
    [
        (f"import os\n\ndef f(\n    x,\n):\n{BODY}", "def f(\n    x,\n):"),
        (f"def f(x):\n    # the sum\n{BODY}", "def f(x):\n    # the sum"),
        (f'def f(x):\n    """Sum."""\n\n{BODY}', 'def f(x):\n    """Sum."""'),
        (f"@cache\nasync def f(x):\n{BODY}", "@cache\nasync def f(x):"),
        ("def f(x):\n    @wraps(x)\n    def g(y):\n        return y\n    return g", "def f(x):"),
        (f'\f\ndef f(x):\n    "a\u2028b"\n{BODY}', 'def f(x):\n    "a\u2028b"'),
        ('def f(x):\n    """Sum."""\n\n    return x', None),  # one line is no body
        ("def f(x): return x\n\n\nf(1)", None),
        ("def f(a,\n      b): return [\n    a,\n    b]", None),
        (f"class A:\n    def f(x):\n    {BODY}", None),
        (f"def f(x)\n{BODY}", None),
        ("SELECT *\nFROM t\nWHERE 1", None),
        ("x = (\n" + "1<(" * 193 + "1" + ")" * 193 + "\n)", None),  # nested too deeply for Python's parser
        (f"def f(x):\n{BODY}\n" + "    x = 1\n" * 40, None),  # too long a block
    ],
)
def test_a_function_is_completed_from_its_signature_and_docstring(code: str, beginning: str | None) -> None:
    turns = [{"role": "user", "content": "Code?"}]
    turns.append({"role": "assistant", "content": f"Here it is:\n\n```python\n{code}\n```\n"})
    material = material_of(to_conversation({"id": "0", "messages": turns}, ""))
    assert material.functions == (() if beginning is None else (beginning,))


def test_code_is_what_stands_in_fences_whatever_they_name() -> None:
    response = (
        '```python title="a.py"\na\nb\nc\n```\nThis is prose.\nSo is this.\nAnd this.\n'
        "  ```{r}\n  d\n    e\n  f\n```\n````md\n```sh\nls\n```\n````\n\n```\n\n\n\n```\n"
    )
    for text in (response, response.replace("\n", "\r\n")):
        turns = [{"role": "user", "content": "Code?"}, {"role": "assistant", "content": text}]
        material = material_of(to_conversation({"id": "0", "messages": turns}, ""))
        assert material.code == (("python", "a\nb\nc"), ("", "d\n  e\nf"), ("md", "```sh\nls\n```"))


def test_the_same_seed_makes_the_same_prompts_and_another_seed_others(tmp_path: Path) -> None:
    chats = list(read_conversations(_chats(tmp_path, 30), skipped=SkipLog()))
    first, again, other = (list(task_prompts(chats, seed)) for seed in (0, 0, 1))
    assert first == again != other


def test_word_problems_have_answers_of_whole_numbers_of_zero_or_more() -> None:
    found: Counter[str] = Counter()
    for seed in range(2000):
        text = CATEGORIES["mathematics"](Material((), (), ""), deque(), random.Random(seed))
        (pattern,) = [pattern for pattern in ANSWERS if re.search(pattern, text)]
        numbers = re.search(pattern, text)
        assert numbers is not None
        answer = ANSWERS[pattern](*map(int, numbers.groups()))
        assert answer >= 0 and answer == int(answer), text
        found[pattern] += 1
    assert set(found) == set(ANSWERS)


def test_the_command_writes_what_regenerating_and_evaluating_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "prompts.jsonl"
    words = ["data", "prompts", "--source", _chats(tmp_path, 60), "--out", str(out)]
    assert main([*words, "--skip", "10", "--limit", "21"]) == 0
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(records) == 21 and all(int(one["id"].split("-c")[1]) >= 10 for one in records)
    assert {prompt.category for prompt in load_task(str(out)).prompts} == set(CATEGORIES)
    assert to_conversation(records[0], "").category == records[0]["category"]
    some = ["--limit", "10", "--categories", "mathematics", "completion"]
    assert main([*words, *some]) == 0
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert Counter(one["category"] for one in records) == {"completion": 5, "mathematics": 5}
    assert main([*words, *some, "poems"]) == 2
    assert "no prompts of poems" in capsys.readouterr().err
    assert main([*words, "--skip", "60", "--limit", "1"]) == 2
    assert "gives no prompts" in capsys.readouterr().err
