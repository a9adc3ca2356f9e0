"""The dashboard and the rules, against promtool, a real Prometheus and a scrape of a real service."""

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from integration_tests.deployment.monitoring.expressions import (
    RULES,
    RULES_TEST,
    Expression,
    alerts,
    dashboard_expressions,
    rule_expressions,
    rules,
)
from integration_tests.deployment.monitoring.watched import Watched
from scripts import dashboard
from scripts.prometheus import promtool as run_promtool

pytestmark = pytest.mark.deploy

FROM_PROMETHEUS = {"up"}  # series that Prometheus adds to a scrape
# Series and labels that do not exist on a CPU or in a service without an HTTP API.
ABSENT = {
    "tgi_steps_by_path_total": {"path"},
    "tgi_replaced_kernels": {"kernel"},
    "tgi_http_api_request_count_total": {"api", "route", "code"},
    "tgi_chat_template_failure_total": {"err"},
}
FROM_TARGETS = {"namespace", "pod", "job", "instance"}  # labels set by a scrape configuration
# Values of labels that do not occur in these tests; each has another test.
RARE = {
    ("err", "generate"): "a defect, or shards that stay away",
    ("err", "timeout"): "a time limit that passes in the queue",
    ("err", "token_timeout"): "needs --first-token-timeout or --next-token-timeout",
    ("err", "queue_timeout"): "needs --max-queue-time",
    ("err", "tenant_limit"): "needs limits of tenants",
    ("err", "slow_reader"): "a client that does not read for a minute",
    ("err", "unauthenticated"): "needs --auth-tokens-path",
    ("code", "5.."): "a defect, or shards that stay away",
}
# Panels that are empty while there are no problems.
EMPTY = {
    "Certificate expires in A": "this service has no certificate",
    "Steps of GPUs per second, by path A": "a CPU computes",
    "Replaced kernels A": "all kernels passed",
    "Responses by status A": "no API is served over HTTP",
    "Responses by route A": "no API is served over HTTP",
    "Failed chat templates A": "no API is served over HTTP",
}
NEVER = "vector(1) > 2"
ALWAYS = 'group without (kind, method, err, le) ({__name__=~"tgi_.+|up"})'
# promtool's warnings about TGIS's names, which its dashboards query.
COMPLAINTS = {
    "no help text": "every series has a help text",
}


def parse(text: str) -> dict[str, Metric]:
    return {
        sample.name: family for family in text_string_to_metric_families(text) for sample in family.samples
    }


def test_promtool_accepts_the_rules(promtool: Path) -> None:
    checked = run_promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stdout
    assert f"{len(rules())} rules found" in checked.stdout


def test_every_alert_fires_and_does_not_fire(promtool: Path) -> None:
    tested = run_promtool("test", "rules", RULES_TEST)
    assert tested.returncode == 0, tested.stdout


@pytest.mark.parametrize("expression", [NEVER, ALWAYS])
def test_a_wrong_expression_fails_the_test_of_its_alert(
    promtool: Path, tmp_path: Path, expression: str
) -> None:
    wrong = yaml.safe_load(RULES.read_text())
    for group in wrong["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                rule["expr"] = expression
    (tmp_path / RULES.name).write_text(yaml.safe_dump(wrong))
    (tmp_path / RULES_TEST.name).write_text(RULES_TEST.read_text())
    tested = run_promtool("test", "rules", tmp_path / RULES_TEST.name)
    assert tested.returncode != 0
    failed = set(re.findall(r'expr: "ALERTS\{alertname=\\"(\w+)\\"', tested.stdout))
    assert failed == {rule["alert"] for rule in alerts()}


def test_alerts_have_a_remedy() -> None:
    for rule in alerts():
        annotations = rule["annotations"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        assert set(annotations) == {"summary", "description", "runbook_url"}, rule["alert"]
        file, _, anchor = annotations["runbook_url"].partition("#")
        assert anchor == rule["alert"].lower()
        assert f"### {rule['alert']}\n" in (RULES.parents[2] / file).read_text()
        assert annotations["description"].endswith("."), rule["alert"]


def test_promtool_accepts_every_expression_of_the_dashboard(promtool: Path, tmp_path: Path) -> None:
    expressions = dashboard_expressions()
    assert len(expressions) > 50
    checked = check_expressions(tmp_path, expressions)
    assert checked.returncode == 0, checked.stdout
    broken = [Expression("broken", expressions[0].text.replace("sum", "sums", 1))]
    assert check_expressions(tmp_path, broken).returncode != 0


def check_expressions(directory: Path, expressions: list[Expression]) -> Any:
    as_rules = [{"record": f"panel:{i}", "expr": one.text} for i, one in enumerate(expressions)]
    file = directory / "expressions.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": as_rules}]}))
    return run_promtool("check", "rules", file)


