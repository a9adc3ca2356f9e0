"""Suites of the whole service, repeated against launchers that start three router workers."""

from pathlib import Path

import pytest

from tests.support.suites import run_suite

HERE = Path(__file__).parent
WORKERS = {"ROUTER_WORKERS": "3"}
SUITES = (
    "test_any_message",
    "test_cases",
    "test_encoder_decoder",
    "test_faults",
    "test_guided",
    "test_http_apis",
    "test_lmi_details",
    "test_lmi_api",
    "test_same_tokens",
    "test_surface",
    "test_tgi_details",
    "test_tgi_api",
    "test_tuning",
    "test_tuning_faults",
    "test_unread",
    "test_worker_loss",
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("suite", SUITES)
def test_with_three_workers(suite: str) -> None:
    run_suite(HERE / f"{suite}.py", WORKERS, ["-m", "not deploy and not browser"])
