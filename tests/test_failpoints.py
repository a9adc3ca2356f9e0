"""Faults that are asked for happen, where and when they are asked for, and no others."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tgis import failpoints
from tgis.failpoints import EXIT_CODE, FailpointError, InjectedError, arm, hit


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    arm(None)


def test_nothing_happens_where_nothing_is_asked_for() -> None:
    arm("a.b=raise")
    assert not hit("a.c")
    arm(None)
    assert not hit("a.b", lambda: pytest.fail("facts cost something"))


def test_only_that_time() -> None:
    arm("a.b=raise@3")
    for number in range(1, 6):
        if number == 3:
            with pytest.raises(InjectedError):
                hit("a.b")
        else:
            hit("a.b")


def test_only_where_all_facts_hold() -> None:
    arm("a.b[rank=1;prompt=7]=oom@2, a.b=garbage", "rank=1")
    for lengths in ([6], [7], [6, 8]):
        assert hit("a.b", lambda lengths=lengths: [f"prompt={length}" for length in lengths])
    with pytest.raises(MemoryError):
        hit("a.b", lambda: ["prompt=8", "prompt=7"])
    arm("a.b[rank=1]=raise", "rank=0")
    hit("a.b")


def test_sleep_takes_its_seconds() -> None:
    arm("a.b=sleep:0.05")
    started = time.monotonic()
    hit("a.b")
    assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize(("action", "code"), [("kill", -9), ("exit", EXIT_CODE)])
def test_the_process_ends(action: str, code: int) -> None:
    script = f"from tgis.failpoints import arm, hit; arm('a.b={action}'); hit('a.b')"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == code


@pytest.mark.parametrize("text", ["a.b", "a.b=", "a.b=bite", "a.b=raise@x", "=raise", "a.b[rank=1=raise"])
def test_unreadable_specifications_are_refused(text: str) -> None:
    with pytest.raises(FailpointError, match="is not POINT"):
        arm(text)
    assert not failpoints._rules
