"""Check one scrape of several processes, some killed and restarted, against lists of their operations."""

import asyncio
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.support.router.metrics_account import (
    Operation,
    ProcessAccount,
    Sample,
    after,
    expected,
    read_samples,
)
from tests.support.router.metrics_writer import ALIASES, LIMITS
from tgis.router.metrics.gauges import GaugeValues
from tgis.router.metrics.metric_file import SUFFIX, MetricFile
from tgis.router.metrics.metric_types import QUANTILES, WINDOW_S, Summary
from tgis.router.metrics.metrics import ENGINE, ROUTER, Metrics
from tgis.router.metrics.resource_counts import ResourceCount
from tgis.router.metrics.scrape import GATHER_S, keep_published, render_all, render_process, render_sums

SLOTS = {"engine": ENGINE, "worker-0": ROUTER, "worker-1": ROUTER}
ODD = ("a", "", 'say "no"', "back\\slash", "line\nend", "é漢🙂", "a,b={}")
DURATIONS = tuple(0.0001 * 1.5**k for k in range(1, 36))
LATENCIES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
BOUNDS = {
    "tgi_request_duration": DURATIONS,
    "tgi_batch_inference_duration": DURATIONS,
    "vllm:e2e_request_latency_seconds": LATENCIES,
}


class Process:
    """The process of a slot, and the record of all operations of the slot's processes."""

    def __init__(self, directory: Path, slot: str) -> None:
        self._command = [sys.executable, "-m", "tests.support.router.metrics_writer", str(directory), slot]
        self._command.append(SLOTS[slot])
        self.account = ProcessAccount(SLOTS[slot])
        self.process: subprocess.Popen[str] | None = None

    def start(self, is_first: bool = False) -> None:
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._answer() == "ready\n"
        if not is_first:
            self.account.restart()

    def _answer(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def send(self, operations: Sequence[Operation]) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(operations) + "\n")

    def do(self, operations: Sequence[Operation]) -> None:
        self.send(operations)
        assert self._answer() == "done\n"
        for operation in operations:
            self.account.do(operation)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate()
        self.process = None

    def end(self) -> None:
        assert self.process is not None
        self.process.communicate()
        assert self.process.returncode == 0
        self.process = None
        self.account.publish()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[str, Process]]:
    result = {slot: Process(tmp_path, slot) for slot in SLOTS}
    yield result
    for each in result.values():
        if each.process is not None:
            each.kill()


def operation(r: random.Random, allows_publishing: bool = True) -> Operation:
    """Return a random operation, with values whose sums are exact."""
    value = r.choice((0.0, 5000.0, r.randrange(1, 640) / 64, r.randrange(1, 64) / 64))
    choices: list[Operation] = [
        ("add", "request_count", 1, r.choice(ODD)),
        ("add", "request_failure", r.randrange(1, 9), r.choice(ODD)),
        ("add", "tokenize_count", 1),
        ("observe", "request_duration", value),
        ("observe", "batch_duration", value, r.choice(ODD), f"{r.randrange(20)}"),
        ("observe", "request_raw_input_length", r.randrange(100)),
        ("begin", r.randrange(100)),
        ("count", r.randrange(9), r.randrange(9), r.randrange(3)),
    ]
    if allows_publishing:
        choices.append(("publish",))
    return r.choice(choices)


def scrape(directory: Path) -> dict[Sample, float]:
    return read_samples(render_sums(Metrics(LIMITS, ALIASES), directory, []))


def differences(directory: Path, accounts: Sequence[ProcessAccount]) -> dict[Sample, tuple[float, float]]:
    actual, wanted = scrape(directory), expected(accounts, BOUNDS)
    return {
        key: (actual.get(key, -1), value) for key, value in wanted.items() if actual.get(key, -1) != value
    }


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_sums_are_exact_after_any_loss(tmp_path: Path, processes: dict[str, Process], seed: int) -> None:
    r = random.Random(seed)
    for each in processes.values():
        each.start(is_first=True)
    for turn in range(12):
        slot = r.choice([*processes])
        chosen = processes[slot]
        if chosen.process is None:
            chosen.start()
        chosen.do([operation(r) for _ in range(r.randrange(300))])
        if turn % 5 == 1:
            chosen.kill()
        elif turn % 5 == 2:
            others = [each.account for each in processes.values() if each is not chosen]
            chosen.account = killed_while_writing(tmp_path, chosen, others, r)
        elif turn % 5 == 3:
            chosen.end()
        assert not differences(tmp_path, [each.account for each in processes.values()]), (seed, turn)


