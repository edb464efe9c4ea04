"""Prompts for tasks that are rare in chats, made from the texts of chats.

A head drafts badly what it was not trained on. Public chats have little translation, summarising, answering
from passages and arithmetic, which are half of Spec-Bench (arXiv 2401.07851), and few functions to complete.
The passages, sentences, questions and code of the prompts are those of conversations; only the wording
around them and the word problems are written here. Prompts are records of ``id``, ``category`` and
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
"""Minimum share of stop words in a text of their language."""
FENCE = re.compile(r"( *)(```+)[ \t]*([\w+#-]*)([^`]*)")
"""First line of a block of code: indent, fence, language, and text after it."""
PASSAGE_WORDS = (50, 220)
"""Minimum and maximum number of words of a passage."""
SENTENCE_WORDS = (6, 30)
QUESTION_WORDS = (5, 25)
CODE_LINES = (3, 30)
"""Minimum and maximum number of lines of a block of code that are not empty."""
CODE_CHARACTERS = 1200
"""Maximum length of a block of code."""
LEAST_BODY = 2
"""Minimum number of lines in the body of a function to complete."""
PASSAGES = 3
"""Passages of a prompt that is answered from them: one of the conversation, the others of earlier ones."""
MEMORY = 16
"""Earlier conversations whose passages are used."""
SLACK = 3
"""Number of prompts by which a category may be ahead of the one with the fewest."""
PATIENCE = 200
"""Number of conversations without a prompt of a category after which the others no longer wait for it."""

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
    """Parts of a conversation that prompts are made of.

    Attributes:
        passages: paragraphs of its responses, as (text, language).
        sentences: sentences of its responses, as (text, language).
        question: its first human turn if that is one question; else empty.
        code: blocks of code in its responses, as (language of the fence or empty, code).
        functions: signatures of Python functions in that code, with their docstrings.
    """

    passages: tuple[tuple[str, str], ...]
    sentences: tuple[tuple[str, str], ...]
    question: str
    code: tuple[tuple[str, str], ...] = ()
    functions: tuple[str, ...] = ()


def task_prompts(
    conversations: Iterable[Conversation], seed: int, categories: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Make at most one prompt from each conversation, and about as many of every category.

    A category that the texts do not serve does not hold up the others. Word problems, which need no text, are
    never far ahead of the others.

    Args:
        conversations: a conversation without material for the categories that have the fewest prompts is
            skipped.
        seed: seed of wording, numbers and choices; it is hashed with the conversation's id.
        categories: names of :data:`CATEGORIES`, in any order; empty is all of them.

    Yields:
        ``{"id", "category", "messages"}``.
    """
    num_made = Counter({name: 0 for name in CATEGORIES if not categories or name in categories})
    last_made = dict.fromkeys(num_made, 0)
    earlier: deque[str] = deque(maxlen=MEMORY)
    for number, conversation in enumerate(conversations):
        # A category may be ahead of the rarest one that the last conversations served.
        counts = {name: count for name, count in num_made.items() if name != WITHOUT_TEXT}
        served = [count for name, count in counts.items() if number - last_made[name] < PATIENCE]
        fewest = max(counts.values(), default=num_made.total())
        if served:
            fewest = min(served)

        # The first category that the conversation serves, beginning with the rarest.
        rng = random.Random(f"{seed}:{conversation.id}")
        material = material_of(conversation)
        for category, count in sorted(num_made.items(), key=lambda item: item[1]):
            if count >= fewest + SLACK:
                continue
            text = CATEGORIES[category](material, earlier, rng)
            if not text:
                continue
            num_made[category] += 1
            last_made[category] = number
            messages = [{"role": "user", "content": text}]
            yield {"id": f"{category}-{conversation.id}", "category": category, "messages": messages}
            break
        earlier.extend(text for text, language in material.passages[:1] if language == "English")


def material_of(conversation: Conversation) -> Material:
    """Extract the material of a conversation from its responses and its first human turn."""
    passages: list[tuple[str, str]] = []
    sentences: list[tuple[str, str]] = []
    code: list[tuple[str, str]] = []
    functions: list[str] = []
    for message in conversation.messages:
        content = message.get("content")
        if message["role"] != "assistant" or not isinstance(content, str):
            continue

        # Blocks of code.
        for block in _fenced(content):
            if _has_code_length(block[1]):
                code.append(block)
                functions += _beginnings(block[1])

        # Paragraphs of prose, and their sentences.
        for paragraph in re.split(r"\n\s*\n", content):
            text = " ".join(paragraph.split())
            language = _language(text)
            if not language or not _is_prose(text):
                continue
            if _has_length(text, PASSAGE_WORDS):
                passages.append((text, language))
            for match in re.findall(r"[^.!?]+[.!?]", text):
                sentence = match.strip()
                if _has_length(sentence, SENTENCE_WORDS):
                    sentences.append((sentence, language))

    # The question.
    human = next(message for message in conversation.messages if message["role"] == "user")
    question = " ".join(str(human.get("content") or "").split())
    if not question.endswith("?") or not _has_length(question, QUESTION_WORDS) or not _language(question):
        question = ""
    return Material(tuple(passages), tuple(sentences), question, tuple(code), tuple(functions))


def _fenced(text: str) -> Iterator[tuple[str, str]]:
    """Blocks of Markdown in fences of backticks, as (language or empty, code without the fence's indent)."""
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        fence = re.fullmatch(FENCE, line)
        if opening is None:
            opening = fence
            lines = []
        elif fence and len(fence[2]) >= len(opening[2]) and not (fence[3] + fence[4]).strip():
            yield opening[3], "\n".join(lines)
            opening = None
        else:
            lines.append(line.removeprefix(opening[1]))


