"""Tests the registry's descriptions of APIs, and an additional API known only to the registry."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http_exchange import HttpReply, exchange
from tests.support.processes import Service
from tests.support.router.http_port import metric
from tests.support.router.router_process import Setup, router_command, start_router, stop_router
from tgis.config.network import PortOptions
from tgis.config.processes import COMPAT
from tgis.router.api import registry

MODULE = "tests.support.router.toy_router"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    flags = ("--http-api", "toy", "--json-output", "--served-model-name", "m")
    setup = start_router(tmp_path_factory.mktemp("router"), 1, *flags, module=MODULE)
    yield setup
    assert stop_router(setup) == 0, setup.service.output


def play(router: Setup, **fields: object) -> HttpReply:
    return exchange(f"{router.http}/toy/play", {"text": "a b c", **fields})


def test_a_further_api_is_served_by_its_own_rules(router: Setup) -> None:
    reply = play(router, heat=0.25)
    assert (reply.status, reply.json["tokens"]) == (200, 3), reply.text
    body = {"text": "a b c"}
    reply = exchange(f"{router.http}/toy/play", body, {"endpoint-load-metrics-format": "TEXT"})
    assert reply.headers["endpoint-load-metrics"].startswith("TEXT named_metrics.kv_cache_usage_perc=")
    reply = play(router, heat=1.75)
    assert (reply.status, reply.text) == (418, "toy: a toy must not get hot")


def test_a_further_api_has_its_form_of_errors(router: Setup) -> None:
    reply = exchange(f"{router.http}/toy/nothing")
    assert (reply.status, reply.text) == (404, "toy: there is no such path in this API")
    reply = exchange(f"{router.http}/v1/nothing")
    assert (reply.status, reply.json["error"]["type"]) == (404, "invalid_request_error")


def test_a_further_api_is_logged_and_counted_under_its_name(router: Setup) -> None:
    counted = 'tgi_http_api_request_count_total{api="toy",code="200",route="/toy/play"}'
    before = metric(router, counted)
    assert exchange(f"{router.http}/toy/play", {"text": "d"}, {"x-request-id": "mine"}).status == 200
    assert metric(router, counted) == before + 1
    lines = [json.loads(line) for line in router.service.output.splitlines()]
    [line] = [line for line in lines if line.get("correlation_id") == "mine"]
    assert (line["api"], line["method"], line["output_tokens"]) == ("toy", "Play", 3)


def test_a_further_api_is_described_and_lends_its_placeholders(router: Setup) -> None:
    """OpenAI's API is served beside every other API."""
    paths = exchange(f"{router.http}/openapi.json").json["paths"]
    assert paths["/toy/play"]["post"]["responses"]["418"]["description"] == "A field is wrong."
    body = {"model": "doll", "prompt": "a", "max_tokens": 1}
    assert exchange(f"{router.http}/v1/completions", body).json["model"] == "m"


def test_the_command_line_knows_the_names_of_the_registry(tmp_path: Path) -> None:
    service = Service(router_command(tmp_path, "--http-api", "toys"), module=MODULE)
    assert service.process.wait(30) == service.end() == 1
    assert "http_api: toys is not one of toy, lmi, tgi, openai" in service.output


def test_names_are_unique_and_each_kind_of_option_names_can_be_asked_for() -> None:
    names = [each.name for each in registry.INTERFACES]
    assert len(set(names)) == len(names)
    assert sorted(each.name for each in registry.option_names()) == sorted(COMPAT)


def test_reading_the_registry_loads_no_server() -> None:
    """The command line and the engine process read the registry too."""
    script = "import sys, tgis.router.api.registry; print(*sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert "tgis.router.api.tgi.rules" in printed.split()
    assert not {"starlette", "grpc", "uvicorn", "torch"} & {*printed.split()}


@pytest.mark.parametrize(
    ("http_api", "served"),
    [
        (None, ()),
        (" , ", ()),
        ("openai", ("openai",)),
        ("tgi", ("tgi", "openai")),
        ("openai, lmi,tgi", ("lmi", "tgi", "openai")),
    ],
)
def test_apis_that_a_value_of_the_option_serves(http_api: str | None, served: tuple[str, ...]) -> None:
    assert registry.served_http_names(http_api) == served
    with_grpc = {each.name for each in registry.served_interfaces(PortOptions(http_api=http_api))}
    assert with_grpc == {"fmaas", *served}


def test_grpc_apis_are_those_of_the_option() -> None:
    options = PortOptions(grpc_api=" vllm-engine,", http_api="openai")
    assert {each.name for each in registry.served_interfaces(options)} == {"vllm-engine", "openai"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("fmaas,tgis", "grpc_api: tgis is not one of fmaas, vllm-engine"),
        (",", "grpc_api: it must name at least one of fmaas, vllm-engine"),
    ],
)
def test_other_names_of_grpc_apis_are_refused(tmp_path: Path, value: str, text: str) -> None:
    service = Service(router_command(tmp_path, "--grpc-api", value))
    assert service.process.wait(30) == service.end() == 1
    assert text in service.output
