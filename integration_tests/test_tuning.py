"""A request with a soft prompt or an adapter gives the tokens of PEFT and transformers: alone, beside
requests with others and without, chunked, preempted, from the cache, streamed, on two ranks. Also their
metrics."""

import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from integration_tests.support.adapter_requests import INVALID, TEXTS, Ask, Tuned, asks
from integration_tests.support.live_streams import metrics
from integration_tests.support.tuned_files import LINEAR, SoftPrompt, embeddings, write_adapter, write_prompt
from tgis.pb import generation_pb2 as pb

MIB = 1 << 20


def test_alone_and_again_from_the_cache(tuned: Tuned) -> None:
    for ask in asks():
        if ask.text == TEXTS[0]:
            ask.check(tuned, ask.send(tuned))
            before = metrics(tuned.client)["tgi_prefix_cache_hits"]
            ask.check(tuned, ask.send(tuned))
            assert metrics(tuned.client)["tgi_prefix_cache_hits"] > before
            ask = replace(ask, wants_inputs=True, num_tokens=2)
            ask.check(tuned, ask.stream(tuned))


def test_in_a_crowd(tuned: Tuned) -> None:
    everything = [
        replace(ask, num_tokens=24, wants_inputs=wants) for ask in asks() for wants in (False, True)
    ]
    r = random.Random(0)
    r.shuffle(everything)
    ways = [r.choice((Ask.send, Ask.stream)) for _ in everything]
    with ThreadPoolExecutor(len(everything)) as threads:
        answers = list(threads.map(lambda way, ask: way(ask, tuned), ways, everything))
    for ask, answer in zip(everything, answers, strict=True):
        ask.check(tuned, answer)
    assert metrics(tuned.client)["tgi_preemptions"] > 0


def test_prompts_make_way_for_others(tuned: Tuned) -> None:
    """As many as fit stay loaded, the least recently used are evicted, and are reloaded for requests."""
    num_tokens, num_prompts = 100, 90
    size = num_tokens * 32 * 4
    assert num_prompts * size > MIB
    for i in range(num_prompts):
        write_prompt(tuned.prompts / f"many/{i}", SoftPrompt(embeddings(num_tokens, 1000 + i)))
    asks = [Ask("fox", f"many/{i}", num_tokens=1) for i in range(num_prompts)]
    before = metrics(tuned.client)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda ask: ask.send(tuned), asks))
    after = metrics(tuned.client)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["tgi_prompt_cache_misses"] == grown["tgi_prompt_load_duration_count"] == num_prompts
    assert grown["tgi_prompt_cache_hits"] == grown["tgi_prompt_load_failure"] == 0
    assert grown["tgi_prompt_cache_entries"] == num_prompts - grown["tgi_prompt_cache_evictions"]
    assert grown["tgi_prompt_cache_evictions"] > 0
    assert MIB - size <= after["tgi_prompt_cache_bytes"] <= MIB
    asks[-1].send(tuned)  # exists
    asks[0].send(tuned)  # does not exist
    Ask("fox", "nobody").refusal(tuned)
    last = metrics(tuned.client)
    for name in ("hits", "misses", "evictions"):
        assert last[f"tgi_prompt_cache_{name}"] == after[f"tgi_prompt_cache_{name}"] + 1
    assert last["tgi_prompt_load_failure"] == after["tgi_prompt_load_failure"] + 1
    Ask("fox", "eight").check(tuned, Ask("fox", "eight").send(tuned))


def test_adapters_make_way_for_others(tuned: Tuned) -> None:
    for i in range(6):
        write_adapter(tuned.adapters / f"large/{i}", tuned.served.directory, i, LINEAR, r=64)
    before = metrics(tuned.client)
    for i in [0, 1, 2, 3, 4, 5, 5, 0]:
        Ask("fox", adapter_id=f"large/{i}", num_tokens=1).send(tuned)
    Ask("fox", adapter_id="nobody").refusal(tuned)
    after = metrics(tuned.client)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert (grown["tgi_adapter_cache_hits"], grown["tgi_adapter_cache_misses"]) == (1, 7)
    assert grown["tgi_adapter_load_duration_count"] == 7
    assert grown["tgi_adapter_load_failure"] == 1
    assert grown["tgi_adapter_cache_entries"] == 7 - grown["tgi_adapter_cache_evictions"] < 6
    assert 0 < after["tgi_adapter_cache_bytes"] <= MIB
    kept = Ask(TEXTS[1], adapter_id="kept")
    kept.check(tuned, kept.send(tuned))
    assert metrics(tuned.client)["tgi_adapter_cache_misses"] == after["tgi_adapter_cache_misses"]


