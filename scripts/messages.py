"""Collects the texts that the package raises or logs as a warning or an error from its source. Values become
placeholders, `{name}`."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "tgis"
ROOTS = ("OperatorError", "RouterError", "ClickException", "UsageError")
LOGGED = ("warning", "error", "exception")
REFUSALS = ("refusal", "unreadable")  # prefix of errors about an option's value
PERCENT = re.compile(r"%(?:\.\d+)?[srdfgi]")
HOLE = re.compile(r"\{[^{}]*\}")
MIN_LETTERS = 8  # texts with fewer letters are only a placeholder with punctuation


@dataclass(frozen=True)
class Message:
    text: str
    kind: str
    """`raised`, `logged`, or `other` for any other text of the source."""
    module: str

    @property
    def key(self) -> str:
        return key_of(self.text)


def key_of(text: str) -> str:
    """Key that is equal for texts that differ only in the names of their placeholders."""
    return HOLE.sub("{}", text)


def collect(package: Path = PACKAGE) -> list[Message]:
    """Return the messages without repetitions; raised and logged ones come first."""
    trees = {path: ast.parse(path.read_text()) for path in _sources(package)}
    errors, constants = _errors(trees.values()), _shared(trees.values())
    messages: dict[str, Message] = {}
    for kind in ("raised", "logged", "other"):
        for path, tree in trees.items():
            module = str(path.relative_to(package.parent))
            for text in _Module(tree, errors, constants).texts(kind):
                if sum(c.isalpha() for c in HOLE.sub("", text)) >= MIN_LETTERS:
                    messages.setdefault(key_of(text), Message(text, kind, module))
    return list(messages.values())


def _sources(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*.py") if "pb" not in path.parts)


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _shared(trees: Iterable[ast.Module]) -> dict[str, ast.expr]:
    """Return the texts that modules may import: constants whose name stands for one text in the whole
    package."""
    shared: dict[str, list[ast.expr]] = {}
    for tree in trees:
        for name, value in _constants(tree).items():
            shared.setdefault(name, []).append(value)
    return {name: values[0] for name, values in shared.items() if name.isupper() and len(values) == 1}


def _errors(trees: Iterable[ast.Module]) -> frozenset[str]:
    """Return the names of the exception classes whose text is shown to users."""
    bases: dict[str, list[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    known = set(ROOTS)
    while more := {name for name, of in bases.items() if known.intersection(of)} - known:
        known |= more
    return frozenset(known)


class _Module:
    def __init__(self, tree: ast.Module, errors: frozenset[str], constants: Mapping[str, ast.expr]) -> None:
        self._nodes, self._errors = list(ast.walk(tree)), errors
        self._constants = {**constants, **_constants(tree)}
        joined = [node for node in self._nodes if isinstance(node, ast.JoinedStr)]
        self._parts = {id(part) for node in joined for part in node.values}

    def texts(self, kind: str) -> Iterator[str]:
        find = {"raised": self._raised, "logged": self._logged, "other": self._other}[kind]
        for node in self._nodes:
            for expression, values in find(node):
                for text in self._templates(expression):
                    yield " ".join(_fill(text, values).split())

    def _raised(self, node: ast.AST) -> Iterator[tuple[ast.expr, list[ast.expr]]]:
        if isinstance(node, ast.keyword) and node.arg in REFUSALS:
            yield node.value, []
        if not isinstance(node, ast.Call):
            return
        owner, name = _called(node.func)
        if node.args and (name in self._errors or (owner, name) == ("super", "__init__")):
            yield node.args[0], []
        if name == "_require" and len(node.args) == 2:
            yield node.args[1], []

    def _logged(self, node: ast.AST) -> Iterator[tuple[ast.expr, list[ast.expr]]]:
        if isinstance(node, ast.Call):
            owner, name = _called(node.func)
            if owner == "logger" and name in LOGGED:
                yield node.args[0], node.args[1:]
            if (owner, name) == ("logger", "log") and "logging.INFO" not in ast.unparse(node.args[0]):
                yield node.args[1], node.args[2:]

    def _other(self, node: ast.AST) -> Iterator[tuple[ast.expr, list[ast.expr]]]:
        is_text = isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)
        if is_text and isinstance(node, ast.expr) and id(node) not in self._parts:
            yield node, []

    def _templates(self, node: ast.expr) -> Iterator[str]:
        """Yield the possible texts of an expression; one per side of a condition."""
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.JoinedStr(values=parts):
                yield "".join(map(self._part, parts))
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                yield from (a + b for a in self._templates(left) for b in self._templates(right))
            case ast.IfExp(body=one, orelse=other):
                yield from (*self._templates(one), *self._templates(other))
            case ast.Name(id=name) if name in self._constants:
                yield from self._templates(self._constants[name])
            case ast.Call(func=ast.Attribute(value=of, attr="format")):
                yield from self._templates(of)
            case _:
                yield _hole(node)

    def _part(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        assert isinstance(node, ast.FormattedValue)
        constant = self._constants.get(node.value.id) if isinstance(node.value, ast.Name) else None
        return str(constant.value) if isinstance(constant, ast.Constant) else _hole(node.value)


def _called(function: ast.expr) -> tuple[str, str]:
    """Return the class and the name of a method."""
    match function:
        case ast.Name(id=name):
            return "", name
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return owner, name
        case ast.Attribute(value=ast.Call(func=ast.Name(id=owner)), attr=name):
            return owner, name
        case ast.Attribute(attr=name):
            return "", name
    return "", ""


def _fill(text: str, values: list[ast.expr]) -> str:
    """Return a log's text with the names of its values as placeholders."""
    names = iter([name for value in values for name in _names(value)])
    return PERCENT.sub(lambda _: next(names, "{}"), text) if values else text


def _names(value: ast.expr) -> list[str]:
    if isinstance(value, ast.Starred) and isinstance(value.value, ast.Tuple):
        return [_hole(one) for one in value.value.elts]
    return [_hole(value)]


def _hole(node: ast.expr) -> str:
    """Return `{name}` if the source has a name for the value."""
    while isinstance(node, ast.Call | ast.BinOp):
        node = (node.args or [ast.Constant("")])[0] if isinstance(node, ast.Call) else node.left
    name = ast.unparse(node).rpartition(".")[2] if isinstance(node, ast.Name | ast.Attribute) else ""
    return "{" + name.strip("_").lower() + "}"
