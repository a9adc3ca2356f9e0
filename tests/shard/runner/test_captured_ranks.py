"""Captured steps of several ranks: their collectives are part of the kernel graph."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.ranks import Ranks
from tests.support.shard.relay import Relay, follow, share
from tgis.shard.collectives import ProcessGroup
from tgis.shard.startup.load import load

NUM_LAYERS = 2
PROMPTS = ([5, 6, 7], [11, 12, 13, 14], [21])


def serve(group: ProcessGroup, directory: Path, is_shared: bool) -> tuple[list[Any], list[int], list[str]]:
    """Generate tokens. Return them on the first rank, the digests of all steps, and the kernels of the graph
    of steps with one token."""
    mine = group if is_shared else replace(group, local=None)
    options = {"rank": group.rank, "world_size": group.size, "kv_cache_tokens": 2048, "dtype": "float32"}
    runner = load(configure(directory, **options), mine)
    requests: list[Request] = []
    if group.rank:
        digests = list(follow(group, runner))
    else:
        relay = Relay(runner, group)
        requests = [Request(prompt) for prompt in PROMPTS]
        for crowd in (requests[:1], requests[1:]):  # steps with one token and with two
            Router(relay, 0).run(list(crowd))  # type: ignore[arg-type]
        share(group, b"")
        digests = relay.digests
    graph = getattr(runner.forward, "find_graph", lambda _: None)(1)  # type: ignore[attr-defined]
    names = [] if graph is None else [launch.kernel.name for launch in graph.launches]
    return [request.generated for request in requests], digests, names


@pytest.mark.parametrize("size", [2, 4])
def test_captured_steps_equal_those_over_gloo(
    size: int, ranks: Ranks, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint("grouped_queries")  # with 99 tokens, which are not divisible by the ranks
    captured = ranks.run(size, serve, directory, True)
    plain = ranks.run(size, serve, directory, False)
    assert captured[0][0] == plain[0][0]
    assert captured[0][0][0], "no tokens were generated"
    digests = [each[1] for each in (*captured, *plain)]
    assert all(each == digests[0] for each in digests)
    for _, _, names in captured:
        assert names.count("all_reduce") == 1 + 2 * NUM_LAYERS
        assert names.count("all_gather") == 1
    assert [names for _, _, names in plain] == [[]] * size
