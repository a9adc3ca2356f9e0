"""The commands of the page on measuring, with a real router."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import Page
from tests.support.router.router_process import Setup, start_router, stop_router
from tests.support.wire_shapes import ROOT
from tgis.load.report.files import WRITERS

PAGE = Page(ROOT / "docs" / "measuring.md")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SHORT = ["--duration", "2", "--input-tokens", "30", "--output-tokens", "4", "--quiet", "--warm-up", "0"]
COMMANDS = [command.words[2:] for command in PAGE.commands() if command.words[:2] == ("tgis", "bench")]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    directory = tmp_path_factory.mktemp("router")
    (directory / "template").write_text(TEMPLATE)
    flags = (
        "--http-api",
        "openai,tgi",
        "--served-model-name",
        "m",
        "--chat-template",
        str(directory / "template"),
    )
    setup = start_router(directory, 1, *flags)
    yield setup
    assert stop_router(setup) == 0


@pytest.mark.slow
def test_commands_run(router: Setup, tmp_path: Path) -> None:
    """Each for a short time, and with short texts: the router's longest sequence has 200 tokens."""
    turns = '[{"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "good day"}]}]'
    (tmp_path / "ShareGPT.json").write_text(turns)
    grpc, http = f"127.0.0.1:{router.service.grpc_port}", router.http
    measuring = [words for words in COMMANDS if words[0] != "compare" and "--adapters" not in words]
    assert len(measuring) == len(COMMANDS) - 2 >= 7
    for words in measuring:
        flags = [
            word.replace("localhost:8033", grpc).replace("http://localhost:3000", http) for word in words
        ]
        given = flags if "--target" in flags else ["--target", grpc, *flags]
        prefix = [] if "--exact-input" in words else ["--shared-prefix", "10"]  # shorter than the page's
        command = [sys.executable, "-m", "tgis", "bench", *given, *SHORT, *prefix]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (shlex.join(command), done.stderr)
        assert "req/s" in done.stdout
    command = [sys.executable, "-m", "tgis", "bench", "compare", "sweep.json", "sweep.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sweep.html").is_file()


def test_the_page_names_every_form_of_the_report() -> None:
    assert all(f"`{suffix}`" in PAGE.text for suffix in WRITERS)
