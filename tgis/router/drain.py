"""Ends the router's service: warns clients, refuses new calls, and waits for the answers to earlier ones."""

import asyncio
import logging

from tgis.router.assembly import RouterComponents
from tgis.router.stop_signals import StopSignals

logger = logging.getLogger(__name__)

# Time for clients that watch the health to choose another server. Without it, gRPC would cancel calls that
# arrive while it stops.
DRAIN_NOTICE_S = 1.0
LAST_ANSWERS_S = 5.0  # time limit for answers still in transit after the last generation has ended


async def drain(
    components: RouterComponents, signals: StopSignals, engine: asyncio.Task[None], timeout_s: float
) -> None:
    """End the service. Generations get `timeout_s` to end if the engine still runs. If the shards are given
    up, only errors are still to be sent."""
    if engine.done():
        timeout_s = 0
    else:
        limit = f"{timeout_s:g} s (--shutdown-timeout)"
        if signals.has_given_up:
            timeout_s = LAST_ANSWERS_S
            limit = f"{timeout_s:g} s"
        logger.info("draining requests: %d, for at most %s", components.engine.num_live, limit)
    has_callers = components.health.num_watches > 0 or signals.has_given_up
    components.health.drain()
    components.grpc_port.begin_drain()
    if has_callers and not engine.done():
        await signals.wait_until_aborting(DRAIN_NOTICE_S)
    await _stop(components, signals, timeout_s)


async def _stop(components: RouterComponents, signals: StopSignals, timeout_s: float) -> None:
    """Refuse new calls immediately, and wait until the generations end or a second signal arrives, at most
    `timeout_s` seconds. Other streams do not delay the end."""
    stopping = asyncio.create_task(_stop_ports(components, timeout_s + LAST_ANSWERS_S))
    idle = asyncio.create_task(components.service.is_idle.wait())
    aborting = asyncio.create_task(signals.aborting.wait())
    ended, _ = await asyncio.wait(
        (stopping, idle, aborting), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
    )
    if ended:
        await asyncio.wait((stopping, aborting), timeout=LAST_ANSWERS_S, return_when=asyncio.FIRST_COMPLETED)
    for task in (idle, aborting):
        task.cancel()
    components.shutdown.cancels_calls = True
    components.http_ports.cut()
    await components.grpc_port.cut()
    await stopping


async def _stop_ports(components: RouterComponents, timeout_s: float) -> None:
    """Refuse new calls, and abort the remaining ones after the time limit."""
    await asyncio.gather(components.grpc_port.stop(timeout_s), components.http_ports.stop(timeout_s))
