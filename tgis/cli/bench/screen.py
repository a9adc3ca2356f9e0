"""Shows a measurement while it runs: a table that is updated on a terminal, or a line every few seconds."""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tgis.load.campaign import SWEEP_SHARES, BenchPlan, CampaignListener, Level
from tgis.load.figures import Figures
from tgis.load.statistics import make_bins, quantile

BARS = " ▁▂▃▄▅▆▇█"
NUM_BARS = 24  # with the other columns, less than 80 characters
KEPT = 5000  # latencies of the running run that are shown
NOTHING = "–"
REFRESHES_PER_S = 4
LINE_S = 5.0  # between two lines where there is no terminal


class LineListener(CampaignListener):
    """Prints how long the measurement takes, a line every few seconds, and one at the end of each level, to
    stderr."""

    def __init__(self, plan: BenchPlan, clock: Callable[[], float] = time.monotonic) -> None:
        self._plan = plan
        self._clock = clock
        self._is_announced = False
        self._title = ""
        self._began: float | None = None
        self._next = 0.0
        self._num_answers = 0

    def begin(self, level: Level, repeat: int) -> None:
        if not self._is_announced:
            _print_line(f"{describe_length(self._plan)}, each after a warm-up")
            self._is_announced = True
        self._title = _title_of(level, repeat)
        self._began = None
        self._num_answers = 0

    def progress(self, fields: dict[str, Any]) -> None:
        now = self._clock()
        self._num_answers += fields["progress"]["done"]
        if self._began is None:
            self._began, self._next = now, now + LINE_S
        if now >= self._next:
            elapsed = _describe_elapsed(now - self._began, self._plan)
            _print_line(f"{self._title}: {elapsed}, {self._num_answers} answers")
            self._next = now + LINE_S

    def end(self, level: Level, figures: Figures) -> None:
        rates = _shown(figures["requests_per_s"], figures["output_tokens_per_s"])
        _print_line(f"{level.label}: {', '.join(rates)}")


def describe_length(plan: BenchPlan) -> str:
    """Return how many runs a measurement has, and how long they take."""
    num_levels = len(plan.levels) + (len(SWEEP_SHARES) if plan.is_sweep else 0)
    num_runs = num_levels * plan.num_repeats
    runs = "1 run" if num_runs == 1 else f"{num_runs} runs"
    or_more = " or more" if plan.precision else ""
    if plan.duration_s is None:
        length = f" of {plan.num_requests} conversations" if plan.num_requests else ""
        return f"{runs}{or_more}{length}"
    total = f": {num_runs * plan.duration_s:g} s{or_more}" if num_runs > 1 else ""
    return f"{runs}{or_more} of {plan.duration_s:g} s{total}"


def _describe_elapsed(seconds: float, plan: BenchPlan) -> str:
    limit = "" if plan.duration_s is None else f" of {plan.duration_s:g}"
    return f"{seconds:.0f}{limit} s"


def _title_of(level: Level, repeat: int) -> str:
    return f"{level.label}, run {repeat + 1}" if repeat else level.label


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class LiveListener(CampaignListener):
    """Draws the running run and the levels before it. Use it in a `with` block."""

    def __init__(self, plan: BenchPlan, console: Console | None = None) -> None:
        self._plan = plan
        self._done: list[tuple[str, Figures]] = []
        self._title = "connecting"
        self._reset()
        self._live = Live(
            console=console or Console(stderr=True),
            refresh_per_second=REFRESHES_PER_S,
            get_renderable=self.draw,
        )

    def __enter__(self) -> "LiveListener":
        self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def _reset(self) -> None:
        self._began = time.monotonic()
        self._counts = {"done": 0, "failed": 0, "tokens": 0}
        self._num_open = 0
        self._is_warming_up = True
        self._latencies: dict[str, deque[float]] = {name: deque(maxlen=KEPT) for name in ("first", "token")}

    def begin(self, level: Level, repeat: int) -> None:
        self._title = _title_of(level, repeat)
        self._reset()

    def progress(self, fields: dict[str, Any]) -> None:
        new = fields["progress"]
        if self._is_warming_up:
            self._is_warming_up = False
            self._began = time.monotonic()
        for name in self._counts:
            self._counts[name] += new[name]
        for name, latencies in self._latencies.items():
            latencies.extend(new[name])
        self._num_open = fields["open"]

    def end(self, level: Level, figures: Figures) -> None:
        self._done.append((level.label, figures))
        self._title = ""

    def draw(self) -> Table:
        """Return the frame: finished levels, then the running one."""
        table = Table.grid(padding=(0, 2))
        for label, figures in self._done:
            table.add_row(label, *_shown(figures["requests_per_s"], figures["output_tokens_per_s"]), "done")
        if self._title:
            self._add_running(table)
        return table

    def _add_running(self, table: Table) -> None:
        if self._is_warming_up:
            table.add_row(Text(self._title, style="bold"), describe_length(self._plan), "warming up")
            return
        seconds = max(time.monotonic() - self._began, 1e-9)
        elapsed = _describe_elapsed(seconds, self._plan)
        rates = _shown(self._counts["done"] / seconds, self._counts["tokens"] / seconds)
        table.add_row(Text(self._title, style="bold"), *rates, f"{elapsed}, {self._num_open} open")
        table.add_row("  answers", f"{self._counts['done']} done", f"{self._counts['failed']} failed")
        for name, title in (("first", "first token"), ("token", "per token")):
            table.add_row(f"  {title}", *_draw_latencies(sorted(self._latencies[name])))


def _shown(requests_per_s: float, tokens_per_s: float) -> tuple[str, str]:
    return f"{requests_per_s:.2f} requests/s", f"{tokens_per_s:.1f} tokens/s"


def _draw_latencies(ordered: list[float]) -> tuple[str, str, str]:
    """Return the median, the 99th percentile and a histogram of bars."""
    if not ordered:
        return NOTHING, NOTHING, ""
    counts = make_bins(ordered, NUM_BARS).counts
    highest = max(counts)
    bars = "".join(BARS[-(-count * (len(BARS) - 1) // highest)] for count in counts)
    p50, p99 = (
        f"{name} {quantile(ordered, share) * 1000:.1f} ms" for name, share in (("p50", 0.5), ("p99", 0.99))
    )
    return p50, p99, bars
