"""Reports the results of the traffic, and leaked resources."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from integration_tests.chaos.tally import Tally

SHOWN = 5  # losses


@dataclass(frozen=True)
class Report:
    seed: int
    seconds: float
    tally: Tally
    faults: Counter[str]
    restarts: int
    resumed: int
    left: dict[str, float]
    """Differences from the state before the traffic."""
    slopes: dict[str, float]
    """Growth of memory, in bytes per second."""
    exit_code: int
    trouble: str
    """Reason why the run ended early."""

    @property
    def is_good(self) -> bool:
        tally = self.tally
        is_bad = tally.lost or tally.wrong or self.left or self.exit_code or self.trouble
        return not is_bad and tally.answered > 0

    def __str__(self) -> str:
        tally = self.tally
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        slopes = ", ".join(f"{name} {value * 60 / 1e6:+.2f}" for name, value in self.slopes.items())
        left = ", ".join(f"{name} {value:+g}" for name, value in sorted(self.left.items()))
        broken = f", {tally.broken} ended with their router worker" * bool(tally.broken)
        ends = f"{tally.answered} answered, {tally.cancelled} cancelled, {tally.refused} refused by overload"
        counts = f"{tally.sent} sent, {ends}{broken}"
        lines = [
            f"chaos with seed {self.seed}, {self.seconds:.0f} s of faults",
            f"requests: {counts}, {len(tally.lost)} lost, {len(tally.wrong)} answered wrongly",
            f"faults: {self.faults.total()} ({faults})",
            f"shards: lost {self.restarts} times; {self.resumed} requests resumed",
            f"longest pause of a request: {tally.longest_pause_s:.1f} s",
            f"left behind: {left or 'nothing'}; exit code {self.exit_code}",
            f"memory, MB a minute in the later half: {slopes}",
            *(f"lost: {text}" for text in tally.lost[:SHOWN]),
            *(f"wrong: {text}" for text in tally.wrong[:SHOWN]),
            *([f"ended early: {self.trouble}"] * bool(self.trouble)),
            "passed" if self.is_good else "FAILED",
        ]
        return "\n".join(lines)


def read_resumed(lines: Iterable[str]) -> int:
    """Return the number of requests that resumed after a loss of the shards or of the engine process, from
    the router's output."""
    matches = (re.search(r"requests to resume: (\d+)", line) for line in lines)
    return sum(int(each[1]) for each in matches if each)
