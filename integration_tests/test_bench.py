"""`tgis bench` with a launched service on a tiny checkpoint: constraints, adapters and repeated seeds."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration_tests.support.greedy_answers import Model
from integration_tests.support.served_models import FLAGS
from integration_tests.support.service import Client, serve
from integration_tests.support.tuned_files import LINEAR, SoftPrompt, embeddings, write_adapter, write_prompt

pytestmark = pytest.mark.slow
APIS = ["--grpc-api", "fmaas,vllm-engine", "--http-api", "openai,tgi,lmi", "--served-model-name", "m"]
SHORT = ("--input-tokens", "20", "--output-tokens", "60", "--requests", "20", "--concurrency", "4")


@pytest.fixture(scope="module")
def service(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    store = tmp_path_factory.mktemp("store")
    write_prompt(store / "eight", SoftPrompt(embeddings(8, 1)))
    write_adapter(store / "sql", model.directory, 3, LINEAR)
    stores = ("--prefix-store-path", str(store), "--adapter-cache", str(store))
    yield from serve(model.directory, *FLAGS, *stores, *APIS)


def bench(service: Client, directory: Path, api: str, *flags: str) -> dict[str, Any]:
    is_grpc = api in ("fmaas", "engine")
    target = f"127.0.0.1:{service.service.grpc_port}" if is_grpc else service.service.http
    path = directory / "report.json"
    command = [sys.executable, "-m", "tgis", "bench", "--target", target, "--api", api, "--report", str(path)]
    done = subprocess.run([*command, *SHORT, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [level] = json.loads(path.read_text())["levels"]
    assert isinstance(level, dict)
    return level


@pytest.mark.parametrize("api", ["fmaas", "completions", "tgi", "engine"])
def test_constraints_are_kept(api: str, service: Client, tmp_path: Path) -> None:
    level = bench(service, tmp_path, api, "--constraints", "json=0.3,regex=0.3,choice=0.4")
    assert (level["errors"], level["faults"]) == ({}, {})
    assert 1 < level["output_tokens"] < 60, "some texts are complete, so that they were checked"


def test_repeated_seeds_give_the_same_texts(service: Client, tmp_path: Path) -> None:
    for api in ("fmaas", "completions", "lmi", "engine"):
        level = bench(service, tmp_path, api, "--temperature", "1", "--repeat-share", "0.5")
        assert (level["errors"], level["faults"]) == ({}, {})


def test_adapters_and_soft_prompts(service: Client, tmp_path: Path) -> None:
    for api in ("fmaas", "completions", "tgi", "lmi"):
        level = bench(service, tmp_path, api, "--adapters", "sql", "--adapter-share", "0.5")
        assert (level["errors"], level["faults"]) == ({}, {})
    level = bench(service, tmp_path, "fmaas", "--soft-prompts", "eight", "--soft-prompt-share", "0.5")
    assert (level["errors"], level["faults"]) == ({}, {})
