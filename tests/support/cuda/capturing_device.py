"""Late device whose graphs replay exactly the captured work."""

from collections.abc import Callable

from tests.support.cuda.fake_graph import FakeGraphs
from tests.support.cuda.late_device import LateDevice, LateGraph


class CapturingDevice(LateDevice):
    def __init__(self) -> None:
        super().__init__()
        self._graphs = FakeGraphs()

    def capture(self, work: Callable[[], None]) -> LateGraph:
        self.finish()
        return LateGraph(self, self._graphs.capture(work).replay)