def killed_while_writing(
    directory: Path, chosen: Process, others: list[ProcessAccount], r: random.Random
) -> ProcessAccount:
    """Return the account that agrees with what a killed process has left."""
    operations = [operation(r, allows_publishing=False) for _ in range(5000)]
    chosen.send(operations)
    time.sleep(r.random() * 0.03)
    chosen.kill()
    ticks = scrape(directory)["tgi_request_input_count", frozenset()]
    num_done = int(ticks) - chosen.account.ticks - sum(other.ticks for other in others)
    possible = after(chosen.account, operations, num_done)
    agreeing = [one for one in possible if not differences(directory, [one, *others])]
    assert agreeing, num_done
    # An account that lacks a series does not check the series' first sample.
    return agreeing[-1]


def test_a_stopped_process_delays_no_scrape(tmp_path: Path, processes: dict[str, Process]) -> None:
    """Check that a scrape reads only files, and waits for no process."""
    for each in processes.values():
        each.start(is_first=True)
        each.do([("add", "tokenize_count", 1)])
    stopped = processes["engine"].process
    assert stopped is not None
    os.kill(stopped.pid, signal.SIGSTOP)
    assert scrape(tmp_path)["tgi_tokenize_request_count", frozenset()] == 3


def test_a_killed_process_holds_nothing_once_the_next_one_is_there(tmp_path: Path) -> None:
    path, count = tmp_path / f"engine{SUFFIX}", ResourceCount(7, 3)
    first = open_metrics(path)
    first.follow_resource("block", count)
    first.publish()
    first.storage.close()
    assert [held(tmp_path), held(tmp_path, "released")] == [7, 3]
    second = open_metrics(path)
    assert [held(tmp_path), held(tmp_path, "released")] == [7, 7]
    second.follow_resource("block", ResourceCount(2, 0))
    second.publish()
    assert [held(tmp_path), held(tmp_path, "released")] == [9, 7]


def held(directory: Path, half: str = "created") -> float:
    return scrape(directory)[f"tgi_resources_{half}_total", frozenset({("kind", "block")})]


def open_metrics(path: Path, process: str = ENGINE) -> Metrics:
    metrics = Metrics(LIMITS, ALIASES, MetricFile(path))
    metrics.begin_process(process)
    return metrics


def test_quantiles_are_those_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the quantiles of the last minute against a plain sort."""
    r, now = random.Random(3), 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    files = [MetricFile(tmp_path / f"worker-{i}{SUFFIX}") for i in range(3)]
    summaries = [Metrics(LIMITS, ALIASES, file).request_raw_input_length for file in files]
    happened: list[list[tuple[float, float]]] = [[], [], []]
    for turn in range(9000):
        now += 0.011
        place = r.choice((0, 0, 0, 0, 0, 0, 1, 2))
        if turn == 5000:
            files[2].close()
            reopened = MetricFile(tmp_path / f"worker-2{SUFFIX}")
            summaries[2] = Metrics(LIMITS, ALIASES, reopened).request_raw_input_length
        happened[place].append((now, r.randrange(1000)))
        summaries[place].observe(happened[place][-1][1])
        if turn % 1000 == 999:
            recent = [each for one in happened for each in one[-4096:]]
            values = sorted(value for at, value in recent if at >= now - WINDOW_S)
            shown = scrape(tmp_path)
            for quantile in QUANTILES:
                label = frozenset({("quantile", f"{quantile:g}")})
                wanted = values[round(quantile * (len(values) - 1))]
                assert shown["tgi_request_raw_input_length", label] == wanted, (turn, quantile)
    now += WINDOW_S + 1
    assert scrape(tmp_path)["tgi_request_raw_input_length", frozenset({("quantile", "0.5")})] == 0


def test_a_machine_that_has_just_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that unwritten slots of the ring are not observations at the time 0."""
    monkeypatch.setattr(time, "monotonic", lambda: 2.0)
    summary = Summary("seconds", "")
    summary.observe(5.0)
    [family] = summary.collect()
    quantiles = [sample.value for sample in family.samples if sample.name == "seconds"]
    assert quantiles == [5.0] * len(QUANTILES)


def test_a_file_shows_the_same_values_as_memory(tmp_path: Path) -> None:
    """Check that the text of one process is the same, byte for byte, with and without sharing."""
    alone, shared = Metrics(LIMITS, ALIASES), Metrics(LIMITS, ALIASES, MetricFile(tmp_path / f"a{SUFFIX}"))
    for metrics in (alone, shared):
        r = random.Random(1)
        metrics.begin_process(ROUTER)
        metrics.queue_size.follow(lambda: 3)
        metrics.replaced_kernels.follow(lambda: {("gate",): 1, ("norm",): 1})
        metrics.follow_resource("block", ResourceCount(4, 1))
        metrics.preemptions.follow(lambda: 5)
        for _ in range(300):
            metrics.request_duration.observe(r.random())
            metrics.batch_duration.observe(r.random(), r.choice(ODD), "b")
            metrics.request_raw_input_length.observe(r.randrange(99))
            metrics.request_failure.add(r.choice(ODD))
    for _ in range(2):
        text = asyncio.run(render_all(shared, tmp_path, nobody)())
        assert text == alone.render() == asyncio.run(render_process(alone)())
        assert b"tgi_router_workers 1.0" in text
        assert b'tgi_process_restarts_total{process="router"} 0.0' in text


