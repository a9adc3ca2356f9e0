"""Draws lines over time as SVG, for a picture of a dashboard's query results."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

HEIGHT = 128  # of the drawing
LEFT, BOTTOM, TOP = 54, 18, 6  # positions of the axes' texts
COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#37872d")
GAP_S = 2.5  # seconds without a point after which a line is broken
NUM_LINES = 4  # of the grid
MAX_LEGEND = 7


@dataclass(frozen=True)
class Line:
    legend: str
    points: Sequence[tuple[float, float]]
    """Points of a line: seconds since the beginning, value."""


def chart(lines: Sequence[Line], width: float, seconds: float, unit: str, is_stacked: bool) -> str:
    if is_stacked:
        lines = _stacked(lines)
    top = _round_up(max((value for line in lines for _, value in line.points), default=0.0))
    grid = "".join(_grid_line(i / NUM_LINES, width, top, unit) for i in range(NUM_LINES + 1))
    times = "".join(_time(at, width, seconds) for at in range(0, int(seconds) + 1, 30))
    drawn = list(zip(lines, COLOURS * 3, strict=False))
    if is_stacked:
        drawn = drawn[::-1]  # the highest is behind the others
    paths = "".join(_path(line, colour, width, seconds, top, is_stacked) for line, colour in drawn)
    return f'<svg width="{width}" height="{HEIGHT}">{grid}{times}{paths}</svg>'


def legend(lines: Sequence[Line]) -> str:
    shown = list(zip(lines, COLOURS * 3, strict=False))[:MAX_LEGEND]
    return "".join(
        f'<span><i style="background:{colour}"></i>{escape(line.legend)}</span>' for line, colour in shown
    )


def _stacked(lines: Sequence[Line]) -> list[Line]:
    below: dict[float, float] = {}
    stacked = []
    for line in lines:
        points = [(at, value + below.get(at, 0.0)) for at, value in line.points]
        below |= dict(points)
        stacked.append(Line(line.legend, points))
    return stacked


def _round_up(value: float) -> float:
    """Round up to a number that divides well; 1 for 0."""
    if value <= 0:
        return 1.0
    size = 1e-9
    while size * 10 <= value:
        size *= 10
    return next(size * step for step in (1, 2, 4, 8, 10, 20) if size * step >= value)


def _x(at: float, width: float, seconds: float) -> float:
    return LEFT + (width - LEFT - 12) * at / seconds


def _y(share: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def _grid_line(share: float, width: float, top: float, unit: str) -> str:
    y = _y(share)
    return (
        f'<line x1="{LEFT}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        f'<text x="{LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{escape(in_unit(share * top, unit))}</text>'
    )


def _time(at: int, width: float, seconds: float) -> str:
    text = f"{at // 60}:{at % 60:02}"
    return f'<text x="{_x(at, width, seconds):.1f}" y="{HEIGHT - 4}" text-anchor="middle">{text}</text>'


def _path(line: Line, colour: str, width: float, seconds: float, top: float, is_filled: bool) -> str:
    places = [(_x(at, width, seconds), _y(value / top)) for at, value in line.points]
    if not places:
        return ""
    ats = [at for at, _ in line.points]
    moves = ["M"] + ["M" if at - before > GAP_S else "L" for before, at in pairwise(ats)]
    drawn = "".join(f"{move}{x:.1f},{y:.1f}" for move, (x, y) in zip(moves, places, strict=True))
    path = f'<path d="{drawn}" fill="none" stroke="{colour}" stroke-width="1.4"/>'
    if is_filled and "M" not in moves[1:]:
        area = f"{drawn}L{places[-1][0]:.1f},{_y(0):.1f}L{places[0][0]:.1f},{_y(0):.1f}Z"
        path = f'<path d="{area}" fill="{colour}" opacity="0.45"/>{path}'
    return path


def in_unit(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s":
        return f"{value:.4g} s" if value >= 1 or not value else f"{value * 1000:.4g} ms"
    if unit == "decbytes":
        return f"{value / 1e6:.3g} MB"
    return f"{value:.4g}" + ("/s" if unit in ("reqps", "ops") else "")
