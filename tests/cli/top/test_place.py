"""The service that `tgis top` watches by default."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.router.router_process import start_router, stop_router
from tgis.cli.top.place import ServicePlace, locate
from tgis.cli.top.scrape import ScrapeError
from tgis.process.run_directory import HTTP_URL, RunDirectory, running_urls

NAMED = "select another service with --target HOST:PORT"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    """Create the directory of a running service."""
    run_directory = RunDirectory(tmp_path)
    yield run_directory
    run_directory.remove()


def look(tmp_path: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Return the exit status, the first line of the frame and the error of `tgis top --once`."""
    env = {name: value for name, value in os.environ.items() if name not in ("PORT", "BIND", "HTTP_TLS")}
    command = [sys.executable, "-m", "tgis", "top", "--once", "--interval", "0.1", *arguments]
    env |= {"TMPDIR": str(tmp_path), **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=env)
    return done.returncode, done.stdout.partition("\n")[0], done.stderr


def test_the_service_that_runs_here(tmp_path: Path, directory: RunDirectory) -> None:
    (tmp_path / "model").mkdir()
    path = directory.path / HTTP_URL
    setup = start_router(tmp_path / "model", 1, "--http-url-path", str(path))
    try:
        assert path.read_text() == f"{setup.http}\n"
        code, head, error = look(tmp_path, PORT="0")
    finally:
        end = stop_router(setup)
    assert end == 0, setup.service.output
    assert (code, error) == (0, "")
    assert head.startswith(f"tgis top    {setup.http}  ready  ")


def test_a_port_that_does_not_answer(tmp_path: Path) -> None:
    error = f"error: http://127.0.0.1:1: Connection refused; {NAMED}\n"
    assert look(tmp_path, PORT="1") == (1, "", error)


def test_places(tmp_path: Path, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert locate(ServicePlace()).target == "localhost:3000"
    assert locate(ServicePlace(port=9, bind="::", http_tls=True)).target == "https://[::1]:9"
    for given, target in (("a", "a:3000"), ("[::1]", "[::1]:3000"), ("a:1", "a:1"), ("http://a", "http://a")):
        assert locate(ServicePlace(target=given)).target == target
    (directory.path / HTTP_URL).write_text("http://127.0.0.1:2\n")
    assert locate(ServicePlace(port=0)).target == "http://127.0.0.1:2"
    other = RunDirectory(tmp_path)
    (other.path / HTTP_URL).write_text("http://127.0.0.1:3\n")
    with pytest.raises(
        ScrapeError, match=r"several services run here: http://127.0.0.1:2, http://127.0.0.1:3"
    ):
        locate(ServicePlace())
    other.remove()


def test_directories_of_others_and_of_runs_that_ended(
    tmp_path: Path, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert running_urls(tmp_path) == []
    ended = tmp_path / "text-generation-ended"
    ended.mkdir()
    (ended / "lock").touch()
    (ended / HTTP_URL).write_text("http://127.0.0.1:1\n")
    (directory.path / HTTP_URL).write_text("http://127.0.0.1:2\n")
    assert running_urls(tmp_path) == ["http://127.0.0.1:2"]
    monkeypatch.setattr(os, "getuid", lambda: directory.path.stat().st_uid + 1)
    assert running_urls(tmp_path) == []
