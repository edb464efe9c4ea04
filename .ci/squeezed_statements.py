#!/usr/bin/env python3
"""Name the statements of a change that do several things at once, as style asks not to write them.

Two forms are found: assignments of unrelated values to a tuple (``a, b = x, y``), and literals that are
unpacked into the arguments of a call (``f(*(p, q))``, ``f(**{"p": 1})``). A swap of names is not one of them.

``python .ci/squeezed_statements.py [BASE]`` prints the places on lines that were added since BASE (a commit;
default the one before HEAD), and how many such statements each folder has in all. It never fails a change:
reading decides.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@")


class Place(NamedTuple):
    """A squeezed statement: the line on which it begins, from 1, and what it is."""

    line: int
    form: str


def squeezed(source: str) -> Iterator[Place]:
    """Find the squeezed statements of a module. Raises SyntaxError where ``source`` is no Python."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and _is_of_unrelated_values(node):
            yield Place(node.lineno, "assignment of several values")
        if isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple | ast.List):
                    yield Place(argument.lineno, "unpacked literal")
            for keyword in node.keywords:
                if keyword.arg is None and isinstance(keyword.value, ast.Dict):
                    yield Place(keyword.value.lineno, "unpacked literal")


def _is_of_unrelated_values(node: ast.Assign) -> bool:
    """True for ``a, b = x, y``, but not for a swap, whose names are the same on both sides."""
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    names = sorted(ast.dump(each).replace("Store()", "Load()") for each in target.elts)
    return names != sorted(ast.dump(each) for each in node.value.elts)


def added_lines(base: str) -> dict[str, set[int]]:
    """Lines of Python files that were added since the commit ``base``: path -> line numbers."""
    command = ["git", "diff", "--unified=0", "--diff-filter=d", base, "--", "*.py"]
    diff = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, set[int]] = {}
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line[4:].removeprefix("b/")
        elif hunk := HUNK.match(line):
            start = int(hunk[1])
            found.setdefault(path, set()).update(range(start, start + int(hunk[2] or 1)))
    return found


def main(arguments: list[str]) -> int:
    """Print the places of a change, then the counts by folder."""
    base = arguments[0] if arguments else "HEAD~1"
    known = subprocess.run(["git", "rev-parse", "--verify", "--quiet", base], capture_output=True)
    added = {}
    if known.returncode == 0:
        added = added_lines(base)
    else:
        print(f"There is no commit {base} here, as in a shallow clone: only counts follow.")

    num_new = 0
    for path, lines in added.items():
        for place in squeezed(Path(path).read_text(encoding="utf-8")):
            if place.line in lines:
                print(f"{path}:{place.line}: {place.form}")
                num_new += 1

    counts: Counter[str] = Counter()
    tracked = subprocess.run(["git", "ls-files", "*.py"], check=True, capture_output=True, text=True).stdout
    for path in tracked.splitlines():
        folder = "/".join(Path(path).parts[: 2 if path.startswith("eagle_kit/") else 1])
        counts[folder] += sum(1 for _ in squeezed(Path(path).read_text(encoding="utf-8")))
    print(f"new since {base}: {num_new}; in all: {counts.total()}")
    for folder, count in counts.most_common():
        if count:
            print(f"  {count:5} {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
