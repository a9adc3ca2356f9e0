"""The launcher's main function. It handles signals and stops every process that the launcher started."""

import asyncio
import logging
import signal

from tgis.config.processes import LauncherConfig
from tgis.launcher.follower import Worker
from tgis.launcher.leader import Service
from tgis.launcher.plan import plan

logger = logging.getLogger(__name__)


def run(config: LauncherConfig) -> None:
    """Run this node's launcher until a clean stop. Raises what `plan`, Service and Worker raise."""
    asyncio.run(_run(config))


async def _run(config: LauncherConfig) -> None:
    planned = plan(config)
    node = (Worker if config.node_rank else Service)(config, planned)
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            node.abort()
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    logger.info("loading %s on %d shards", planned.model_path, planned.num_shards)
    main = asyncio.create_task(node.run())
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((main, stop), return_when=asyncio.FIRST_COMPLETED)
        if main.done():
            main.result()
        else:
            await node.drain(main)
    finally:
        main.cancel()
        stop.cancel()
        await asyncio.gather(main, stop, return_exceptions=True)
        await node.close()
