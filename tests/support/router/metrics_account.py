"""Independent computation of a scrape from plain lists of the operations of each process."""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Sample = tuple[str, frozenset[tuple[str, str]]]
Operation = tuple[Any, ...]
HISTOGRAMS = {
    "request_duration": ("tgi_request_duration", ()),
    "batch_duration": ("tgi_batch_inference_duration", ("method", "makeup")),
}
COUNTERS = {
    "request_count": ("tgi_request_count", ("kind",)),
    "request_failure": ("tgi_request_failure", ("err",)),
    "tokenize_count": ("tgi_tokenize_request_count", ()),
}
SUMMARY = "tgi_request_raw_input_length"


class ProcessAccount:
    """Operations of all processes of one slot, in order."""

    def __init__(self, process: str) -> None:
        self.process, self.restarts, self.ticks = process, 0, 0
        self.counts: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        self.observed: defaultdict[tuple[str, tuple[str, ...]], list[float]] = defaultdict(list)
        self.lengths: list[float] = []
        self.lost_count = 0
        """Set to 1 if a process died between the sum and the count of the last length."""
        self.lost_sums: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        """Sums of values counted by a process that died before it wrote their sum."""
        self.prompt_tokens = 0
        self.past = self.live = self.published = (0, 0, 0)

    def restart(self) -> None:
        self.restarts += 1
        self.end()
        created, released, preempted = self.past
        self.past = created, max(created, released), preempted

    def end(self) -> None:
        """End the process, and lose its unpublished operations."""
        self.past = _sum(self.past, self.published)
        self.live = self.published = (0, 0, 0)

    def do(self, operation: Operation) -> None:
        kind, *arguments = operation
        getattr(self, kind)(*arguments)
        self.ticks += 1

    def half(self, operation: Operation) -> None:
        """Do the first write of an operation with two writes."""
        kind, series, value, *labels = operation
        assert kind == "observe"
        if series in HISTOGRAMS:
            self.observed[series, tuple(labels)].append(value)
            self.lost_sums[series, tuple(labels)] += value
        else:
            self.lengths.append(value)
            self.lost_count += 1

    def add(self, series: str, amount: float, *labels: str) -> None:
        self.counts[series, labels] += amount

    def observe(self, series: str, value: float, *labels: str) -> None:
        if series in HISTOGRAMS:
            self.observed[series, labels].append(value)
        else:
            self.lengths.append(value)

    def begin(self, num_tokens: int) -> None:
        self.prompt_tokens += num_tokens

    def count(self, *numbers: int) -> None:
        self.live = _sum(self.live, numbers)

    def publish(self) -> None:
        self.published = self.live


def expected(
    accounts: Sequence[ProcessAccount], bounds: Mapping[str, Sequence[float]]
) -> dict[Sample, float]:
    """Return the samples of a scrape of all processes, for the series that the accounts cover."""
    samples: defaultdict[Sample, float] = defaultdict(float)
    for account in accounts:
        for name, labels, value in _samples(account, bounds):
            samples[name, frozenset(labels)] += value
    return dict(samples)


def _samples(
    account: ProcessAccount, bounds: Mapping[str, Sequence[float]]
) -> Iterator[tuple[str, list[tuple[str, str]], float]]:
    numbers: list[tuple[str, list[tuple[str, str]], float]] = [
        ("tgi_request_input_count", [], account.ticks),
        ("tgi_process_restarts", [("process", account.process)], account.restarts),
    ]
    created, released, preempted = _sum(account.past, account.published)
    numbers.append(("tgi_resources_created", [("kind", "block")], created))
    numbers.append(("tgi_resources_released", [("kind", "block")], released))
    numbers.append(("tgi_preemptions", [], preempted))
    for (series, values), number in account.counts.items():
        name, label_names = COUNTERS[series]
        numbers.append((name, list(zip(label_names, values, strict=True)), number))
    for name, labels, number in numbers:
        yield name, labels, number
        yield f"{name}_total", labels, number
    of_model = [("model_name", "model"), ("engine", "0")]
    yield "vllm:prompt_tokens_total", of_model, account.prompt_tokens
    yield "vllm:num_preemptions_total", of_model, preempted
    yield f"{SUMMARY}_count", [], len(account.lengths) - account.lost_count
    yield f"{SUMMARY}_sum", [], sum(account.lengths)
    for (series, values), observed in account.observed.items():
        name, label_names = HISTOGRAMS[series]
        total = sum(observed) - account.lost_sums[series, values]
        labels = list(zip(label_names, values, strict=True))
        yield from _histogram(name, labels, observed, total, bounds[name])
        if name == "tgi_request_duration":
            view = "vllm:e2e_request_latency_seconds"
            yield from _histogram(view, of_model, observed, total, bounds[view])


def _histogram(
    name: str, labels: list[tuple[str, str]], observed: Sequence[float], total: float, bounds: Sequence[float]
) -> Iterator[tuple[str, list[tuple[str, str]], float]]:
    for end in (*bounds, float("inf")):
        yield f"{name}_bucket", [*labels, ("le", str(float(end)))], sum(value <= end for value in observed)
    yield f"{name}_count", labels, len(observed)
    yield f"{name}_sum", labels, total


def read_samples(text: bytes) -> dict[Sample, float]:
    """Return every sample of a scrape, with bucket bounds as numbers."""
    result = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if "le" in labels:
                labels["le"] = str(float(labels["le"]))
            result[sample.name, frozenset(labels.items())] = sample.value
    return result


def after(account: ProcessAccount, operations: Sequence[Operation], num_ticks: int) -> list[ProcessAccount]:
    """Return the possible states after a process was killed during the operation after `operations`."""
    done = copy.deepcopy(account)
    for operation in operations[:num_ticks]:
        done.do(operation)
    possible = [done]
    if num_ticks < len(operations):
        following = operations[num_ticks]
        whole = copy.deepcopy(done)
        whole.do(following)
        whole.ticks -= 1
        possible.append(whole)
        if following[0] == "observe":
            half = copy.deepcopy(done)
            half.half(following)
            possible.append(half)
    return possible


def _sum(first: Sequence[int], second: Sequence[int]) -> tuple[int, int, int]:
    created, released, preempted = (a + b for a, b in zip(first, second, strict=True))
    return created, released, preempted
