"""Checks and measurements at the start of a shard, on an emulated GPU: early starts of kernels, and times of
work in graphs."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cuda.late_device import LateDevice, LateGraph
from tgis.shard.kernels.cuda.functions import dependent_launch
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.startup.platforms.gpu import dependent_launches
from tgis.shard.startup.platforms.gpu.dependent_launches import check_dependent_launches, find_obstacle
from tgis.shard.startup.platforms.gpu.timing import NUM_REPLAYS, time_captured

KERNELS = Implementations.plain()


@pytest.fixture(autouse=True)
def usual_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dependent_launches, "SIZE", 64)
    yield
    dependent_launch.refuse(None)


class Refusing(LateDevice):
    def capture(self, work: Callable[[], None]) -> LateGraph:
        raise RuntimeError("operation not permitted\nand advice")


class Forgetting(LateDevice):
    """A device whose graphs compute nothing."""

    def capture(self, work: Callable[[], None]) -> LateGraph:
        work()
        return LateGraph(self, lambda: None)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (LateDevice(), None),
        (Refusing(), "operation not permitted"),
        (Forgetting(), "replayed layers are wrong"),
    ],
)
def test_replayed_layers_are_compared(device: LateDevice, expected: str | None) -> None:
    assert find_obstacle(device, KERNELS) == expected


def starts_early() -> bool:
    return dependent_launch._EarlyStartRefusal.reason is None


@pytest.mark.parametrize("name", dependent_launch.EARLY_KERNELS)
def test_each_kernel_that_starts_early_is_checked(name: str) -> None:
    """As if it did not wait for what it reads."""

    def compute(*args: Any) -> Tensor:
        result: Tensor = getattr(KERNELS, name)(*args)
        return torch.zeros_like(result) if starts_early() else result

    changed: dict[str, Any] = {name: compute}
    assert find_obstacle(LateDevice(), replace(KERNELS, **changed)) == "replayed layers are wrong"


@pytest.mark.parametrize("place", [3, 4], ids=["keys", "values"])
def test_the_cache_is_compared(place: int) -> None:
    def keep(*args: Any) -> Tensor:
        lost = args[place].clone() if starts_early() else args[place]
        return KERNELS.turn_and_keep(*args[:place], lost, *args[place + 1 :])

    assert find_obstacle(LateDevice(), replace(KERNELS, turn_and_keep=keep)) == "replayed layers are wrong"


@pytest.mark.parametrize(("device", "is_refused"), [(LateDevice(), False), (Refusing(), True)])
def test_kernels_start_one_by_one_if_the_check_fails(
    device: LateDevice, is_refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dependent_launch, "find_capability", lambda device: 90)
    monkeypatch.setattr(device, "device", torch.device("meta"))  # which has no interpreter
    monkeypatch.setattr(dependent_launches, "find_obstacle", lambda stream, _: find_on_cpu(stream))
    with caplog.at_level(logging.WARNING):
        check_dependent_launches(device, Implementations.choose())
    assert dependent_launch.is_dependent(torch.device("meta")) != is_refused
    assert ("kernels start only when those before them have ended: operation" in caplog.text) == is_refused


def find_on_cpu(stream: LateDevice) -> str | None:
    stream.device = torch.device("cpu")
    return find_obstacle(stream, KERNELS)


def test_work_is_timed_in_replays() -> None:
    calls: list[int] = []
    assert time_captured(LateDevice(), lambda: calls.append(1)) > 0
    assert len(calls) == 1 + 1 + NUM_REPLAYS
