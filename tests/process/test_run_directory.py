"""Directories of runs: private, and removed at the end, or else by another run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tgis.process import run_directory
from tgis.process.run_directory import RunDirectory, RunDirectoryError

HOLD = """
import sys, time
from pathlib import Path
from tgis.process.run_directory import RunDirectory
print(RunDirectory(Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def no_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "MIN_AGE_S", -1.0)


def test_it_is_ours_alone_and_goes(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert (directory.path / "lock").stat().st_mode & 0o777 == 0o600
    directory.remove()
    assert not list(tmp_path.iterdir())


def test_the_next_run_removes_only_unlocked_leftovers(tmp_path: Path) -> None:
    foreign = tmp_path / "text-generation-of-nobody"
    foreign.mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        held = Path(run.stdout.readline().strip())
        (held / "socket").touch()
        first = RunDirectory(tmp_path)
        assert held.is_dir()
        run.send_signal(signal.SIGKILL)
    second = RunDirectory(tmp_path)
    assert not held.exists()
    assert {first.path, second.path, foreign} == set(tmp_path.iterdir())
    for directory in (first, second):
        directory.remove()


def test_a_young_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "MIN_AGE_S", 60.0)
    young = tmp_path / "text-generation-young"
    young.mkdir()
    (young / "lock").touch()
    RunDirectory(tmp_path).remove()
    assert young.is_dir()
    os.utime(young, (1, 1))
    RunDirectory(tmp_path).remove()
    assert not young.exists()


def test_a_place_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunDirectoryError, match=r"^no directory for temporary files: No such file"):
        RunDirectory(Path("/proc/nowhere"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc/a", "/proc/b"])
    with pytest.raises(RunDirectoryError) as error:
        RunDirectory()
    assert str(error.value) == (
        "no directory for temporary files: No usable temporary directory found in ['/proc/a', '/proc/b']"
    )
