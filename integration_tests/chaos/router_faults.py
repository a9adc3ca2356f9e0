"""Causes losses of router processes, in a service with several. Only a lost worker's connections are lost
with it; nothing is lost with an engine process."""

import os
import signal
import time
from collections.abc import Callable
from random import Random

from integration_tests.chaos.target import ENGINE, Target
from tests.support.connections import count_connections, find_waiting

RESTART_S = 60.0
NOTICE_S = 1.0  # until all clients of a lost worker have noticed
POLL_S = 0.01  # so that few connections are made to a hung worker


def kill_router_worker(target: Target, random: Random) -> None:
    _lose_worker(target, random, signal.SIGKILL)


def hang_router_worker(target: Target, random: Random) -> None:
    _lose_worker(target, random, signal.SIGSTOP)


def kill_engine_process(target: Target, random: Random) -> None:
    _lose(target, ENGINE, signal.SIGKILL, lambda: None)


def hang_engine_process(target: Target, random: Random) -> None:
    _lose(target, ENGINE, signal.SIGSTOP, lambda: None)


ENGINE_FAULTS = (kill_engine_process, hang_engine_process)
ROUTER_FAULTS = (kill_router_worker, hang_router_worker, *ENGINE_FAULTS)


def is_possible(fault: Callable[[Target, Random], None], target: Target) -> bool:
    """Return whether the fault can be caused without the launcher giving up."""
    if fault not in ROUTER_FAULTS:
        return True
    names = [ENGINE] if fault in ENGINE_FAULTS else target.worker_names
    return any(target.losses.may_happen(name) for name in names)


def _lose_worker(target: Target, random: Random, number: signal.Signals) -> None:
    """Lose a worker. As many connections may break as it has, or would have accepted."""
    name = random.choice([name for name in target.worker_names if target.losses.may_happen(name)])
    ports, waiting = (target.service.grpc_port, target.api_port), set[str]()
    victim = target.router_pids()[name]
    os.kill(victim, signal.SIGSTOP)  # from now on it accepts none

    def allow_waiting() -> None:
        """Allow breaks of connections that may be waiting for the worker."""
        fresh = find_waiting(*ports) - waiting
        target.breaks.allow(len(fresh))
        waiting.update(fresh)

    target.breaks.allow(count_connections(victim, *ports))
    allow_waiting()
    try:
        _lose(target, name, number, allow_waiting)
        time.sleep(NOTICE_S)
    finally:
        target.breaks.forbid()


def _lose(target: Target, name: str, number: signal.Signals, watch: Callable[[], None]) -> None:
    """Send a signal to a process, and wait for its replacement. `watch` is called until the process is gone.

    No request is sent meanwhile, because a hung worker would respond late."""
    target.losses.note(name)
    victim, num_lines = target.router_pids()[name], len(target.service.lines)
    os.kill(victim, number)

    def is_replaced() -> bool:
        pid = target.router_pids().get(name)
        if pid == victim:
            watch()
        return pid not in (None, victim)

    _wait_until(is_replaced, f"{name} that got {number.name}")
    says = "the engine serves" if name == ENGINE else "serving gRPC"
    prefix = "Engine: " if name == ENGINE else f"Router {name.split()[1]}: "

    def serves() -> bool:
        fresh = target.service.lines[num_lines:]
        return any(line.startswith(prefix) and says in line for line in fresh)

    _wait_until(serves, f"the next {name}")


def _wait_until(condition: Callable[[], bool], awaited: str) -> None:
    deadline = time.monotonic() + RESTART_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {awaited}"
        time.sleep(POLL_S)
