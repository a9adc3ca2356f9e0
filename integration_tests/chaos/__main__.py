"""`python -m integration_tests.chaos`: run traffic under random faults, reproducible by the seed, and report
the result.

The exit status is 1 if a request was lost or a resource leaked."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import grpc

from bench.service import BenchError
from integration_tests.chaos.attackers import ATTACKS
from integration_tests.chaos.faults import FATAL, OTHERS, Fault
from integration_tests.chaos.memory import Watch
from integration_tests.chaos.report import Report, read_resumed
from integration_tests.chaos.router_faults import ROUTER_FAULTS, is_possible
from integration_tests.chaos.tally import count
from integration_tests.chaos.target import SHARDS, Target
from integration_tests.chaos.traffic import Traffic, make_parties
from tests.support.accounts import take_baseline

# Processes that start on demand: two that compile constraints, and the second of those that
# render chats.
PIPES = 6
LAST_LINES = 60  # of the service that are printed if it cannot be reached after the faults
PAUSE_S = 1.0  # between two faults


def main() -> None:
    options = argparse.ArgumentParser("chaos", description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0, help="how long there are faults")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--workers", type=int, default=1, help="router workers of the service")
    options.add_argument("--log", type=Path, help="file for what the service prints")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        report = run(Path(directory), given.minutes * 60, given.seed, given.workers, given.log)
    print(report)
    sys.exit(not report.is_good)


def run(directory: Path, seconds: float, seed: int, num_workers: int, log: Path | None = None) -> Report:
    target = Target(directory, num_workers)
    try:
        return _run(target, seconds, seed)
    except OSError:
        print(*target.service.output.splitlines()[-LAST_LINES:], sep="\n")
        raise
    finally:
        target.end()
        if log is not None:
            log.write_text(target.service.output + "\n")


def _run(target: Target, seconds: float, seed: int) -> Report:
    random = Random(seed)
    with Traffic(target, make_parties(seed)) as traffic:
        traffic.learn()
        baseline = take_baseline(target.service.http)
        baseline["tgi_open_descriptors"] += PIPES * target.num_workers
        watch = Watch(target.processes)
        faults: Counter[str] = Counter()
        trouble = ""
        traffic.begin()
        try:
            _do_faults(target, random, time.monotonic() + seconds, faults)
        except (AssertionError, OSError, BenchError, grpc.RpcError) as error:
            trouble = f"{type(error).__name__}: {error}"
        finally:
            slopes = watch.end()
            tally = count(traffic.end(), target.breaks)
    left = target.wait_until_settled(baseline)
    restarts = target.num_losses
    exit_code = target.end()
    resumed = read_resumed(target.service.lines)
    return Report(seed, seconds, tally, faults, restarts, resumed, left, slopes, exit_code, trouble)


def _do_faults(target: Target, random: Random, end: float, begun: Counter[str]) -> None:
    """Cause the faults one after the other, each on a ready service."""
    fatal = _deal(random, FATAL)
    others = _deal(random, *([ROUTER_FAULTS] * (target.num_workers > 1)), OTHERS + ATTACKS)
    while time.monotonic() < end:
        target.note_shard_losses()
        may_kill = target.losses.may_happen(SHARDS) and random.random() < 0.3
        fault = next(fatal) if may_kill else next(fault for fault in others if is_possible(fault, target))
        print(
            f"{max(0.0, end - time.monotonic()):5.0f} s left: {fault.__name__}", file=sys.stderr, flush=True
        )
        begun[fault.__name__] += 1
        fault(target, random)
        target.wait_until_ready()
        time.sleep(PAUSE_S * random.random())


def _deal(random: Random, *groups: Sequence[Fault]) -> Iterator[Fault]:
    """Yield the faults repeatedly, one group after the other, each time in a new order."""
    while True:
        for group in groups:
            yield from random.sample(group, len(group))


if __name__ == "__main__":
    main()
