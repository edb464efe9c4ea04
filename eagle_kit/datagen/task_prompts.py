"""Prompts of the tasks that chats are short of, made out of the text of chats.

A head drafts badly what it has never learned, and public chats hold little translation, summarising,
answering from passages and arithmetic, which is half of Spec-Bench (arXiv 2401.07851), and few functions to
be completed. The passages, sentences, questions and code are those of conversations; only the wording
around them and the word problems are from here. Prompts are records of ``id``, ``category`` and
``messages``, which ``data regenerate`` answers and ``--tasks`` measures.
"""

import ast
import random
import re
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_kit.data.chat.forms import Conversation

SUMMARISE = (
    "Summarize the following text in {count} sentences.\n\n{text}",
    "Summarize: {text}",
    "{text}\n\nWrite a short summary of the text above.",
    "What are the main points of this text? Answer in at most {count} bullet points.\n\n{text}",
)
TRANSLATE = (
    "Translate from {source} to {to}: {text}",
    "Translate the following sentence into {to}.\n\n{text}",
    'How do you say "{text}" in {to}?',
)
RETRIEVE = (
    "Answer the question from the passages.\n\n{passages}\n\nQuestion: {question}\nAnswer:",
    "{passages}\n\nUsing only the information above, answer: {question}",
    "Context:\n{passages}\n\nQuestion: {question}",
)
EXTRACT = (
    "List every name, place and organisation in this text, one per line.\n\n{text}",
    "Extract the key facts of this text as a JSON list of strings.\n\n{text}",
    "Give five keywords for the following text.\n\n{text}",
)
REWRITE = (
    "Rewrite this paragraph in simple words.\n\n{text}",
    "Make the following text more formal.\n\n{text}",
    "Correct and shorten this text.\n\n{text}",
)
COMPLETE = (
    "Complete this Python function.\n\n```python\n{text}\n```",
    "```python\n{text}\n```\n\nWrite the body of this function.",
    "Finish the function below and answer with its code.\n\n{text}",
)
CODE = (
    "What does this code do?\n\n```{language}\n{text}\n```",
    "Find the mistakes in this code and correct them.\n\n```{language}\n{text}\n```",
    "Add comments to the following code.\n\n```{language}\n{text}\n```",
    "Write tests for this code.\n\n```{language}\n{text}\n```",
    "```{language}\n{text}\n```\n\nRewrite the code above so that it is easier to read.",
)
LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese", "Dutch")
STOP_WORDS = {
    "English": "the and of to in is that for with as are this",
    "German": "der die und das ist nicht mit ein eine auf für sich",
    "French": "le les des est une dans pour que vous qui sur avec",
    "Spanish": "el los las una por para con del que se es su",
}
LANGUAGE_SHARE = 0.15
"""Least share of a language's stop words among the words of a text that is taken to be in it."""
FENCE = re.compile(r"( *)(```+)[ \t]*([\w+#-]*)([^`]*)")
PASSAGE_WORDS, SENTENCE_WORDS, QUESTION_WORDS = (50, 220), (6, 30), (5, 25)
CODE_LINES, CODE_CHARACTERS, LEAST_BODY = (3, 30), 1200, 2
"""Lines and characters of a piece of code, and lines of the body of a function that is to be completed."""
PASSAGES = 3
"""Of a prompt that is answered from passages: one of the conversation itself, the others of earlier ones."""
SLACK = 3
"""Prompts that one category may be ahead of the scarcest one."""
PATIENCE = 200
"""Conversations after which a category that none of them served holds up the others no longer."""

NAMES = ("Anna", "Omar", "Lucia", "Tom", "Mei", "Jonas", "Priya", "Sam", "Clara", "Diego")
THINGS = ("apples", "pencils", "stickers", "books", "marbles", "cookies", "postcards", "tickets")
PROBLEMS: tuple[str, ...] = (
    "{name} has {a} {thing} and buys {b} packs of {c} more. {other} takes {d} of them. How many are left?",
    "A shop sells {thing} for ${c} each. {name} buys {b} of them with ${big}. How much is left?",
    "{name} reads {a} pages on Monday and {b} times as many on Tuesday. How many pages is that?",
    "A train goes {speed} miles per hour for {b} hours, then {a} miles more. How far does it go?",
    "{name} earns ${c} an hour and works {a} hours a week. How much does {name} earn in {b} weeks?",
    "There are {even} {thing}. {name} gets half of them, {other} gets {d} of the rest. How many remain?",
    "{name} is {a} years old and {other} is {b} times as old. How old will {other} be in {d} years?",
    "A rectangle is {a} cm long and {c} cm wide. What are its area and its perimeter?",
    "A recipe needs {c} cups of flour for {b} cakes. How many cups are needed for {b} times as many cakes?",
    "{name} saves ${c} every week. After {a} weeks {name} spends ${d}. How much money is left?",
    "A class has {even} students. {percent}% of them play football. How many students do not play?",
    "Solve for x: {c}x + {d} = {sum}. Show each step.",
    "What is {a} * {c} - {d}? Explain each step.",
    "{name} walks {b} miles a day and {other} walks {c} miles a day. How many miles is that in {a} days?",
)


