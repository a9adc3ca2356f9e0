"""Parses the expressions of the dashboard and of the rules, with their series and labels."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).parents[3] / "deployment" / "monitoring"
DASHBOARD, RULES, RULES_TEST = (
    MONITORING / name for name in ("dashboard.json", "rules.yaml", "rules_test.yaml")
)
WORDS = set(
    "sum by rate increase histogram_quantile and or unless on ignoring max_over_time last_over_time "
    "without bool scalar".split()
)  # functions and keywords of PromQL that we use
MATCHER = re.compile(r"(\w+)\s*(=~|!=|!~|=)\s*\"([^\"]*)\"")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
LABELLED = re.compile(r"\{[^}]*\}")


@dataclass(frozen=True)
class Expression:
    """Text that Prometheus gets, and its location."""

    where: str
    text: str

    @cached_property
    def series(self) -> set[str]:
        """Return the names of series: all words that are not PromQL's."""
        bare = GROUPING.sub(" ", LABELLED.sub(" ", self.text))
        bare = re.sub(r"\[[^\]]*\]", " ", bare)
        return set(re.findall(r"(?<![\w:.])[a-zA-Z_][\w:]*", bare)) - WORDS

    @property
    def matchers(self) -> list[tuple[str, str]]:
        """Yield label and value, once for each alternative of a regular expression."""
        matches = [
            (label, value)
            for part in LABELLED.findall(self.text)
            for label, _, value in MATCHER.findall(part)
        ]
        return [(label, one) for label, value in matches for one in value.split("|")]

    @property
    def labels(self) -> set[str]:
        grouped = {word.strip() for part in GROUPING.findall(self.text) for word in part.split(",")}
        return grouped | {label for label, _ in self.matchers}


def substitute(text: str, rate_interval: str) -> str:
    """Replace the variables, as Grafana does if everything is selected."""
    text = text.replace("$__rate_interval", rate_interval)
    return re.sub(r"\$(namespace|pod|instance)\b", ".*", text)


def dashboard_expressions(rate_interval: str = "4s") -> list[Expression]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        Expression(f"{panel['title']} {target['refId']}", substitute(target["expr"], rate_interval))
        for panel in panels
        for target in panel.get("targets", [])
    ]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def rule_expressions() -> list[Expression]:
    return [Expression(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
