"""Custom resources have the fields and values that their definitions allow."""

import shutil
from pathlib import Path

import pytest

from integration_tests.deployment.manifests.broken.case import change
from integration_tests.deployment.manifests.custom_resources import (
    OF_SCHEMAS,
    OF_TYPES,
    SCHEMAS,
    refused_by_schemas,
    refused_by_types,
)
from integration_tests.deployment.manifests.rendering import DIRECTORIES, Object, objects_of, written
from tests.support import npm_packages

pytestmark = pytest.mark.deploy

IN_SCHEMAS = [
    ("InferencePool", "spec.targetPortNumber", 3000),
    ("InferenceService", "spec.predictor.model.modelFormats", {}),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.restartPolicy", "Never"),
    ("ServingRuntime", "spec.multiModell", True),
]
IN_TYPES = [
    ("Certificate", "spec.dnsName", ["a"]),
    ("HTTPRoute", "spec.rules.0.backendRef", []),
    ("Issuer", "spec.ca", {"secret": "a"}),
    ("PodMonitor", "spec.podMetricsEndpoints.0.prt", "http"),
    ("PrometheusRule", "spec.groups.0.rules.0.expression", "up"),
    ("ScaledObject", "spec.maxReplicaCount", "8"),
]


@pytest.fixture(scope="module")
def rendered() -> list[Object]:
    return [one for directory in DIRECTORIES for one in objects_of(directory)]


@pytest.fixture(scope="module")
def check_jsonschema() -> str:
    if not SCHEMAS.is_dir():
        pytest.skip(f"NOT CHECKED, no {SCHEMAS}: the objects that have schemas")
    command = shutil.which("check-jsonschema")
    assert command, "make deploy-check installs check-jsonschema"
    return command


@pytest.fixture
def types(tmp_path: Path) -> Path:
    if not npm_packages.has_npm():
        pytest.skip("NOT CHECKED, no npm here: the objects that have types")
    return tmp_path


def test_schemas_allow_them(rendered: list[Object], check_jsonschema: str, tmp_path: Path) -> None:
    assert {*OF_SCHEMAS} <= {one["kind"] for one in rendered}
    assert list(refused_by_schemas(rendered, check_jsonschema, tmp_path)) == []


@pytest.mark.parametrize(("kind", "path", "value"), IN_SCHEMAS)
def test_schemas_refuse_wrong_fields(
    kind: str, path: str, value: object, check_jsonschema: str, tmp_path: Path
) -> None:
    objects = written(
        "kserve/servingruntime.yaml",
        "kserve/inferenceservice.yaml",
        "overlays/inference-pool/inferencepool.yaml",
        "overlays/multi-node/leaderworkerset.yaml",
    )
    objects = [one for one in objects if one["kind"] == kind]
    change(objects, kind, path, value)
    (refusal,) = refused_by_schemas(objects, check_jsonschema, tmp_path)
    assert path.rpartition(".")[2] in refusal


def test_types_allow_them(rendered: list[Object], types: Path) -> None:
    assert {*OF_TYPES} <= {one["kind"] for one in rendered}
    assert refused_by_types(rendered, types) == ""


def test_types_refuse_wrong_values(types: Path) -> None:
    objects = written(
        "components/tls/certificates.yaml",
        "components/monitoring/podmonitor.yaml",
        "components/monitoring/prometheusrule.yaml",
        "components/autoscale-keda/scaledobject.yaml",
        "overlays/inference-pool/httproute.yaml",
    )
    for case in IN_TYPES:
        change(objects, *case)
    refusals = refused_by_types(objects, types)
    assert refusals.count("error TS") == len(IN_TYPES), refusals
    for name in ("dnsName", "backendRef", "secret", "prt", "expression", "string"):
        assert f"'{name}'" in refusals or f"'\"{name}\"'" in refusals, refusals
