"""Builds a dashboard in Grafana's format: rows of panels with queries of one unit over time. The output is
deterministic."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 39  # of Grafana 10.4 and later
WIDTH, HEIGHT = 24, 8  # of the grid, and of a panel
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    """Grafana's name of the unit: s, reqps, percentunit, decbytes, ..."""
    queries: Sequence[Query]
    help: str = ""
    is_stacked: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Variable:
    """Variable that selects any number of a label's values."""

    name: str
    series: str
    """Query whose results have the label's values."""


def render(title: str, uid: str, variables: Sequence[Variable], rows: Sequence[Row]) -> str:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        panels.append(_row(row, len(panels) + 1, y))
        y += 1
        width = WIDTH // len(row.panels)
        for i, panel in enumerate(row.panels):
            place = {"x": i * width, "y": y, "w": width, "h": HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
        y += HEIGHT
    dashboard = {
        "uid": uid,
        "title": title,
        "tags": ["tgis"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source_variable(), *map(_variable, variables)]},
        "panels": panels,
    }
    return json.dumps(dashboard, indent=1) + "\n"


def _row(row: Row, number: int, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
    return {
        "id": number,
        "type": "row",
        "title": row.title,
        "collapsed": False,
        "gridPos": place,
        "panels": [],
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.is_stacked else "none", "group": "A"}
    custom = {
        "lineWidth": 1,
        "fillOpacity": 30 if panel.is_stacked else 5,
        "showPoints": "never",
        "stacking": stacking,
    }
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [_target(query, i) for i, query in enumerate(panel.queries)],
    }


def _target(query: Query, index: int) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": SOURCE,
        "expr": query.expression,
        "legendFormat": query.legend,
        "range": True,
    }


def _source_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
    }


def _variable(variable: Variable) -> dict[str, Any]:
    """Return the variable in Grafana's format. All also selects series without the label."""
    text = f"label_values({variable.series}, {variable.name})"
    return {
        "name": variable.name,
        "type": "query",
        "datasource": SOURCE,
        "definition": text,
        "query": {"query": text, "refId": f"values of {variable.name}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"], "selected": True},
    }
