"""Compares how many prompt tokens are cached behind the Shepherd Model Gateway, by policy and number of
services."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from smg_grpc_proto.generated import common_pb2

from integration_tests.clients.gateway import Gateway, ask, engine_of
from integration_tests.clients.served import WORDS
from integration_tests.support.service import Client
from tests.support.accounts import scrape

NUM_CONVERSATIONS, NUM_TURNS, TURN_WORDS, TURN_TOKENS = 12, 4, 60, 16
EVENTS_S = 0.5
"""Time for cache events to reach the gateway. Users need longer to read an answer."""


def check_routing(gateway: Gateway) -> None:
    """Check that a cache-aware gateway finds in three services nearly what one service has cached."""
    single = _measure_hits(gateway, "single", "cache_aware", 1)
    aware = _measure_hits(gateway, "aware", "cache_aware", 3)
    by_chance = _measure_hits(gateway, "random", "random", 3)
    print(
        f"  cached prompt tokens of {NUM_CONVERSATIONS} conversations: one service {single:.1%}, "
        f"three {aware:.1%}, three by chance {by_chance:.1%}",
        flush=True,
    )
    assert aware >= 0.9 * single
    assert by_chance < aware


def _measure_hits(gateway: Gateway, name: str, policy: str, num_services: int) -> float:
    """Return the share of prompt tokens that were cached in the conversations."""
    services = gateway.services[:num_services]
    for client in services:
        engine_of(client).FlushCache(common_pb2.FlushCacheRequest())
    before = [_count_cached(client) for client in services]
    with gateway.run_another(name, "--policy", policy, num_services=num_services) as url:
        _converse(url)
    after = [_count_cached(client) for client in services]
    changes = [
        (late.hits - early.hits, late.queries - early.queries)
        for early, late in zip(before, after, strict=True)
    ]
    print(f"  {policy} with {num_services}: cached and prompt tokens by service {changes}", flush=True)
    return sum(hits for hits, _ in changes) / sum(queries for _, queries in changes)


class _Counts(NamedTuple):
    hits: float
    queries: float


def _count_cached(client: Client) -> _Counts:
    values = scrape(client.service.http)
    return _Counts(values["tgi_prefix_cache_hits_total"], values["tgi_prefix_cache_queries_total"])


def _converse(url: str) -> None:
    """Hold all conversations at the same time. Each has a beginning of its own."""
    r = random.Random(5)
    chats: list[list[dict[str, str]]] = [[] for _ in range(NUM_CONVERSATIONS)]
    with ThreadPoolExecutor(NUM_CONVERSATIONS) as threads:
        for _ in range(NUM_TURNS):
            for chat in chats:
                chat.append({"role": "user", "content": " ".join(r.choices(WORDS, k=TURN_WORDS))})
            for chat, text in zip(chats, threads.map(lambda chat: _answer(url, chat), chats), strict=True):
                chat.append({"role": "assistant", "content": text})
            time.sleep(EVENTS_S)


def _answer(url: str, messages: list[dict[str, str]]) -> str:
    with ask(url, messages, TURN_TOKENS) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
        return text