def _has_code_length(code: str) -> bool:
    """True if a block of code is neither too short nor too long."""
    num_lines = sum(bool(line.strip()) for line in code.split("\n"))
    return CODE_LINES[0] <= num_lines <= CODE_LINES[1] and len(code) <= CODE_CHARACTERS


def _beginnings(code: str) -> list[str]:
    """Signatures of the Python functions in ``code``, with their docstrings.

    Methods are left out, and functions whose body has too few lines or begins on the line of the signature.
    Empty if ``code`` is not Python.
    """
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            body = ast.parse(code).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two: nested too deeply
        return []

    lines = re.split(r"\r\n?|\n", code)
    found = []
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue

        # Lines of the body after the docstring.
        statements = node.body
        if ast.get_docstring(node) is not None:
            statements = node.body[1:]
        body_lines: list[int] = []
        for statement in statements:
            body_lines += range(_first_line(statement), (statement.end_lineno or 0) + 1)

        # The body must begin on a line of its own.
        first = node.body[0]
        before = lines[_first_line(first) - 1][: first.col_offset]
        if before.isspace() and len(set(body_lines)) >= LEAST_BODY:
            found.append("\n".join(lines[_first_line(node) - 1 : body_lines[0] - 1]).rstrip())
    return found


def _first_line(node: ast.stmt) -> int:
    """Number of the first line of a statement with its decorators, from 1."""
    decorators = getattr(node, "decorator_list", ())
    return min([node.lineno, *(each.lineno for each in decorators)])


def _has_length(text: str, limits: tuple[int, int]) -> bool:
    """True if the number of words is within ``limits``."""
    return limits[0] <= len(text.split()) <= limits[1]


def _is_prose(text: str) -> bool:
    """True for text that begins and ends as a sentence does, without markup, code, links or lists."""
    return text[-1:] in ".!?" and text[:1].isupper() and not re.search(r"[`|{}<>=*#\[\]\\_]|https?:", text)


def _language(text: str) -> str:
    """Language of ``text`` by the share of its stop words; empty if no share is large enough."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    if not words:
        return ""
    shares = {}
    for language, stops in STOP_WORDS.items():
        stop_words = stops.split()
        shares[language] = sum(word in stop_words for word in words) / len(words)
    best = max(shares, key=lambda language: shares[language])
    return best if shares[best] >= LANGUAGE_SHARE else ""


# ---- Makers of prompts: material, earlier passages and a generator -> a prompt, or an empty text


def _about_passage(wordings: tuple[str, ...]) -> Callable[[Material, deque[str], random.Random], str]:
    """A maker of prompts of ``wordings`` about one English passage."""

    def make(material: Material, earlier: deque[str], rng: random.Random) -> str:
        texts = _english(material)
        if not texts:
            return ""
        wording = rng.choice(wordings)
        text = rng.choice(texts)
        return wording.format(text=text, count=rng.randint(1, 4))

    return make


def _english(material: Material) -> list[str]:
    """English passages."""
    return [text for text, language in material.passages if language == "English"]


def _translate(material: Material, earlier: deque[str], rng: random.Random) -> str:
    """Translation of a sentence into English, or of an English sentence if there is no other."""
    if not material.sentences:
        return ""
    foreign = [sentence for sentence in material.sentences if sentence[1] != "English"]
    text, language = rng.choice(foreign or material.sentences)
    to = "English" if foreign else rng.choice(LANGUAGES)
    return rng.choice(TRANSLATE).format(source=language, to=to, text=text)


def _retrieve(material: Material, earlier: deque[str], rng: random.Random) -> str:
    """The conversation's question, behind a passage of its response among others."""
    own = _english(material)
    if not own or not material.question or len(earlier) < PASSAGES - 1:
        return ""
    passages = [rng.choice(own), *rng.sample(list(earlier), PASSAGES - 1)]
    rng.shuffle(passages)
    numbered = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(passages, 1))
    return rng.choice(RETRIEVE).format(passages=numbered, question=material.question)


def _complete(material: Material, earlier: deque[str], rng: random.Random) -> str:
    """Completion of a Python function."""
    if not material.functions:
        return ""
    wording = rng.choice(COMPLETE)
    return wording.format(text=rng.choice(material.functions))


def _code(material: Material, earlier: deque[str], rng: random.Random) -> str:
    """A task about a block of code."""
    if not material.code:
        return ""
    language, text = rng.choice(material.code)
    return rng.choice(CODE).format(language=language, text=text.strip("\n"))


def _question(material: Material, earlier: deque[str], rng: random.Random) -> str:
    """The conversation's question."""
    return material.question


def _problem(material: Material, earlier: deque[str], rng: random.Random) -> str:
    """A word problem whose answer is a whole number, zero or more."""
    name, other = rng.sample(NAMES, 2)
    a = rng.randint(12, 60)
    b = rng.randint(2, 6)
    c = rng.randint(3, 12)
    d = rng.randint(2, 11)
    numbers = {
        "a": a,
        "b": b,
        "c": c,
        "d": d,
        "even": 4 * a,
        "big": 100,
        "speed": 5 * a,
        "sum": c * rng.randint(2, 15) + d,
        "percent": 25 * rng.randint(1, 3),
    }
    wording = rng.choice(PROBLEMS)
    return wording.format(name=name, other=other, thing=rng.choice(THINGS), **numbers)


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
"""Name of a category -> maker of its prompts."""
WITHOUT_TEXT = "mathematics"
"""Category whose prompts need no material."""
