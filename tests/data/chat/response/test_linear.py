"""Hostile responses take work in proportion to their length, whole and in pieces of a few characters.

The readers are compiled anew with every operation on texts counted: a call counts the characters of the texts
it is given and returns, a slice and a sum those of its result. Regular expressions count what they are given,
so none of them may go back over text.
"""

import ast
import importlib
import re
import re._constants as sre
import re._parser as sre_parser
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers.utils.chat_parsing.response_parser import ResponseParser

from eagle_kit.data.chat import response

NAMES = ("parts", "tape", "literals", "calls", "tags", "harmony", "checkpoint")
FOLDER = Path(response.__path__[0])
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"enum": list(range(50))}}}},
    }
]
FORMS = ("HERMES", "DEEPSEEK", "MISTRAL", "LLAMA3", None)
CALL = '{"name": "f", "arguments": {"a": 1}}'
REPEATED = [
    *("{", "[", "(", '"', "'", "\\", " ", "\n", "<", "x", "1", "{}", "[],", '{"a": 1},', '{"a":', "['\","),
    *("```", "[ARGS]", ";", "; ", "<function=f>", "</function>", "</function>\n", "<parameter=a>\n\n"),
    *("</parameter>", "<parameter=a>1</parameter>", "</tool_call>", "<think>", "</think>", "</thin"),
    *("<tool_call>", "<tool_call>{", '<tool_call>["', "<tool_call>['\",", '<tool_call>[",\',"', '\\"'),
    *("<tool_call><function=f><parameter=a>", "[TOOL_CALLS]", "[TOOL_CALLS]a", "[TOOL_CALLS][", "[CALL_ID]"),
    *(
        "<|python_tag|>",
        "<|python_tag|>{",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
    ),
    *("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *(f"<tool_call>{CALL}</tool_call>", f"[TOOL_CALLS]f{CALL}", f"<tool_call>{CALL}", f"{CALL};", "é{"),
]
BEGUN = {
    "HERMES": ("", "<tool_call>", "<tool_call>{'", '<tool_call>["', "<tool_call><function=f>"),
    "DEEPSEEK": ("", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"),
    "MISTRAL": ("", "[TOOL_CALLS]", "[TOOL_CALLS]a", "[TOOL_CALLS][", '[TOOL_CALLS]["'),
    "LLAMA3": ("", "<|python_tag|>", "<|python_tag|>[", "{", '{"name":', '{"name": "'),
    None: ("", "<think>"),
}
HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", " to=functions.f", "x", " ", "{"]
HARMONY_BEGUN = (
    "",
    "<|channel|>final<|message|>",
    " to=functions.f<|channel|>commentary<|message|>",
    "<|end|>",
)


class Work:
    """Operations so far."""

    count = 0

    @classmethod
    def called(cls, function: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        texts = [each for each in (*args, getattr(function, "__self__", None), result) if type(each) is str]
        cls.count += 1 + sum(map(len, texts))
        return result

    @classmethod
    def made(cls, result: Any) -> Any:
        cls.count += 1 + (len(result) if type(result) is str else 0)
        return result


class Counting(ast.NodeTransformer):
    """Hands every call, sum and slice to :class:`Work`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return node
        return ast.Call(ast.parse("Work.called", mode="eval").body, [node.func, *node.args], node.keywords)

    def _made(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        is_read = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        return ast.Call(ast.parse("Work.made", mode="eval").body, [node], []) if is_read else node

    visit_BinOp = visit_Subscript = visit_JoinedStr = _made

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = self.visit(node.value) if node.value else None
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        read = ast.parse(ast.unparse(node.target), mode="eval").body
        return ast.Assign([node.target], self._made(ast.BinOp(read, node.op, node.value)))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = [self.visit(each) for each in node.body]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(each) if isinstance(each, ast.FunctionDef) else each for each in node.body]
        return node


@pytest.fixture(scope="module")
def readers() -> Any:
    """The modules of the readers, with their work counted."""
    found: dict[str, ModuleType] = {}
    known = {f"{response.__name__}.{name}": sys.modules.get(f"{response.__name__}.{name}") for name in NAMES}
    try:
        for full in known:
            source = FOLDER / f"{full.rpartition('.')[2]}.py"
            if not source.is_file():
                continue
            tree = ast.parse(source.read_text())
            tree.body = [
                Counting().visit(each) if isinstance(each, ast.FunctionDef | ast.ClassDef) else each
                for each in tree.body
            ]
            module = ModuleType(full)
            module.__dict__["Work"] = Work
            sys.modules[full] = module
            exec(compile(ast.fix_missing_locations(tree), str(source), "exec"), module.__dict__)
            found[source.stem] = module
    finally:
        for full, module in known.items():
            sys.modules.pop(full, None)
            if module is not None:
                sys.modules[full] = module
    return found


def work_of(reader: Any, text: str, size: int) -> int:
    before = Work.count
    for start in range(0, len(text), size):
        reader.feed(text[start : start + size])
    reader.finish()
    return Work.count - before


def grows_by(make: Any, begun: str, part: str, size: int, length: int) -> float:
    """Factor by which the work grows when a text grows fourfold."""
    lengths = (length, 4 * length)
    short, long = (work_of(make(), begun + part * (each // len(part)), size) for each in lengths)
    return long / short


@pytest.mark.parametrize("size", [10**9, 19])
@pytest.mark.parametrize("form", FORMS)
def test_hostile_responses_take_work_in_proportion_to_their_length(
    readers: Any, form: Any, size: int
) -> None:
    def make() -> Any:
        calls = getattr(readers["calls"], form) if form else None
        return readers["tags"].TagReader(has_thoughts=True, form=calls, tools=TOOLS)

    begun = BEGUN[form]
    for i, part in enumerate(REPEATED):  # each beginning with every few of the parts
        assert grows_by(make, begun[i % len(begun)], part, size, 400) < 7, (begun[i % len(begun)], part)


@pytest.mark.parametrize("size", [10**9, 19])
def test_hostile_messages_of_harmony_take_work_in_proportion_to_their_length(readers: Any, size: int) -> None:
    def make() -> Any:
        return readers["harmony"].HarmonyReader(has_thoughts=True, has_calls=True)

    for i, part in enumerate(HARMONY):  # each behind two of the beginnings
        for begun in (HARMONY_BEGUN[i % 4], HARMONY_BEGUN[(i + 1) % 4]):
            assert grows_by(make, begun, part, size, 1200) < 7, (begun, part)


@pytest.mark.parametrize("size", [10**9, 19])
@pytest.mark.parametrize("begun", ["", "<think>", "<tool_call>", "<tool_call>x</tool_call>"])
def test_a_checkpoints_reader_takes_work_in_proportion_to_the_length(
    readers: Any, begun: str, size: int
) -> None:
    """The parser of transformers is not counted."""
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
            "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json"},
            "content": {"content": "text"},
        },
    }

    def make_parser(prefix: str, tools: Any) -> ResponseParser:
        return ResponseParser(template, prefix, tools=tools)

    def make() -> Any:
        tokenizer = SimpleNamespace(response_template=template, get_response_parser=make_parser)
        return readers["checkpoint"].CheckpointReader(tokenizer, "", has_thoughts=True, has_calls=True)

    assert grows_by(make, begun, "x", size, 200) < 5


@pytest.mark.parametrize("name", NAMES)
def test_expressions_do_not_go_back_over_text(name: str) -> None:
    module = importlib.import_module(f"{response.__name__}.{name}")
    values = [each for value in vars(module).values() for each in _expressions(value)]
    for expression in values:
        tree = sre_parser.parse(expression.pattern, expression.flags)
        assert not _goes_back(tree), expression.pattern


def _expressions(value: Any) -> list[re.Pattern]:
    if isinstance(value, dict):
        return [each for one in value.values() for each in _expressions(one)]
    return [value] if isinstance(value, re.Pattern) else []


def _goes_back(tree: Any) -> bool:
    """True for a repetition without a bound that may give back what it has taken."""
    if isinstance(tree, sre_parser.SubPattern | list):
        return any(_goes_back(each) for each in tree)
    if not isinstance(tree, tuple):
        return False
    is_open = tree[0] in (sre.MAX_REPEAT, sre.MIN_REPEAT) and tree[1][1] == sre.MAXREPEAT
    return is_open or any(_goes_back(each) for each in tree[1:])
