"""Names of the packages' classes."""

import ast
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

import tgis
import tgis_client


@pytest.mark.parametrize("package", [tgis, tgis_client], ids=lambda package: package.__name__)
def test_no_class_name_occurs_twice(package: ModuleType) -> None:
    assert package.__file__ is not None
    folder = Path(package.__file__).parent
    files = defaultdict(list)
    for path in folder.rglob("*.py"):
        if folder / "pb" not in path.parents:
            for node in ast.parse(path.read_bytes()).body:
                if isinstance(node, ast.ClassDef):
                    files[node.name].append(str(path.relative_to(folder)))
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}