@dataclass(frozen=True)
class Material:
    """What a conversation gives.

    Attributes:
        passages, sentences: of its replies, with their language.
        question: of its first human turn, or empty.
        code: fenced blocks of its replies, with the language that they name.
        functions: beginnings of Python functions in them, up to the docstring.
    """

    passages: tuple[tuple[str, str], ...]
    sentences: tuple[tuple[str, str], ...]
    question: str
    code: tuple[tuple[str, str], ...] = ()
    functions: tuple[str, ...] = ()


def task_prompts(
    conversations: Iterable[Conversation], seed: int, categories: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Make at most one prompt from each conversation, about as many of every category that the texts serve;
    word problems, which need no text, are never far ahead of the others.

    Args:
        conversations: whose texts are used; a conversation that gives nothing for the categories that are
            behind is passed over.
        seed: of wording, numbers and choices, hashed with the conversation's id.
        categories: some of :data:`CATEGORIES`, all by default; the order does not matter.

    Yields:
        ``{"id", "category", "messages"}``.
    """
    wanted = [name for name in CATEGORIES if name in (categories or CATEGORIES)]
    made, served = Counter(dict.fromkeys(wanted, 0)), dict.fromkeys(wanted, 0)
    earlier: deque[str] = deque(maxlen=16)
    for number, conversation in enumerate(conversations):
        rng = random.Random(f"{seed}:{conversation.id}")
        material = material_of(conversation)
        counts = {name: count for name, count in made.items() if name != WITHOUT_TEXT}
        alive = [count for name, count in counts.items() if number - served[name] < PATIENCE]
        most = min(alive) if alive else max(counts.values(), default=made.total())
        for category, count in sorted(made.items(), key=lambda item: item[1]):
            text = CATEGORIES[category](material, earlier, rng) if count < most + SLACK else ""
            if text:
                made[category] += 1
                served[category] = number
                messages = [{"role": "user", "content": text}]
                yield {"id": f"{category}-{conversation.id}", "category": category, "messages": messages}
                break
        earlier.extend(text for text, language in material.passages[:1] if language == "English")


def material_of(conversation: Conversation) -> Material:
    """What the replies and the first human turn of ``conversation`` give."""
    passages, sentences, code = [], [], []
    for message in conversation.messages:
        if message["role"] != "assistant" or not isinstance(content := message.get("content"), str):
            continue
        code += [block for block in _fenced(content) if _is_piece(block[1])]
        for paragraph in re.split(r"\n\s*\n", content):
            text = " ".join(paragraph.split())
            language = _language(text)
            if not language or not _is_prose(text):
                continue
            if _has_length(text, PASSAGE_WORDS):
                passages.append((text, language))
            found = (one.strip() for one in re.findall(r"[^.!?]+[.!?]", text))
            sentences += [(one, language) for one in found if _has_length(one, SENTENCE_WORDS)]
    human = next(message for message in conversation.messages if message["role"] == "user")
    question = " ".join(str(human.get("content") or "").split())
    is_one = question.endswith("?") and _has_length(question, QUESTION_WORDS) and _language(question)
    functions = tuple(found for _, text in code for found in _beginnings(text))
    return Material(tuple(passages), tuple(sentences), question if is_one else "", tuple(code), functions)


def _fenced(text: str) -> Iterator[tuple[str, str]]:
    """Fenced blocks of Markdown, of backticks, as (language or nothing, code without the fence's indent)."""
    opened: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        found = re.fullmatch(FENCE, line)
        if opened is None:
            opened, lines = found, []
        elif found and len(found[2]) >= len(opened[2]) and not (found[3] + found[4]).strip():
            yield opened[3], "\n".join(lines)
            opened = None
        else:
            lines.append(line[len(opened[1]) :] if line.startswith(opened[1]) else line)


def _is_piece(code: str) -> bool:
    lines = sum(bool(line.strip()) for line in code.split("\n"))
    return CODE_LINES[0] <= lines <= CODE_LINES[1] and len(code) <= CODE_CHARACTERS


def _beginnings(code: str) -> list[str]:
    """Signatures of the Python functions of ``code`` that are no methods, with their docstrings; none of what
    does not parse, and none of a function whose body has too few lines or begins beside its signature."""
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            body = ast.parse(code).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two: nested too deeply
        return []
    lines, found = re.split(r"\r\n?|\n", code), []
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
        rest = [line for each in statements for line in range(_first_line(each), (each.end_lineno or 0) + 1)]
        first = _first_line(node.body[0])
        stands_alone = lines[first - 1][: node.body[0].col_offset].isspace()
        if stands_alone and len(set(rest)) >= LEAST_BODY:
            found.append("\n".join(lines[_first_line(node) - 1 : rest[0] - 1]).rstrip())
    return found


def _first_line(node: ast.stmt) -> int:
    """The line of a statement's beginning, its decorators included."""
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])


