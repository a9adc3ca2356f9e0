"""Draws all panels of the dashboard in one picture, from a Prometheus' results of their queries."""

import math
import re
import time
from html import escape
from pathlib import Path
from typing import Any

from scripts.dashboard import CHOSEN, ROWS
from scripts.grafana import Panel, Query
from scripts.prometheus import Prometheus
from scripts.screenshots.browser import screenshot_html
from scripts.screenshots.charts import Line, chart, legend

RATE_INTERVAL, STEP_S = "8s", 1.0
PAGE_WIDTH, PANEL_HEIGHT, ROW_HEIGHT, HEAD_HEIGHT = 1400, 206, 34, 64
MARGIN, GAP, PADDING = 12, 8, 9  # of the page, between panels, in a panel
STYLE = f"""
body {{ margin: 0; padding: {MARGIN}px; background: #111217; color: #ccccdc; }}
body {{ font: 12px "DejaVu Sans", sans-serif; }}
h1 {{ font-size: 17px; margin: 4px 0 2px; }} p {{ margin: 0 0 8px; color: #8e8e9c; }}
h2 {{ font-size: 14px; margin: 0; height: {ROW_HEIGHT - 6}px; padding-top: 6px; box-sizing: border-box; }}
div.row {{ display: grid; grid-auto-columns: 1fr; grid-auto-flow: column; gap: {GAP}px; }}
div.panel {{ background: #181b1f; border: 1px solid #2c3036; height: {PANEL_HEIGHT - GAP}px; overflow: hidden;
  padding: 6px {PADDING - 1}px; box-sizing: border-box; }}
b {{ font-weight: 600; }} svg {{ display: block; margin-top: 6px; }}
svg text {{ font-size: 10px; fill: #8e8e9c; }}
.grid {{ stroke: #2c3036; }} span {{ margin-right: 12px; font-size: 10.5px; white-space: nowrap; }}
i {{ display: inline-block; width: 12px; height: 3px; margin: 0 4px 3px 0; }}
"""
CAPTION = (
    "The queries of deployment/monitoring/dashboard.json, answered by Prometheus for a small model under "
    "load. Drawn by scripts/screenshots, not by Grafana; a shard is killed at 1:10."
)


def draw_dashboard(prometheus: Prometheus, began_at: float, picture: Path) -> None:
    """Query the time from the beginning of the load until now."""
    rows = []
    end = time.time()
    for row in ROWS:
        num = len(row.panels)
        width = (PAGE_WIDTH - 2 * MARGIN - (num - 1) * GAP) / num - 2 * PADDING
        panels = "".join(_panel(panel, width, prometheus, began_at, end) for panel in row.panels)
        rows.append(f'<h2>{escape(row.title)}</h2><div class="row">{panels}</div>')
    html = f"<style>{STYLE}</style><h1>TGIS-next</h1><p>{escape(CAPTION)}</p>{''.join(rows)}"
    height = HEAD_HEIGHT + len(ROWS) * (PANEL_HEIGHT - GAP + ROW_HEIGHT) + MARGIN
    screenshot_html(html, picture, PAGE_WIDTH, height)


def _panel(panel: Panel, width: float, prometheus: Prometheus, begin: float, end: float) -> str:
    lines = [line for query in panel.queries for line in _lines(query, prometheus, begin, end)]
    drawn = chart(lines, width, end - begin, panel.unit, panel.is_stacked)
    return f'<div class="panel"><b>{escape(panel.title)}</b>{drawn}{legend(lines)}</div>'


def _lines(query: Query, prometheus: Prometheus, begin: float, end: float) -> list[Line]:
    expression = query.expression.replace("$__rate_interval", RATE_INTERVAL)
    for name in CHOSEN:
        expression = expression.replace(f"${name}", ".*")
    series = prometheus.query_range(expression, begin, end, STEP_S)
    return [Line(_legend(query, one["metric"]), _points(one["values"], begin)) for one in series]


def _legend(query: Query, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), query.legend)


def _points(values: list[list[Any]], begin: float) -> list[tuple[float, float]]:
    points = [(float(at) - begin, float(text)) for at, text in values]
    return [(at, value) for at, value in points if math.isfinite(value)]