@pytest.mark.parametrize("expressions", [dashboard_expressions, rule_expressions])
def test_series_labels_and_values_are_those_of_a_scrape(
    watched: Watched, expressions: Callable[[], list[Expression]]
) -> None:
    problems = find_unknown(expressions(), parse(watched.scrape()))
    assert not problems


def test_series_missing_from_scrapes_are_reported(watched: Watched) -> None:
    shown = parse(watched.scrape())
    for text in (
        "sum (tgi_nothing)",
        'tgi_request_count{kind="many"}',
        "sum by (reason) (tgi_request_count)",
    ):
        assert find_unknown([Expression("wrong", text)], shown), text


def find_unknown(expressions: list[Expression], shown: dict[str, Metric]) -> list[str]:
    """Return names and labels that do not exist, and values that neither occur nor are listed above."""
    recorded = {rule["record"]: Expression("", rule["expr"]) for rule in rules() if "record" in rule}
    problems = []
    for one in expressions:
        series = set().union(*(recorded[name].series if name in recorded else {name} for name in one.series))
        problems += [f"{one.where}: {name}" for name in series - set(shown) - FROM_PROMETHEUS - ABSENT.keys()]
        samples = [s for name in series & set(shown) for s in shown[name].samples if s.name == name]
        pairs = {pair for sample in samples for pair in sample.labels.items()}
        labels = {label for label, _ in pairs}.union(FROM_TARGETS, *(ABSENT.get(name, ()) for name in series))
        problems += [f"{one.where}: label {label}" for label in one.labels - labels]
        problems += [
            f"{one.where}: {label}={value}"
            for label, value in one.matchers
            if value != ".*" and (label, value) not in pairs and (label, value) not in RARE
        ]
    return problems


def test_every_panel_shows_something(watched: Watched) -> None:
    for one in dashboard_expressions(rate_interval="10s"):
        result = watched.prometheus.query(one.text)
        assert bool(result) != (one.where in EMPTY), one


def test_variables_list_existing_labels(watched: Watched) -> None:
    for label in dashboard.CHOSEN:
        values = watched.prometheus.query(f"group by ({label}) (tgi_ready)")
        assert [set(one["metric"]) for one in values] == [{label}]


def test_only_expected_alerts_fire(watched: Watched) -> None:
    with urllib.request.urlopen(f"{watched.prometheus.url}/api/v1/rules", timeout=10) as response:
        groups = json.load(response)["data"]["groups"]
    evaluated = [rule for group in groups for rule in group["rules"]]
    assert len(evaluated) == len(rules())
    for rule in evaluated:
        assert rule["health"] == "ok", rule
    firing = [rule["name"] for rule in evaluated if rule.get("state") == "firing"]
    assert firing == ["TgisShardsLost"]


def test_promtool_has_nothing_against_a_scrape(watched: Watched) -> None:
    """promtool has no warning, not even about TGIS's names: series that would be counters have no type."""
    text = watched.scrape()
    checked = run_promtool("check", "metrics", text=text)
    assert (checked.returncode, checked.stdout) == (0, "")
    assert run_promtool("check", "metrics", text=text.replace(" untyped", " counter")).returncode != 0
