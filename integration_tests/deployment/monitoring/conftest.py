"""Provides a launched service on a tiny checkpoint that has served requests of every kind and has lost a
shard, and a Prometheus that scrapes it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration_tests.deployment.monitoring.watched import MAX_CONCURRENT, Watched, ask, lose_a_shard
from integration_tests.support.served_models import FLAGS, write_fallback
from integration_tests.support.service import launch
from scripts.prometheus import PROMTOOL, Prometheus

RULES = Path(__file__).parents[3] / "deployment" / "monitoring" / "rules.yaml"


@pytest.fixture(scope="session")
def promtool() -> Path:
    if not PROMTOOL.is_file():
        pytest.skip("NOTICE: promtool is missing (scripts/fetch_prometheus.sh): rules are not checked")
    return PROMTOOL


@pytest.fixture(scope="session")
def watched(promtool: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    served = write_fallback(tmp_path_factory.mktemp("models") / "served")
    limits = ["--max-concurrent-requests", str(MAX_CONCURRENT), "--max-batch-size", "4", "--speculate", "3"]
    service = launch(served.directory, *FLAGS, *served.flags, *limits).wait_until_serving()
    prompts, adapters = list(served.store.prompts), list(served.store.adapters)
    target = f"127.0.0.1:{service.http_port}"
    try:
        with Prometheus(tmp_path_factory.mktemp("prometheus"), target, RULES) as prometheus:
            for _ in range(4):
                ask(service, prompts, adapters)
                time.sleep(1)
            lose_a_shard(service)
            time.sleep(3)
            yield Watched(service, prometheus)
    finally:
        assert service.end() == 0, service.output
