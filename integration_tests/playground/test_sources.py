"""The types of the playground's scripts, which are declared in comments."""

import subprocess
from pathlib import Path

import pytest

import tgis.router.api.openai.playground.page as playground
from tests.support import npm_packages

pytestmark = pytest.mark.browser

LIBRARIES = ["--target", "es2022", "--lib", "es2022,dom,dom.iterable"]
OPTIONS = ["--noEmit", "--allowJs", "--checkJs", "--strict", *LIBRARIES]


def test_the_library_is_the_published_one() -> None:
    packages = npm_packages.install(Path(__file__).parent, "playground")
    folder, published = Path(playground.__file__).parent, packages / "node_modules" / "marked"
    assert (folder / playground.LIBRARY).read_bytes() == (published / "lib" / "marked.umd.js").read_bytes()
    assert (folder / "marked-license.md").read_bytes() == (published / "LICENSE").read_bytes()


def test_types_of_the_scripts() -> None:
    packages = npm_packages.install(Path(__file__).parent, "playground")
    folder = Path(playground.__file__).parent
    scripts = [str(folder / name) for name in playground.SCRIPTS]
    compiler = packages / "node_modules" / ".bin" / "tsc"
    result = subprocess.run([compiler, *OPTIONS, *scripts], text=True, capture_output=True, check=False)
    assert result.returncode == 0, result.stdout
