"""Draws plots as SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 42
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1")
NUM_TICKS = 5


@dataclass(frozen=True)
class PlotSeries:
    """Line of a plot."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class PlotFrame:
    """Plot area. Its vertical axis begins at 0."""

    title: str
    x_title: str
    x_ticks: Sequence[tuple[float, str]]
    """Places, as shares of the width, and their numbers."""
    y_max: float

    def x(self, share: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.y_max

    def wrap(self, content: str) -> str:
        middle = (LEFT + WIDTH) // 2
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">'
            f'<text x="{LEFT}" y="18" class="title">{escape(self.title)}</text>'
            f"{self._axes()}{content}"
            f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self.x_title)}</text></svg>'
        )

    def _axes(self) -> str:
        parts = []
        for value in ticks(self.y_max):
            y = self.y(value)
            parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="grid"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        for share, text in self.x_ticks:
            place = f'x="{self.x(share):.1f}" y="{HEIGHT - BOTTOM + 16}"'
            parts.append(f'<text {place} text-anchor="middle">{text}</text>')
        return "".join(parts)


def ticks(maximum: float) -> list[float]:
    """Return round numbers from 0 up to the maximum, at most NUM_TICKS + 1 of them."""
    raw = maximum / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    return [step * index for index in range(int(maximum / step * (1 + 1e-9)) + 1)]


def draw_lines(title: str, x_title: str, lines: Sequence[PlotSeries]) -> str:
    """Return a plot of lines, or nothing if there are no points."""
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    x_max = max(x for x, _ in points) * 1.05 or 1.0
    y_max = max(y for _, y in points) * 1.1 or 1.0
    frame = PlotFrame(title, x_title, [(x / x_max, f"{x:.4g}") for x in ticks(x_max)], y_max)
    return frame.wrap(
        "".join(_draw_line(frame, index, line, x_max) for index, line in enumerate(lines) if line.points)
    )


def _draw_line(frame: PlotFrame, index: int, line: PlotSeries, x_max: float) -> str:
    colour = COLOURS[index % len(COLOURS)]
    places = [(frame.x(x / x_max), frame.y(y)) for x, y in sorted(line.points)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    circles = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)
    place = f'x="{LEFT + 8}" y="{TOP + 12 + 14 * index}"'
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{circles}'
        f'<text {place} style="fill:{colour}">{escape(line.name)}</text>'
    )


def draw_histogram(title: str, edges: Sequence[float], counts: Sequence[int]) -> str:
    """Return a histogram of seconds in bins of the same logarithmic width, or nothing if it has one bin."""
    if len(counts) < 2:
        return ""
    ratio = edges[-1] / edges[0]
    shares = [index / (NUM_TICKS - 1) for index in range(NUM_TICKS)]
    numbers = [(share, f"{edges[0] * ratio**share * 1000:.3g}") for share in shares]
    frame = PlotFrame(title, "milliseconds, logarithmic", numbers, max(counts))
    width = (WIDTH - LEFT - RIGHT) / len(counts)
    bars = (
        f'<rect x="{frame.x(index / len(counts)):.1f}" y="{frame.y(count):.1f}" width="{width - 1:.1f}" '
        f'height="{HEIGHT - BOTTOM - frame.y(count):.1f}" fill="{COLOURS[0]}"/>'
        for index, count in enumerate(counts)
        if count
    )
    return frame.wrap("".join(bars))
