"""The examples of the page on the client, each in a process of its own, with a real service."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import FENCE
from tests.support.router.router_process import Setup, start_router, stop_router
from tests.support.wire_shapes import ROOT

PAGE = ROOT / "docs" / "client.md"
ADDRESS = "localhost:8033"
EXAMPLES = [code for language, code in FENCE.findall(PAGE.read_text()) if language == "python"]
# One calls a service that is not here, and one needs LangChain; make clients tests that.
RUN = [code for code in EXAMPLES if ADDRESS in code and "langchain" not in code]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = start_router(tmp_path_factory.mktemp("router"), 1)
    yield setup
    assert stop_router(setup) == 0


def test_most_examples_run() -> None:
    assert len(RUN) == len(EXAMPLES) - 2 >= 5


def test_examples_run(router: Setup) -> None:
    """All in one process: each would spend most of its time on imports."""
    target = f"127.0.0.1:{router.service.grpc_port}"
    code = "\n".join(f"print('example')\n{example.replace(ADDRESS, target)}" for example in RUN)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    outputs = result.stdout.split("example\n")[1:]
    assert len(outputs) == len(RUN)
    assert all(output.strip() for output in outputs)


def test_the_table_of_arguments_is_whole() -> None:
    from tgis_client import CallArguments

    table = PAGE.read_text().split("| argument | meaning |")[1].split("\n\n")[0]
    named = [
        name
        for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
        for name in re.findall(r"\w+", row)
    ]
    assert sorted(named) == sorted(CallArguments.__annotations__)


def test_other_code_is_compiled() -> None:
    for path in (PAGE, ROOT / "client" / "README.md"):
        for language, code in FENCE.findall(path.read_text()):
            if language == "python":
                compile(code, str(Path(path)), "exec")
