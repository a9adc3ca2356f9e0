"""Generates `deployment/components/monitoring/prometheusrule.yaml`: the rules of
`deployment/monitoring/rules.yaml` for the Prometheus operator."""

from pathlib import Path
from textwrap import indent

RULES = Path(__file__).resolve().parent.parent / "deployment" / "monitoring" / "rules.yaml"
HEAD = """\
# Generated from deployment/monitoring/rules.yaml: change it there, and run `make docs`.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: inference-server
  labels:
    app: inference-server
spec:
"""


def render() -> str:
    rules = RULES.read_text()
    return HEAD + indent(rules[rules.index("groups:") :], "  ")
