"""Queries of dashboards and autoscalers for vLLM's series, sent to a real Prometheus that scrapes a service
under load."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from integration_tests.deployment.monitoring.watched import MAX_CONCURRENT, Watched, ask
from integration_tests.support.served_models import FLAGS, write_fallback
from integration_tests.support.service import launch
from scripts.prometheus import Prometheus
from scripts.prometheus import promtool as run_promtool

pytestmark = pytest.mark.deploy

MODEL = "org/small-model"
QUERIES = Path(__file__).parent / "vllm_queries.yaml"
INTERVAL = "30s"  # longer than the traffic
ROUNDS = 4
COMPLAINTS = {
    "metric names should not contain ':'",
    'non-counter metrics should not have "_total" suffix',
}  # promtool's warnings about vLLM's names


@pytest.fixture(scope="module")
def aliased(promtool: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    served = write_fallback(tmp_path_factory.mktemp("models") / "served")
    limits = ["--max-concurrent-requests", str(MAX_CONCURRENT), "--max-batch-size", "4"]
    names = ["--metrics-alias", "vllm", "--served-model-name", MODEL]
    service = launch(served.directory, *FLAGS, *served.flags, *limits, *names).wait_until_serving()
    prompts, adapters = list(served.store.prompts), list(served.store.adapters)
    target = f"127.0.0.1:{service.http_port}"
    try:
        with Prometheus(tmp_path_factory.mktemp("prometheus"), target) as prometheus:
            for _ in range(ROUNDS):
                ask(service, prompts, adapters)
                time.sleep(1)
            time.sleep(2)
            yield Watched(service, prometheus)
    finally:
        assert service.end() == 0, service.output


def queries() -> list[tuple[str, str]]:
    asked = yaml.safe_load(QUERIES.read_text())
    return [(who, query) for who, several in asked.items() for query in several]


def answer(watched: Watched, query: str) -> list[float]:
    text = query.replace("$model", MODEL).replace("$interval", INTERVAL)
    return [float(one["value"][1]) for one in watched.prometheus.query(text)]


def test_every_query_gives_data(aliased: Watched) -> None:
    asked = queries()
    assert len(asked) > 50
    empty = [(who, query) for who, query in asked if not any(map(math.isfinite, answer(aliased, query)))]
    assert not empty


@pytest.mark.parametrize(
    "query",
    [
        "vllm:num_requests",
        'vllm:num_requests_waiting{model_name="other"}',
        "rate(vllm:prompt_tokens[$interval])",
        "vllm:num_preemptions_total * 0 / 0",
    ],
)
def test_expressions_without_data_are_reported(aliased: Watched, query: str) -> None:
    assert not any(map(math.isfinite, answer(aliased, query)))


def test_counts_under_both_names_agree(aliased: Watched) -> None:
    for vllms, ours in (
        ("sum(vllm:request_success_total)", "sum(tgi_request_success_total)"),
        ("vllm:generation_tokens_total", "sum(tgi_request_generated_tokens_sum)"),
        ("vllm:e2e_request_latency_seconds_sum", "tgi_request_duration_sum"),
    ):
        [actual], [expected] = answer(aliased, vllms), answer(aliased, ours)
        assert actual == expected > 0, vllms


def test_promtool_has_nothing_against_a_scrape_but_vllms_names(aliased: Watched) -> None:
    checked = run_promtool("check", "metrics", text=aliased.scrape())
    complaints = {line.partition(" ")[2] for line in checked.stdout.splitlines()}
    assert complaints == COMPLAINTS
    named = {line.partition(" ")[0] for line in checked.stdout.splitlines()}
    assert all(name.startswith("vllm:") for name in named)
