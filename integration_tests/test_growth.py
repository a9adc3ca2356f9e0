"""Memory of a router and of a shard after thousands of requests, including cancelled and refused ones."""

import pytest

from integration_tests.support.greedy_answers import Model
from integration_tests.support.service import Client, launch
from tests.support.accounts import assert_nothing_left, take_baseline
from tests.support.growth import MAX_GROWTH, MAX_SHARE, growth_per_request, mix
from tests.support.processes import children_of

NUM_REQUESTS = 4_000


@pytest.mark.slow
@pytest.mark.parametrize("command", ["router", "serve"])
def test_memory_does_not_grow_with_requests(model: Model, command: str) -> None:
    client = Client(launch(model.directory, "--dtype", "float32").wait_until_serving())
    serve = mix(client.stub)
    serve(NUM_REQUESTS)  # which fills the buffers of recent observations
    baseline = take_baseline(client.service.http)
    [pid] = children_of(client.service.process.pid)[command]
    per_request, size = growth_per_request(pid, NUM_REQUESTS, serve)
    print(f"{command}: {per_request:.0f} bytes per request, of {size / 2**20:.1f} MiB")
    assert_nothing_left(client.service.http, baseline)
    client.channel.close()
    assert client.service.end() == 0
    assert per_request * NUM_REQUESTS < min(MAX_GROWTH, MAX_SHARE * size)
