"""Check routers that keep their metrics in files.

One router is killed during a stream and restarted; another router shares the files."""

import signal
from pathlib import Path

import pytest

from tests.support.accounts import KINDS, scrape
from tests.support.router.messages import batch, single, stopping
from tests.support.router.router_process import Setup, start_router, stop_router, stop_shards

LENGTH = 150
REQUESTS = 'tgi_resources_created_total{kind="request"}'


def start(directory: Path, worker: int) -> Setup:
    place = directory / f"{worker} {len(list(directory.iterdir()))}"
    place.mkdir()
    flags = "--metrics-dir", str(directory / "metrics"), "--worker", str(worker)
    return start_router(place, 1, *flags, module="tgis")


def generate(setup: Setup, count: int) -> None:
    for _ in range(count):
        setup.stub.Generate(batch("one", stopping=stopping(5, min_new_tokens=5)))


def kill_in_a_stream(setup: Setup) -> dict[str, float]:
    """Kill the router during a stream and return its last scrape."""
    setup.shards[0].step_s = 0.02
    stream = setup.stub.GenerateStream(single("one", stopping=stopping(LENGTH, min_new_tokens=LENGTH)))
    next(stream), next(stream)
    shown = scrape(setup.http)
    setup.service.end(signal.SIGKILL)
    stop_shards(setup)
    return shown


@pytest.mark.timeout(240)
def test_counters_outlive_their_process(tmp_path: Path) -> None:
    killed = start(tmp_path, 0)
    generate(killed, 3)
    before = kill_in_a_stream(killed)
    assert before['tgi_request_count_total{kind="stream"}'] == 1
    assert before[REQUESTS] == 4
    assert before['tgi_resources_released_total{kind="request"}'] == 3
    assert before["tgi_requests_live"] == 1

    following, other = start(tmp_path, 0), start(tmp_path, 1)
    try:
        for setup in (following, other):
            shown = scrape(setup.http)
            decreased = {
                name: (value, shown[name])
                for name, value in before.items()
                if name.partition("{")[0].endswith(("_total", "_count", "_sum", "_bucket"))
                and shown[name] < value
            }
            assert not decreased
            for kind in KINDS:
                created, released = (
                    shown[f'tgi_resources_{half}_total{{kind="{kind}"}}'] for half in ("created", "released")
                )
                assert created == released > 0 or kind == "content", kind
            assert shown['tgi_process_restarts_total{process="router"}'] == 1
            assert shown["tgi_requests_live"] == 0
        generate(following, 2)
        generate(other, 4)
        assert [scrape(setup.http)["tgi_request_duration_count"] for setup in (following, other)] == [9, 9]
        # Nothing scraped the last counts of the killed process, but its last step has written them.
        before = scrape(following.http)
        generate(other, 3)
        other.service.end(signal.SIGKILL)
        left = scrape(following.http)
        assert left[REQUESTS] - before[REQUESTS] == 3
    finally:
        assert stop_router(following) == 0
        other.service.end(signal.SIGKILL)
        stop_shards(other)
