"""Shows a measurement while it runs: a table that is updated on a terminal, or a line per run."""

import sys
import time
from collections import deque
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tgis.load.campaign import CampaignListener, Level
from tgis.load.figures import Figures
from tgis.load.statistics import make_bins, quantile

BARS = " ▁▂▃▄▅▆▇█"
NUM_BARS = 24  # with the other columns, less than 80 characters
KEPT = 5000  # latencies of the running run that are shown
NOTHING = "–"
REFRESHES_PER_S = 4


class LineListener(CampaignListener):
    """Prints a line at the end of each level, to stderr."""

    def end(self, level: Level, figures: Figures) -> None:
        rates = _shown(figures["requests_per_s"], figures["output_tokens_per_s"])
        print(f"{level.label}: {', '.join(rates)}", file=sys.stderr, flush=True)


class LiveListener(CampaignListener):
    """Draws the running run and the levels before it. Use it in a `with` block."""

    def __init__(self, console: Console | None = None) -> None:
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
        self._latencies: dict[str, deque[float]] = {name: deque(maxlen=KEPT) for name in ("first", "token")}

    def begin(self, level: Level, repeat: int) -> None:
        self._title = f"{level.label}, run {repeat + 1}" if repeat else level.label
        self._reset()

    def progress(self, fields: dict[str, Any]) -> None:
        new = fields["progress"]
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
        seconds = max(time.monotonic() - self._began, 1e-9)
        rates = _shown(self._counts["done"] / seconds, self._counts["tokens"] / seconds)
        table.add_row(Text(self._title, style="bold"), *rates, f"{seconds:.0f} s, {self._num_open} open")
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