def test_nothing_of_a_scrape_waits_for_the_garbage_collector(tmp_path: Path) -> None:
    """Check that file mappings are closed at once: garbage collection is rare in a router."""
    file = MetricFile(tmp_path / f"a{SUFFIX}")
    Metrics(LIMITS, ALIASES, file).request_duration.observe(1.0)

    def mappings() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]

    scraped = Metrics(LIMITS, ALIASES)
    before = mappings()
    gc.disable()
    try:
        for _ in range(3):
            render_sums(scraped, tmp_path, [])
        assert mappings() == before
    finally:
        gc.enable()


async def nobody() -> list[GaugeValues]:
    return []


def gauge_values(**values: float) -> GaugeValues:
    return GaugeValues({name: [((), value)] for name, value in values.items()})


def test_gauges_of_several_processes(tmp_path: Path) -> None:
    engine = GaugeValues(
        {
            "tgi_permits_limit": [((), 20.0)],
            "tgi_queue_size": [((), 4.0)],
            "tgi_tasks": [((), 5.0)],
            "tgi_replaced_kernels": [(("gate",), 1.0)],
        }
    )
    one = gauge_values(tgi_ready=1, tgi_tasks=7, tgi_router_workers=1, tgi_tls_certificate_seconds_left=90)
    two = gauge_values(tgi_ready=0, tgi_tasks=2, tgi_router_workers=1, tgi_tls_certificate_seconds_left=80)
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode([engine, one, two]), type=list[GaugeValues])
    shown = read_samples(render_sums(Metrics(LIMITS, ALIASES), tmp_path, crossed))
    wanted = {
        "tgi_ready": 0,
        "tgi_tls_certificate_seconds_left": 80,
        "tgi_tasks": 14,
        "tgi_router_workers": 2,
        "tgi_permits_limit": 20,
        "tgi_queue_size": 4,
        "tgi_kv_cache_usage_ratio": 0,
    }
    assert {name: shown[name, frozenset()] for name in wanted} == wanted
    assert shown["tgi_replaced_kernels", frozenset({("kernel", "gate")})] == 1
    of_model = frozenset({("model_name", "model"), ("engine", "0")})
    assert shown["vllm:num_requests_waiting", of_model] == 4


def test_unknown_values_of_a_process_are_absent() -> None:
    metrics = Metrics(LIMITS, ALIASES)
    assert metrics.gauge_values() == GaugeValues({})
    metrics.begin_process(ENGINE)
    metrics.queue_size.follow(lambda: 0)
    metrics.replaced_kernels.follow(dict)
    assert metrics.gauge_values().by_name == {"tgi_queue_size": [((), 0)], "tgi_replaced_kernels": []}


@pytest.mark.parametrize("answers", [True, False])
async def test_workers_that_do_not_answer_are_omitted(tmp_path: Path, answers: bool) -> None:
    metrics = Metrics(LIMITS, ALIASES, MetricFile(tmp_path / f"worker-0{SUFFIX}"))
    metrics.tasks.follow(lambda: 1)

    async def gather() -> list[GaugeValues]:
        await asyncio.sleep(0 if answers else GATHER_S + 60)
        return [gauge_values(tgi_tasks=10)]

    shown = read_samples(await render_all(metrics, tmp_path, gather)())
    assert shown["tgi_tasks", frozenset()] == (11 if answers else 1)


@pytest.mark.parametrize("publishes", [keep_published, None])
async def test_counts_are_published_without_a_scrape(
    tmp_path: Path, publishes: Callable[[Metrics], object] | None
) -> None:
    metrics = open_metrics(tmp_path / f"engine{SUFFIX}")
    metrics.preemptions.follow(lambda: 5)
    tasks = [asyncio.create_task(publishes(metrics))] if publishes is keep_published else []
    await asyncio.sleep(0.01)
    assert scrape(tmp_path)["tgi_preemptions_total", frozenset()] == (5 if tasks else 0)
    for task in tasks:
        task.cancel()
    metrics.close()
    assert scrape(tmp_path)["tgi_preemptions_total", frozenset()] == 5
