"""The OpenTelemetry example: with its variables, a real service's spans reach a real receiver, and its ports
match at both ends."""

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    add_TraceServiceServicer_to_server,
)

from integration_tests.support.served_models import FLAGS, write_bytes
from integration_tests.support.service import launch
from tests.support.trace_collector import Collector
from tgis.config.option import variables_of
from tgis.config.processes import LauncherConfig
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub
from tgis.router.requests.otlp import DEFAULT_PORT

pytestmark = pytest.mark.deploy
DEPLOYMENT = Path(__file__).parents[3] / "deployment"
EXAMPLE = DEPLOYMENT / "monitoring" / "opentelemetry"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def container_of(deployment: Any) -> Any:
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    return container


@pytest.fixture
def variables() -> dict[str, str]:
    env = container_of(read(EXAMPLE / "deployment.yaml"))["env"]
    return {one["name"]: one["value"] for one in env}


@pytest.fixture
def collector() -> Iterator[tuple[Collector, int]]:
    server, servicer = grpc.server(ThreadPoolExecutor(2)), Collector()
    add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, port
    server.stop(None).wait()


def test_the_ports_are_those_of_either_end(variables: dict[str, str]) -> None:
    collector = read(EXAMPLE / "collector.yaml")
    listening = urlsplit("//" + collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]).port
    assert urlsplit(variables["OTLP_ENDPOINT"]).port == listening == DEFAULT_PORT
    [job] = collector["receivers"]["prometheus"]["config"]["scrape_configs"]
    annotations = read(DEPLOYMENT / "base" / "deployment.yaml")["spec"]["template"]["metadata"]["annotations"]
    assert job["metrics_path"] == annotations["prometheus.io/path"]
    base = read(DEPLOYMENT / "base" / "deployment.yaml")
    app, port_name = job["relabel_configs"][0]["regex"].split(";")
    assert base["metadata"]["labels"]["app"] == app
    ports = {one["name"]: one["containerPort"] for one in container_of(base)["ports"]}
    assert ports[port_name] == LauncherConfig.__dataclass_fields__["port"].default


def test_pipelines_name_declared_components() -> None:
    collector = read(EXAMPLE / "collector.yaml")
    for pipeline in collector["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= set(collector[kind])


def test_the_variables_bring_spans_to_a_receiver(
    variables: dict[str, str], collector: tuple[Collector, int], tmp_path: Path
) -> None:
    assert set(variables) <= set(variables_of(LauncherConfig))
    servicer, port = collector
    here = urlsplit(variables["OTLP_ENDPOINT"])._replace(netloc=f"127.0.0.1:{port}").geturl()
    served = write_bytes(tmp_path / "model")
    service = launch(served.directory, *FLAGS, env={**variables, "OTLP_ENDPOINT": here})
    try:
        with service.wait_until_serving().channel() as channel:
            requests = [pb.GenerationRequest(text="a")]
            GenerationServiceStub(channel).Generate(pb.BatchedGenerationRequest(requests=requests))
    finally:
        assert service.end() == 0, service.output
    assert [span.name for span in servicer.spans] == ["fmaas.GenerationService/Generate"]
    assert servicer.resource["service.name"] == variables["OTLP_SERVICE_NAME"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="NOTICE: no kubectl to render with")
def test_the_component_patches_the_base(variables: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(DEPLOYMENT, tmp_path / "deployment")
    overlay = tmp_path / "deployment" / "overlays" / "traced"
    overlay.mkdir(parents=True)
    parts = {"resources": ["../../base"], "components": ["../../monitoring/opentelemetry"]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(parts))
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=True
    ).stdout
    [deployment] = [one for one in yaml.safe_load_all(rendered) if one["kind"] == "Deployment"]
    env = {one["name"]: one.get("value") for one in container_of(deployment)["env"]}
    assert variables.items() <= env.items()