def _has_length(text: str, words: tuple[int, int]) -> bool:
    return words[0] <= len(text.split()) <= words[1]


def _is_prose(text: str) -> bool:
    """True of text without markup, code, links or lists that ends as a sentence does."""
    return text[-1:] in ".!?" and text[:1].isupper() and not re.search(r"[`|{}<>=*#\[\]\\_]|https?:", text)


def _language(text: str) -> str:
    """The language whose stop words are frequent in ``text``, or nothing."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    if not words:
        return ""
    shares = {
        language: sum(word in stops.split() for word in words) / len(words)
        for language, stops in STOP_WORDS.items()
    }
    best = max(shares, key=lambda language: shares[language])
    return best if shares[best] >= LANGUAGE_SHARE else ""


def _about_passage(wordings: tuple[str, ...]) -> Callable[[Material, deque[str], random.Random], str]:
    """A maker of prompts of ``wordings`` about one English passage."""

    def make(material: Material, earlier: deque[str], rng: random.Random) -> str:
        texts = [text for text, language in material.passages if language == "English"]
        if not texts:
            return ""
        return rng.choice(wordings).format(text=rng.choice(texts), count=rng.randint(1, 4))

    return make


def _translate(material: Material, earlier: deque[str], rng: random.Random) -> str:
    """A sentence of another language into English where there is one, else an English one into another."""
    foreign = [one for one in material.sentences if one[1] != "English"]
    if not material.sentences:
        return ""
    text, language = rng.choice(foreign or material.sentences)
    to = "English" if foreign else rng.choice(LANGUAGES)
    return rng.choice(TRANSLATE).format(source=language, to=to, text=text)


def _retrieve(material: Material, earlier: deque[str], rng: random.Random) -> str:
    own = [text for text, language in material.passages if language == "English"]
    if not own or not material.question or len(earlier) < PASSAGES - 1:
        return ""
    passages = [rng.choice(own), *rng.sample(list(earlier), PASSAGES - 1)]
    rng.shuffle(passages)
    numbered = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(passages, 1))
    return rng.choice(RETRIEVE).format(passages=numbered, question=material.question)


def _complete(material: Material, earlier: deque[str], rng: random.Random) -> str:
    return rng.choice(COMPLETE).format(text=rng.choice(material.functions)) if material.functions else ""


def _code(material: Material, earlier: deque[str], rng: random.Random) -> str:
    if not material.code:
        return ""
    language, text = rng.choice(material.code)
    return rng.choice(CODE).format(language=language, text=text.strip("\n"))


def _question(material: Material, earlier: deque[str], rng: random.Random) -> str:
    return material.question


def _problem(material: Material, earlier: deque[str], rng: random.Random) -> str:
    """A word problem whose answer is a whole number of zero or more."""
    name, other = rng.sample(NAMES, 2)
    a, b, c, d = rng.randint(12, 60), rng.randint(2, 6), rng.randint(3, 12), rng.randint(2, 11)
    numbers = {"a": a, "b": b, "c": c, "d": d, "even": 4 * a, "big": 100, "speed": 5 * a}
    numbers |= {"sum": c * rng.randint(2, 15) + d, "percent": 25 * rng.randint(1, 3)}
    return rng.choice(PROBLEMS).format(name=name, other=other, thing=rng.choice(THINGS), **numbers)


CATEGORIES: dict[str, Callable[[Material, deque[str], random.Random], str]] = {
    "retrieval": _retrieve,
    "translation": _translate,
    "summarising": _about_passage(SUMMARISE),
    "questions": _question,
    "extraction": _about_passage(EXTRACT),
    "rewriting": _about_passage(REWRITE),
    "mathematics": _problem,
    "completion": _complete,
    "code": _code,
}
"""Makers of prompts: given material, earlier passages and a generator, a prompt or nothing."""
WITHOUT_TEXT = "mathematics"
