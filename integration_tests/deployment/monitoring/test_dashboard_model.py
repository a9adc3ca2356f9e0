"""The dashboard against Grafana's own model in grafana-foundation-sdk."""

import json
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from integration_tests.deployment.monitoring.expressions import DASHBOARD

pytestmark = pytest.mark.deploy
UNKNOWN = {"definition"}  # fields of Grafana's editor for a variable's query; not part of the model


def lost(written: Any, read: Any, path: str = "") -> list[str]:
    """Return the differences from the model."""
    if isinstance(written, dict):
        keys = [key for key in written if key not in UNKNOWN]
        if not isinstance(read, dict):
            return [path]
        return [one for key in keys for one in lost(written[key], read.get(key), f"{path}/{key}")]
    if isinstance(written, list):
        if not isinstance(read, list) or len(read) != len(written):
            return [path]
        return [one for i, part in enumerate(written) for one in lost(part, read[i], f"{path}/{i}")]
    return [] if written == read else [path]


def test_grafanas_model_knows_all_of_the_dashboard() -> None:
    def through_the_model(dashboard: Any) -> Any:
        return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))

    register_default_plugins()
    written = json.loads(DASHBOARD.read_text())
    assert not lost(written, through_the_model(written))
    written["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
    assert lost(written, through_the_model(written)) == ["/panels/1/fieldConfig/defaults/units"]
