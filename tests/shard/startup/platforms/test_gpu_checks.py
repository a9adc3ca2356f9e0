"""Checks and measurements at the start of a shard, on an emulated GPU: early starts of kernels, and times of
work in graphs."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.cuda.late_device import LateDevice, LateGraph
from tgis.shard.kernels.cuda.functions import dependent_launch
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.startup.platforms.gpu import dependent_launches
from tgis.shard.startup.platforms.gpu.dependent_launches import check_dependent_launches, find_obstacle
from tgis.shard.startup.platforms.gpu.timing import NUM_REPLAYS, time_captured

KERNELS = Implementations.plain()


@pytest.fixture(autouse=True)
def usual_launches() -> Iterator[None]:
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
        (Forgetting(), "replayed products are wrong"),
    ],
)
def test_replayed_products_are_compared(device: LateDevice, expected: str | None) -> None:
    assert find_obstacle(device, KERNELS) == expected


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
