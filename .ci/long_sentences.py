"""Sentences of more than 25 words in the written pages: `python .ci/long_sentences.py`.

Printed by `make docs`. They are reported, not forbidden: a list within a sentence can be easier to read than
several sentences.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 25
GENERATED = re.compile(r"^Written by `make reference`", re.MULTILINE)
FENCED = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+).+?\1")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
NEW_PARAGRAPH = re.compile(r"^\s*(?:[*+-]|\d+\.|#+|>) +", re.MULTILINE)
END = re.compile(r"(?<=[.:?!])[\"*)]*\s+")


def sentences(text: str) -> Iterator[str]:
    """Sentences of a page's prose: no code, no tables. A colon ends one, too."""
    prose = LINK.sub(r"\1", CODE.sub("CODE", FENCED.sub("", text)))
    prose = "\n".join("" if line.lstrip().startswith("|") else line for line in prose.splitlines())
    for paragraph in re.split(r"\n\s*\n", NEW_PARAGRAPH.sub("\n\n", prose)):
        yield from END.split(" ".join(paragraph.split()))


def main() -> int:
    """Print every long sentence with its page and its number of words."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    count = 0
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if GENERATED.search(text):
            continue
        for sentence in sentences(text):
            num_words = len(sentence.split())
            if num_words > MOST_WORDS:
                count += 1
                print(f"{page.relative_to(ROOT)}: {num_words} words: {sentence}")
    print(f"{count} sentences have more than {MOST_WORDS} words")
    return 0


if __name__ == "__main__":
    sys.exit(main())
