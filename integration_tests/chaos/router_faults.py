"""Losses of a router's processes, of a service that has several. With a worker goes what its connections
carried, and nothing else; with an engine process nothing."""

import os
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable
from random import Random

from integration_tests.chaos.target import MAX_RESTARTS, WINDOW_S, Target
from integration_tests.chaos.traffic import Case

ENGINE = "engine"
RESTART_S = 60.0
NOTICE_S = 1.0  # until all clients of a worker that is gone have noticed
_losses: defaultdict[str, deque[float]] = defaultdict(deque)


def kill_router_worker(target: Target, random: Random, cases: list[Case]) -> None:
    _lose_worker(target, random, signal.SIGKILL)


def hang_router_worker(target: Target, random: Random, cases: list[Case]) -> None:
    _lose_worker(target, random, signal.SIGSTOP)


def kill_engine_process(target: Target, random: Random, cases: list[Case]) -> None:
    _lose(target, ENGINE, signal.SIGKILL)


def hang_engine_process(target: Target, random: Random, cases: list[Case]) -> None:
    _lose(target, ENGINE, signal.SIGSTOP)


def _lose_worker(target: Target, random: Random, number: signal.Signals) -> None:
    target.is_losing_worker.set()
    try:
        _lose(target, f"worker {random.randrange(target.num_workers)}", number)
        time.sleep(NOTICE_S)
    finally:
        target.is_losing_worker.clear()


def _lose(target: Target, name: str, number: signal.Signals) -> None:
    """Send a signal to a process, unless that was done too often, and wait until another serves in its place.
    Nothing is asked of the service meanwhile: a worker that hangs would answer late."""
    if not _may_be_lost(name):
        return
    victim, num_lines = target.router_pids()[name], len(target.service.lines)
    os.kill(victim, number)
    _wait_until(lambda: target.router_pids().get(name, victim) != victim, f"{name} that got {number.name}")
    says = "the engine serves" if name == ENGINE else "serving gRPC"
    prefix = "Engine: " if name == ENGINE else f"Router {name.split()[1]}: "

    def serves() -> bool:
        fresh = target.service.lines[num_lines:]
        return any(line.startswith(prefix) and says in line for line in fresh)

    _wait_until(serves, f"the next {name}")


def _may_be_lost(name: str) -> bool:
    """Note a loss, unless the launcher might give up after it."""
    recent, now = _losses[name], time.monotonic()
    while recent and now - recent[0] > WINDOW_S:
        recent.popleft()
    if len(recent) >= MAX_RESTARTS:
        return False
    recent.append(now)
    return True


def _wait_until(condition: Callable[[], bool], awaited: str) -> None:
    deadline = time.monotonic() + RESTART_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {awaited}"
        time.sleep(0.05)


ROUTER_FAULTS = (kill_router_worker, hang_router_worker, kill_engine_process, hang_engine_process)
