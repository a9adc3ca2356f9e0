"""An engine process and router workers, each restarted alone: real processes that follow a script."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from tgis.launcher import shard_group
from tgis.launcher.router_group import RouterGroup
from tgis.process import heartbeat
from tgis.process.child import GIVE_UP, Child, End

pytestmark = pytest.mark.usefixtures("steady_clock")

# Replaces the package of a child. Each start of a process takes the next word of its script: it crashes,
# refuses to start, refuses after heartbeats or after it has served, or serves until a signal. Events are
# lines of a file: time, event and process id.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path

name, fd = sys.argv[1], int(sys.argv[-1])

def note(what):
    line = f"{name} {what} {os.getpid()}\\n"
    with open("events", "a") as events:
        events.write(line)

def end(number, frame):
    note(signal.Signals(number).name)
    time.sleep(0.5 if name == "b" else 0)
    note("ends")
    os._exit(0)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, end)
script = Path(name)
word, *rest = (script.read_text() if script.exists() else "").split() or ["serve"]
script.write_text(" ".join(rest))
note(word)
if word in ("serve", "falter"):
    os.write(fd, b"+")
    note("serves")
if word == "crash":
    os._exit(3)
while word == "serve":
    time.sleep(0.05)
    os.write(fd, b".")
if word == "hesitate":
    os.write(fd, b".")
time.sleep(0.5)
sys.exit("error: the port is taken")
"""
ENGINE, WORKERS = "engine", ("a", "b")


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tgis").mkdir()
    (tmp_path / "tgis" / "__init__.py").touch()
    (tmp_path / "tgis" / "__main__.py").write_text(PROGRAM)
    (tmp_path / "events").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shard_group, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(heartbeat, "PERIOD_S", 0.2)
    monkeypatch.setattr(heartbeat, "MAX_MISSED", 10)


def events() -> list[tuple[str, str, int]]:
    lines = [line.split() for line in Path("events").read_text().splitlines()]
    return [(name, what, int(pid)) for name, what, pid in lines]


def happened() -> list[tuple[str, str]]:
    return [(name, what) for name, what, _ in events()]


def serving(name: str) -> list[int]:
    """Return the process ids of all starts that served."""
    return [pid for one, what, pid in events() if (one, what) == (name, "serves")]


def write_scripts(scripts: dict[str, str]) -> None:
    for name, script in scripts.items():
        Path(name).write_text(script)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - other processes write what it reads
            await asyncio.sleep(0.01)


async def until_starts(name: str, count: int) -> None:
    await until(lambda: len(serving(name)) == count)


@asynccontextmanager
async def running(**scripts: str) -> AsyncIterator[RouterGroup]:
    """Run the group, whose processes only serve; no process remains afterwards."""
    write_scripts(scripts)

    def make(name: str) -> Child:
        return Child(f"the {name}", [name], has_heartbeat=True)

    group = RouterGroup(partial(make, ENGINE), [partial(make, name) for name in WORKERS])
    await group.start()
    try:
        yield group
    finally:
        await group.kill()
        assert not any(map(is_alive, (pid for *_, pid in events())))


async def end_of(waiting: Awaitable[End]) -> End:
    return await asyncio.wait_for(waiting, 20)


@pytest.mark.parametrize(
    ("victim", "number"),
    [(ENGINE, signal.SIGKILL), (ENGINE, signal.SIGSTOP), ("a", signal.SIGKILL), ("b", signal.SIGSTOP)],
)
async def test_one_that_is_lost_is_restarted_alone(
    victim: str, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as group:
        for name in (ENGINE, *WORKERS):
            await until_starts(name, 1)
        os.kill(serving(victim)[0], number)
        await until_starts(victim, 2)
        assert [len(serving(name)) for name in (ENGINE, *WORKERS) if name != victim] == [1, 1]
        was = "hung and was killed" if number is signal.SIGSTOP else "was killed by SIGKILL (out of memory?)"
        assert caplog.messages == [f"the {victim} {was}; restarting it"]
        group.signal(signal.SIGTERM)
        assert (await end_of(group.wait())).is_success


@pytest.mark.parametrize(("name", "word"), [(ENGINE, "refuse"), (ENGINE, "hesitate"), ("a", "refuse")])
async def test_a_refusal_at_the_start_is_the_end(name: str, word: str) -> None:
    async with running(**{name: word}) as group:
        end = await end_of(group.wait())
        assert (end.text, end.is_success) == (f"the {name}: the port is taken", False)
        assert [one for one, what in happened() if what == word] == [name]


async def test_a_refusal_of_one_that_has_served_is_a_crash() -> None:
    async with running(a="falter refuse") as group:
        await until_starts("a", 2)
        assert [what for name, what in happened() if name == "a"] == [
            "falter",
            "serves",
            "refuse",
            "serve",
            "serves",
        ]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(group.wait(), 0.8)


async def test_one_that_crashes_too_often_ends_all() -> None:
    """Ends of other processes do not count."""
    async with running(a="crash " * 6, b="crash " * 7, engine="crash " * 6) as group:
        end = await end_of(group.wait())
        assert end.text == "the b exited with code 3; giving up after 6 restarts of this process"
        assert happened().count(("b", "crash")) == 7


async def test_the_engine_serves_until_all_workers_have_drained(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as group:
        for name in (ENGINE, *WORKERS):
            await until_starts(name, 1)
        group.signal(signal.SIGTERM)
        assert (await end_of(group.wait())).is_success
        ends = [event for event in happened() if event[1] != "serve" and event[1] != "serves"]
        assert ends[-3:] == [("b", "ends"), (ENGINE, "SIGTERM"), (ENGINE, "ends")]
        assert ("a", "ends") in ends
        assert not caplog.messages


async def test_losses_while_draining() -> None:
    """A worker's requests are lost with it, so GIVE_UP starts no other; requests of others need an engine."""
    async with running() as group:
        for name in (ENGINE, *WORKERS):
            await until_starts(name, 1)
        os.kill(serving("b")[0], signal.SIGSTOP)
        group.signal(signal.SIGTERM)
        os.kill(serving(ENGINE)[0], signal.SIGKILL)
        await until_starts(ENGINE, 2)
        os.kill(serving("b")[0], signal.SIGKILL)
        assert (await end_of(group.wait())).is_success
        assert len(serving("b")) == 1
        assert happened()[-1] == (ENGINE, "ends")


async def test_all_routers_are_notified_of_given_up_shards() -> None:
    async with running() as group:
        for name in (ENGINE, *WORKERS):
            await until_starts(name, 1)
        group.signal(GIVE_UP)
        assert (await end_of(group.wait())).is_success
        assert {name for name, what in happened() if what == GIVE_UP.name} == {ENGINE, *WORKERS}
        assert all(len(serving(name)) == 1 for name in (ENGINE, *WORKERS))


@pytest.mark.parametrize(("num_turns", "num_crashes"), [(0, 0), (3, 0), (0, 2)])
async def test_a_signal_at_any_time_of_a_start(
    num_turns: int, num_crashes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal arrives before there is a process, during its start, and between two starts."""
    for name in ("FIRST_BACKOFF_S", "MAX_BACKOFF_S"):
        monkeypatch.setattr(shard_group, name, 60.0)
    async with running(a="crash " * 4) as group:
        await until(lambda: happened().count(("a", "crash")) == num_crashes)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        group.signal(signal.SIGTERM)
        assert (await end_of(group.wait())).is_success
