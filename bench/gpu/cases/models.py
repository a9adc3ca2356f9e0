"""Loads the tests' tiny models to the device, and runs their requests."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu.target import Target
from tests.support.shard.driver import Request, Router
from tests.support.shard.portable import plain
from tgis.config.processes import ShardConfig
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load


@contextmanager
def temporary_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tgis-model-") as directory:
        yield Path(directory)


def load_model(target: Target, config: ShardConfig) -> Any:
    """Load a model to the device, with captured steps unless the configuration turns them off."""
    if not target.is_rehearsal:
        return load(replace(config, device="cuda"))
    from tests.support.cuda.late_device import LateDevice
    from tests.support.cuda.late_platform import late_platform

    return load(config, on=late_platform(LateDevice()))


def answer_on_host(config: ShardConfig, requests: Sequence[Request]) -> list[Request]:
    """Run copies of requests on the CPU, one after the other."""
    host, answered = load(config, on=plain(torch.device("cpu"))), deepcopy(list(requests))
    for request in answered:
        Router(host, depth=1, whole=True).run([request])
        host.reset()
    return answered


def run_on(runner: ModelRunner, requests: Sequence[Request], depth: int) -> list[list[int]]:
    """Return the tokens of copies of requests that run together."""
    copies = deepcopy(list(requests))
    runner.reset()
    Router(runner, seed=1, depth=depth).run(list(copies))
    return [request.generated for request in copies]


def record_comparison(target: Target, key: str, compare: Callable[[], None]) -> None:
    """Record whether an assertion of the tests holds."""
    try:
        compare()
    except AssertionError as error:
        target.recorder.check(key, False, str(error).strip().partition("\n")[0][:200])
    else:
        target.recorder.check(key, True)