def test_concurrent_requests_share_one_load(tuned: Tuned) -> None:
    content = write_prompt(tuned.prompts / "new", SoftPrompt(embeddings(9, 99)))
    tuned.served.store.prompts["new"] = content
    ask, before = Ask("fox", "new", num_tokens=2), metrics(tuned.client)
    with ThreadPoolExecutor(16) as threads:
        for answer in threads.map(lambda _: ask.send(tuned), range(16)):
            ask.check(tuned, answer)
    after = metrics(tuned.client)
    assert after["tgi_prompt_load_duration_count"] == before["tgi_prompt_load_duration_count"] + 1


@pytest.mark.parametrize(("prefix_id", "adapter_id"), [("eight", None), (None, "mlp"), ("peft.v1", "lora")])
def test_a_grammar_is_followed(tuned: Tuned, prefix_id: str | None, adapter_id: str | None) -> None:
    """From the first generated token on, whatever comes before."""
    params = pb.Parameters(decoding=pb.DecodingParameters(regex="[0-9]{5}x"))
    message = pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text="fox")], params=params, prefix_id=prefix_id, adapter_id=adapter_id
    )
    [answer] = tuned.client.stub.Generate(message, timeout=60).responses
    assert re.fullmatch("[0-9]{5}x", answer.text)
    assert answer.stop_reason == pb.EOS_TOKEN


HOSTILE = [
    "..",
    "../eight",
    "eight/..",
    "eight/../eight",
    "nested/../eight",
    "../tuned-prompts/eight",
    "/eight",
    "/etc",
    "//etc/passwd",
    "/proc/self/cwd",
    "/proc/self/fd/0",
    "~",
    "~/eight",
    ".",
    "./eight",
    "eight/.",
    "nested/./path",
    "eight//../../x",
    "....//eight",
    "..%2feight",
    "%2e%2e/eight",
    "eight%00",
    "eight\0",
    "eight\0.pt",
    "eight\n",
    "eight ",
    " eight",
    "eight\\..\\..",
    "..\\eight",
    "C:\\eight",
    "file:///etc/passwd",
    "eight/decoder.pt",
    "decoder.pt",
    "eight.swp",
    "outside",
    "by-file",
    "loop",
    "pipe",
    "nested/directory",
    "ｅight",
    "eigh\u0074\u0301",
    "\u202eeight",
    "$(id)",
    "${PREFIX_STORE_PATH}",
    "*",
    "eigh?",
    "x" * 255,
    "x" * 4096,
    "../" * 80 + "etc/passwd",
    "\ufffd" * 1365,
]


# Directories of the store, but without a readable soft prompt.
NO_ADAPTERS = {"by-file", "pipe", "nested/directory"}
NO_ADAPTER = "can't retrieve adapter with id '{}': invalid adapter: no adapter_config.json found"


@pytest.fixture(scope="module")
def traps(tuned: Tuned, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create paths out of the store, and files that would not end; return the forbidden files."""
    outside = tmp_path_factory.mktemp("outside")
    write_prompt(outside / "secret", SoftPrompt(embeddings(4, 0)))
    store = tuned.prompts
    (store / "outside").symlink_to(outside / "secret")
    (store / "by-file").mkdir()
    (store / "by-file" / "decoder.pt").symlink_to(outside / "secret" / "decoder.pt")
    (store / "loop").symlink_to("loop")
    (store / "pipe").mkdir()
    os.mkfifo(store / "pipe" / "decoder.pt")
    (store / "nested" / "directory" / "decoder.pt").mkdir(parents=True)
    return outside / "secret" / "decoder.pt"


def test_hostile_ids_are_like_missing_ones(tuned: Tuned, traps: Path) -> None:
    os.utime(traps, (0, 0))  # so that even a mount that rarely updates access times reveals a reader
    names, text = tuned.oracle.server.names, "fox"
    for content_id in HOSTILE:
        code, details = Ask(text, content_id).refusal(tuned)
        assert (code, details) == (INVALID, names.prompt_error(content_id, has_adapter=False))
        assert details.endswith("not found")
        code, details = Ask(text, adapter_id=content_id).refusal(tuned)
        expected = names.adapter_error(content_id)
        if content_id in NO_ADAPTERS:
            expected = NO_ADAPTER.format(content_id)
        assert (code, details) == (INVALID, expected)
    assert traps.stat().st_atime == 0, "what is outside was read"
    Ask(text, "eight").check(tuned, Ask(text, "eight").send(tuned))
