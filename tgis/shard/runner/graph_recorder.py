"""Records the kernel launches of a computation on the CPU as a kernel graph."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from tgis.shard.kernels.cpu.jit.compiler import capture
from tgis.shard.kernels.cpu.kernel_graph import KernelGraph, MemoryPool
from tgis.shard.torch_internals import ForbidOperators, TorchOperatorError, allow_operators

logger = logging.getLogger(__name__)

# Maximum number of tokens in a step of which all parts are captured.
MAX_CAPTURED_TOKENS = 64


class Recorded(NamedTuple):
    """Kernel graph and the memory that it writes. Other graphs of the recorder overwrite the outputs."""

    graph: KernelGraph
    outputs: Sequence[Tensor]


class GraphRecorder:
    """Recorder of graphs that are replayed one at a time, and share memory."""

    def __init__(self, name: str, pool: MemoryPool | None = None) -> None:
        """`name` is that of the computations in the log, in the plural. Graphs of recorders with the same
        pool are replayed one at a time, too."""
        self._name = name
        self.pool = pool or MemoryPool()
        self.can_record = True

    def record(self, run: Callable[[], Sequence[Tensor]]) -> Recorded | None:
        """Return the graph of the kernels that `run` launches, which do not run yet. Return None, from then
        on always, if it uses torch operators in addition to kernels."""
        if not self.can_record:
            return None
        try:
            with ForbidOperators(), capture(self._allocate) as launches:  # type: ignore[no-untyped-call]
                outputs = run()
        except TorchOperatorError as error:
            logger.info("%s are not captured as kernel graphs, because the model uses %s", self._name, error)
            self.can_record = False
            return None
        return Recorded(KernelGraph(launches), [self.pool.read_view(x) for x in outputs])

    def _allocate(self, shape: tuple[int, ...]) -> Tensor:
        with allow_operators():
            return self.pool.empty(shape)
