"""Processes of shards that import their libraries before they have options."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.processes import children_of
from tgis.config.processes import LauncherConfig, ShardConfig
from tgis.launcher.nodes.shard_process import ShardProcess, ShardProcesses

CONFIG = LauncherConfig(model_name="not looked up", device="cpu")


def wait_for_library(pid: int, name: str) -> None:
    deadline = time.monotonic() + 60
    while name not in Path(f"/proc/{pid}/maps").read_text():
        assert time.monotonic() < deadline, f"{name} was not imported"
        time.sleep(0.05)


async def test_libraries_are_imported_before_there_are_options() -> None:
    """Processes that nothing has taken are killed and leave no descriptor open."""
    before = os.listdir("/proc/self/fd")
    processes = ShardProcesses(CONFIG, 1)
    await processes.start()
    await processes.start()  # the same processes
    [pid] = children_of(os.getpid())["serve"]
    await asyncio.to_thread(wait_for_library, pid, "libtorch_cpu")
    await asyncio.to_thread(wait_for_library, pid, "libllvmlite")  # the platform's, which is imported last
    await processes.kill()
    assert "serve" not in children_of(os.getpid())
    await asyncio.sleep(0)  # the pipes are closed by callbacks
    assert len(os.listdir("/proc/self/fd")) <= len(before)


async def test_a_start_that_is_cancelled_begins_anew() -> None:
    """A group cancels this node's start if another node is lost meanwhile, and then starts all again."""
    before = os.listdir("/proc/self/fd")
    processes = ShardProcesses(CONFIG, 2)
    starting = asyncio.create_task(processes.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait((starting,))
    assert starting.cancelled()
    await processes.start()
    shards = processes.take()
    ends = [asyncio.create_task(shard.wait()) for shard in shards]
    await asyncio.gather(*(shard.kill() for shard in shards))
    killed = [f"shard {rank} was killed by SIGKILL (out of memory?)" for rank in range(2)]
    assert [(await end).text for end in ends] == killed
    await asyncio.sleep(0)  # the pipes are closed by callbacks
    assert len(os.listdir("/proc/self/fd")) <= len(before)


async def test_the_end_of_a_waiting_process_is_reported_when_it_is_needed() -> None:
    shard = ShardProcess(CONFIG, 3)
    await shard.start()
    [pid] = children_of(os.getpid())["serve"]
    os.kill(pid, signal.SIGKILL)
    end = await asyncio.wait_for(shard.wait(), 20)
    shard.load(ShardConfig(model_path="/nowhere", rank=3, world_size=4))
    assert (await shard.wait()) is end
    assert end.text == "shard 3 was killed by SIGKILL (out of memory?)"
    await shard.kill()


async def test_a_library_that_cannot_be_imported_is_one_error_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher does not restart such a shard."""
    (tmp_path / "torch.py").write_text("raise ImportError('libgomp.so.1 is missing')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', os.getcwd())}")
    shard = ShardProcess(CONFIG, 0)
    await shard.start()
    end = await asyncio.wait_for(shard.wait(), 60)
    await shard.kill()
    assert end.is_refusal
    assert end.text == "shard 0: ImportError: libgomp.so.1 is missing"
