"""Components go together: all that do not exclude each other, with a name prefix, a label and a namespace."""

import os
from pathlib import Path

import pytest
import yaml

from integration_tests.deployment.manifests.rendering import DEPLOYMENT, Object, render_path
from integration_tests.deployment.manifests.rules import EVERYWHERE, WITHOUT_WRITING

pytestmark = pytest.mark.deploy

ALWAYS = ("tls", "read-only", "pvc", "shm", "network-policy", "monitoring")
COMPONENTS = {path.parent.name for path in DEPLOYMENT.glob("components/*/kustomization.yaml")}
SELECTED = 'namespace="inference", app="inference-server", model="small"'


def compose(directory: Path, components: list[str], **more: object) -> list[Object]:
    place = Path(os.path.relpath(DEPLOYMENT, directory))
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [str(place / "base")],
        "components": [str(place / "components" / name) for name in components],
        **more,
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return list(yaml.safe_load_all(render_path(directory)))


def problems_of(objects: list[Object]) -> list[str]:
    rules = EVERYWHERE + WITHOUT_WRITING
    return [f"{rule.__name__}: {problem}" for rule in rules for problem in rule(objects)]


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("cpu", "autoscale-hpa"),
        ("autoscale-keda", "gpu-1"),
        ("gpu-2", "autoscale-hpa"),
        ("autoscale-keda", "gpu-8"),
        ("cpu", "openai"),
        ("cpu", "vllm-metrics"),
    ],
)
def test_components_go_together(first: str, last: str, tmp_path: Path) -> None:
    assert problems_of(compose(tmp_path, [first, *ALWAYS, last])) == []


def test_every_component_goes_with_others() -> None:
    assert {
        *ALWAYS,
        "cpu",
        "gpu-1",
        "gpu-2",
        "gpu-8",
        "autoscale-hpa",
        "autoscale-keda",
        "openai",
        "vllm-metrics",
    } == COMPONENTS


def test_services_of_one_namespace_have_distinct_names(tmp_path: Path) -> None:
    """References get the prefix too, also where kustomize needs a configuration for it."""
    asked = [
        {
            "op": "replace",
            "path": f"/spec/triggers/{place}/metadata/query",
            "value": f"sum({name}{{{SELECTED}}})",
        }
        for place, name in enumerate(("tgi_queue_size", "tgi_requests_running"))
    ]
    names = ["small-inference-server", "small-inference-server.inference.svc"]
    called = [{"op": "replace", "path": "/spec/dnsNames", "value": names}]
    objects = compose(
        tmp_path,
        ["cpu", *ALWAYS, "autoscale-keda"],
        namePrefix="small-",
        namespace="inference",
        labels=[{"pairs": {"model": "small"}, "includeSelectors": True}],
        patches=[
            {"target": {"kind": "ScaledObject"}, "patch": yaml.safe_dump(asked)},
            {"target": {"kind": "Certificate", "name": "inference-server"}, "patch": yaml.safe_dump(called)},
        ],
    )
    assert problems_of(objects) == []
    secrets = [one["spec"]["secretName"] for one in objects if one["kind"] == "Certificate"]
    prefixed = [*secrets, *(one["metadata"]["name"] for one in objects)]
    assert all(name.startswith("small-") for name in prefixed)
