"""Answers whose calls are written like Python, and a reader of them that uses Python's own parser."""

import ast
import random
from typing import Any

from tests.support.answers import NAMES, SPACES

FUNCTIONS = sorted(NAMES - {"é-ü"})  # names that are expressions
KEYWORDS = ["q", "n", "_x", "größe"]
TEXTS = ["", "a", "it's", 'say "hi"', ")]", "\\", "line\nline\t\x07", "é東🙂", "f(a=1), ", "#", "=1, n=2"]


def read_calls(text: str) -> list[tuple[str, Any]]:
    """Return the calls in a list, or in lines, of calls."""
    tree = ast.parse(text.strip())
    calls = [part for line in tree.body if isinstance(line, ast.Expr) for part in _items(line.value)]
    return [
        (ast.unparse(call.func), {str(each.arg): ast.literal_eval(each.value) for each in call.keywords})
        for call in calls
    ]


def _items(node: ast.expr) -> list[ast.Call]:
    items = node.elts if isinstance(node, ast.List) else [node]
    return [item for item in items if isinstance(item, ast.Call)]


def random_call(r: random.Random) -> str:
    def space() -> str:
        return r.choice(SPACES)

    keys = r.sample(KEYWORDS, r.randrange(4))
    arguments = [f"{key}{space()}={space()}{_value(r, 0)}{space()}" for key in keys]
    end = "," if arguments and r.random() < 0.2 else ""
    return f"{r.choice(FUNCTIONS)}({space()}{f',{space()}'.join(arguments)}{end})"


def _value(r: random.Random, depth: int) -> str:
    kind = r.randrange(6 if depth < 3 else 3)
    if kind == 0:
        return r.choice(["1", "-2.5", "1e3", "0", "True", "False", "None"])
    if kind <= 2:
        return _text(r)
    items = [_value(r, depth + 1) for _ in range(r.randrange(3))]
    if kind == 3:
        return f"[{', '.join(items)}]"
    return "{" + ", ".join(f"{_text(r)}: {item}" for item in items) + "}"


def _text(r: random.Random) -> str:
    text = r.choice(TEXTS)
    quoted = repr(text) if r.random() < 0.5 else ascii(text)
    return quoted.replace("\\x07", "\\a") if r.random() < 0.5 else quoted
