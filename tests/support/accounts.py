"""Checks by a router's own metrics whether it has released all its resources."""

import time
import urllib.request
from collections.abc import Mapping

KINDS = ("request", "block", "row", "permit", "content")
EMPTY = (
    "tgi_queue_size",
    "tgi_requests_running",
    "tgi_requests_live",
    "tgi_permits_used",
    "tgi_kv_cache_usage_ratio",
)
GROWING = ("tgi_tasks", "tgi_open_descriptors")


def scrape(http: str) -> dict[str, float]:
    """Return the samples of a scrape by name and labels, as written."""
    with urllib.request.urlopen(f"{http}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def take_baseline(http: str, settle_s: float = 10.0) -> dict[str, float]:
    """Return the numbers of tasks and descriptors of a warm, idle router, when two consecutive scrapes agree.
    They include the descriptors of clients' connections and of the sockets of grammar workers."""
    deadline, before = time.monotonic() + settle_s, scrape(http)
    while True:
        time.sleep(0.1)
        now = scrape(http)
        if not differences_of(now, {}) and all(now[name] == before[name] for name in GROWING):
            return {name: now[name] for name in GROWING}
        assert time.monotonic() < deadline, differences_of(now, {})
        before = now


def differences(http: str, baseline: Mapping[str, float]) -> dict[str, float]:
    """Return the resources in use, by name; empty if all are released. Tasks and descriptors are compared
    with the baseline, if there is one."""
    return differences_of(scrape(http), baseline)


def differences_of(samples: Mapping[str, float], baseline: Mapping[str, float]) -> dict[str, float]:
    result = {}
    for kind in KINDS:
        created, released = (
            samples[f'tgi_resources_{half}_total{{kind="{kind}"}}'] for half in ("created", "released")
        )
        result[kind] = created - released  # negative if something was released twice
    result |= {name: samples[name] for name in EMPTY}
    result |= {name: max(samples[name] - maximum, 0) for name, maximum in baseline.items()}
    return {name: value for name, value in result.items() if value}


def assert_nothing_left(http: str, baseline: Mapping[str, float], timeout_s: float = 20.0) -> None:
    """Wait until all resources are released. Cancelled work ends slightly later than its client."""
    deadline = time.monotonic() + timeout_s
    while left := differences(http, baseline):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
