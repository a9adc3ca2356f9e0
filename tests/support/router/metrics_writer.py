"""Process that stores its metrics in a file and executes lines of JSON: each is a list of operations and is
answered with a line. Its arguments are the directory, the slot and the kind of process."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tgis.router.api.vllm.series import VllmSeries
from tgis.router.metrics.metric_file import SUFFIX, MetricFile
from tgis.router.metrics.metrics import MetricLimits, Metrics
from tgis.router.metrics.resource_counts import ResourceCount

LIMITS = MetricLimits(64, 32, 4)
ALIASES = partial(VllmSeries, "model", LIMITS.max_sequence_length)


class Writer:
    def __init__(self, path: Path, process: str) -> None:
        self.metrics = Metrics(LIMITS, ALIASES, MetricFile(path))
        self.metrics.begin_process(process)
        self.resources, self.preemptions = ResourceCount(), 0
        self.metrics.follow_resource("block", self.resources)
        self.metrics.preemptions.follow(lambda: self.preemptions)

    def do(self, kind: str, *arguments: Any) -> None:
        getattr(self, kind)(*arguments)
        self.metrics.request_input_count.add()

    def add(self, series: str, amount: float, *labels: str) -> None:
        getattr(self.metrics, series).add(*labels, amount=amount)

    def observe(self, series: str, value: float, *labels: str) -> None:
        getattr(self.metrics, series).observe(value, *labels)

    def begin(self, num_tokens: int) -> None:
        assert self.metrics.aliases is not None
        self.metrics.aliases.begin(num_tokens)

    def count(self, created: int, released: int, preempted: int) -> None:
        self.resources.created += created
        self.resources.released += released
        self.preemptions += preempted

    def publish(self) -> None:
        self.metrics.publish()


def main(directory: str, slot: str, process: str) -> None:
    writer = Writer(Path(directory) / f"{slot}{SUFFIX}", process)
    print("ready", flush=True)
    for line in sys.stdin:
        for operation in json.loads(line):
            writer.do(*operation)
        print("done", flush=True)
    writer.metrics.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
