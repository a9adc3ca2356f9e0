"""Reads a router's HTTP port."""

from tests.support.http_exchange import exchange
from tests.support.router.router_process import Setup


def get(url: str) -> tuple[int, str]:
    reply = exchange(url, timeout=10)
    return reply.status, reply.text


def metric(setup: Setup, series: str) -> float:
    status, text = get(setup.http + "/metrics")
    assert status == 200
    values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(series + " ")]
    return float(values[0]) if values else 0.0
