"""Private parts of libraries are used only in files named `*_internals.py`, one for each library. Ruff's rule
SLF001 checks attributes of other objects; this test checks imports, `getattr`, and attributes of classes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TGIS = Path(__file__).parents[1] / "tgis"
INTERNALS = {
    "net/http/uvicorn_internals.py": "uvicorn",
    "router/api/grpc/grpc_internals.py": "grpcio",
    "shard/kernels/cpu/jit/numba_internals.py": "numba",
    "shard/models/hf_transformers/transformers_internals.py": "transformers",
    "shard/torch_internals.py": "torch",
}
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}
ACCESSORS = {"getattr", "setattr", "hasattr", "delattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names of a file's functions, variables, and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) == "self" else []


def private_uses(tree: ast.AST, own: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(str(module), names, 0):
                modules = [f"{module}.{alias.name}" for alias in names]
            case ast.Call(ast.Name(name), [_, ast.Constant(str(attribute)), *_]) if name in ACCESSORS:
                yield from [attribute] if is_private(attribute) else []
                continue
            case ast.Attribute(ast.Name("self" | "cls") | ast.Call(ast.Name("super")), attribute):
                yield from [attribute] if is_private(attribute) and attribute not in own else []
                continue
            case _:
                continue
        foreign = [name for name in modules if name.split(".")[0] != "tgis"]
        yield from (
            name
            for name in foreign
            if name.split(".")[0] == "uvicorn" or any(map(is_private, name.split(".")))
        )


def test_no_other_file_uses_private_parts() -> None:
    files = {
        path: ast.parse(path.read_text())
        for path in sorted(TGIS.rglob("*.py"))
        if "pb" not in path.parts and not path.stem.endswith("_internals")
    }
    own = {name for tree in files.values() for name in defined_names(tree)} | OF_NAMED_TUPLES
    assert len(files) > 500
    uses = {str(path.relative_to(TGIS)): [*private_uses(tree, own)] for path, tree in files.items()}
    assert {path: names for path, names in uses.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from torch._ops import OpOverload", ["torch._ops.OpOverload"]),
        ("def late():\n    import grpc._cython", ["grpc._cython"]),
        ("from uvicorn.protocols.http import flow_control", ["uvicorn.protocols.http.flow_control"]),
        ("from library import _part, part", ["library._part"]),
        ("value = getattr(model, '_is_stateful', False)", ["_is_stateful"]),
        (
            "class Mine(Base):\n    def f(self):\n        return self._theirs or super()._theirs()",
            ["_theirs"] * 2,
        ),
        ("class Mine(Base):\n    def f(self):\n        self._mine = self._own = 1", []),
        ("from tgis.net import _ports\nfrom __future__ import annotations\nimport torch", []),
    ],
)
def test_private_uses_are_recognized(source: str, names: list[str]) -> None:
    tree = ast.parse(source)
    assert [*private_uses(tree, {"_own", *defined_names(tree)})] == names


def test_each_library_has_one_file_that_names_its_version() -> None:
    assert {path.relative_to(TGIS).as_posix() for path in TGIS.rglob("*_internals.py")} == {*INTERNALS}
    for path, library in INTERNALS.items():
        text = ast.get_docstring(ast.parse((TGIS / path).read_text())) or ""
        assert f"Checked with {library} " in text, path
        assert "No other file may use them" in text, path
