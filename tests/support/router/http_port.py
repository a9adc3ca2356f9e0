"""Answers of a router's HTTP port."""

import urllib.error
import urllib.request

from tests.support.router.router_process import Setup


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metric(setup: Setup, series: str) -> float:
    status, text = get(setup.http + "/metrics")
    assert status == 200
    values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(series + " ")]
    return float(values[0]) if values else 0.0
