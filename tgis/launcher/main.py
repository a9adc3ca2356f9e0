"""Runs the launcher: handles signals, and stops every process that the launcher started."""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

from tgis.config.processes import LauncherConfig
from tgis.launcher.gguf_model import GgufModel, find_gguf_model
from tgis.launcher.leader import Leader
from tgis.launcher.nodes.follower import Follower
from tgis.launcher.nodes.local_node import run_all
from tgis.launcher.nodes.shard_process import ShardProcesses
from tgis.launcher.plan import Plan, count_shards, make_plan, uses_gpus
from tgis.launcher.shared_ports import check_ports
from tgis.launcher.startup_downloads import download_missing

logger = logging.getLogger(__name__)

REPEATED_S = 0.5
"""Time after a signal in which another one is the same: `timeout` signals a process, and then its group."""


def run(config: LauncherConfig) -> None:
    """Run this node's launcher until a clean stop.

    Raises the errors of `check_ports`, `download_missing`, `count_shards`, `find_gguf_model`, `make_plan`,
    Leader and Follower."""
    asyncio.run(_run(config))


async def _run(config: LauncherConfig) -> None:
    stopping = asyncio.Event()
    aborting = asyncio.Event()
    _handle_signals(stopping, aborting)
    if not config.node_rank:
        check_ports(config)  # before downloads and conversions, which may take minutes
    if not await _finish(download_missing(config), stopping):
        return
    num_shards = count_shards(config, uses_gpus(config))
    gguf = find_gguf_model(config)
    shards = ShardProcesses(config, num_shards)
    try:
        await shards.start()
        if gguf is None or await _finish(gguf.begin(), stopping):
            plan = make_plan(config, gguf.path if gguf else None, num_shards)
            await _run_node(config, plan, shards, gguf, stopping, aborting)
    finally:
        await shards.kill()
        if gguf is not None:
            await gguf.close()


def _handle_signals(stopping: asyncio.Event, aborting: asyncio.Event) -> None:
    """Set `stopping` at the first signal, and `aborting` at a later one."""
    loop = asyncio.get_running_loop()
    stopped_at = 0.0

    def on_signal() -> None:
        nonlocal stopped_at
        if not stopping.is_set():
            stopping.set()
            stopped_at = loop.time()
        elif loop.time() >= stopped_at + REPEATED_S:
            aborting.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)


async def _finish(work: Coroutine[Any, Any, None], stopping: asyncio.Event) -> bool:
    """Wait for `work`. If `stopping` is set first, cancel it and return False."""
    task = asyncio.create_task(work)
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
    if is_finished := task.done():
        stop.cancel()
        task.result()
    task.cancel()
    await asyncio.wait((task,))
    return is_finished


async def _run_node(
    config: LauncherConfig,
    plan: Plan,
    shards: ShardProcesses,
    gguf: GgufModel | None,
    stopping: asyncio.Event,
    aborting: asyncio.Event,
) -> None:
    node = (Follower if config.node_rank else Leader)(config, plan, shards)
    shards_text = "1 shard" if plan.num_shards == 1 else f"{plan.num_shards} shards"
    logger.info("loading %s on %s", plan.base_name or config.model_name, shards_text)
    # The tokenizer of a GGUF model is written while the shards load.
    main = asyncio.create_task(run_all((node.run(), gguf.finish())) if gguf else node.run())
    stop = asyncio.create_task(stopping.wait())
    abort = asyncio.create_task(aborting.wait())
    try:
        await asyncio.wait((main, stop), return_when=asyncio.FIRST_COMPLETED)
        if main.done():
            main.result()
        else:
            await node.drain(main, abort)
    finally:
        for task in (main, stop, abort):
            task.cancel()
        await asyncio.gather(main, stop, abort, return_exceptions=True)
        await node.close()
    logger.info("the service has stopped as requested")
