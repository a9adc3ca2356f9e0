"""Engine process and router workers that share the ports, in place of a router in one process. Run it like
`python -m tgis`; an environment variable sets the number of workers."""

import asyncio
import os
import re
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from tgis.cli.main import main
from tgis.config.option import to_flags
from tgis.config.processes import RouterConfig
from tgis.launcher.plan import LaunchError
from tgis.launcher.router_group import RouterGroup
from tgis.launcher.shared_ports import SharedPorts
from tgis.process.child import GIVE_UP, Child
from tgis.process.output_lines import LineForm
from tgis.router import app

MODULE = "tests.support.router.split_router"
WORKERS = "SPLIT_ROUTER_WORKERS"
NUM_WORKERS = int(os.environ.get(WORKERS, 3))
NAME = re.compile(r"^(engine process|router worker \d): ")
"""Prefix of the reason that a process reports for its end."""


def run(config: RouterConfig) -> None:
    """Run several processes in place of `app.run`, and restart each when it dies."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="split-"))
        split = {"engine_path": f"{directory}/engine", "metrics_dir": directory}
        config = replace(config, router_workers=NUM_WORKERS, **split)
        if NUM_WORKERS > 1:  # a single worker does not share its ports
            ports = SharedPorts(config)
            stack.callback(ports.close)
            config = ports.config
        asyncio.run(_run(config))


async def _run(config: RouterConfig) -> None:
    workers = [partial(_make_worker, config, number) for number in range(NUM_WORKERS)]
    group = RouterGroup(partial(_make_child, "engine process", "engine", "Engine: ", config), workers)
    await group.start()
    for number in (signal.SIGTERM, signal.SIGINT, GIVE_UP):
        asyncio.get_running_loop().add_signal_handler(number, group.signal, number)
    end = await group.wait()
    await group.kill()
    if not end.is_success:
        raise LaunchError(NAME.sub("", end.text))


def _make_worker(config: RouterConfig, number: int) -> Child:
    own = replace(config, worker=number)
    return _make_child(f"router worker {number}", "router", f"Router {number}: ", own)


def _make_child(name: str, command: str, prefix: str, config: RouterConfig) -> Child:
    prefix = "" if config.json_output else prefix
    return Child(name, [command, *to_flags(config)], LineForm(prefix), has_heartbeat=True)


if __name__ == "__main__":
    app.run = run
    main(sys.argv[1:])
