"""Captures the kernel launches of a speculator's stages on the CPU and replays them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.kernels.cpu.kernel_graph import KernelGraph
from tgis.shard.runner.graph_recorder import MAX_CAPTURED_TOKENS, GraphRecorder


class GraphStages:
    """`StageRunner` that captures stages for few rows and replays them. A stage launches the same kernels for
    the same number of rows."""

    def __init__(self) -> None:
        self._recorder = GraphRecorder("drafts of the speculator")
        self._stages = dict[tuple[int, int], _CapturedStage]()  # by number of the stage and of rows

    def __call__(
        self, stage: int, compute: Callable[..., Sequence[Tensor]], *inputs: Tensor
    ) -> Sequence[Tensor]:
        key = stage, len(inputs[0])
        captured = self._stages.get(key) or self._capture(key, compute, inputs)
        return compute(*inputs) if captured is None else captured.run(inputs)

    def find_graph(self, stage: int, num_rows: int) -> KernelGraph | None:
        """Return the kernel graph of a stage, or None if it is not captured."""
        captured = self._stages.get((stage, num_rows))
        return None if captured is None else captured.graph

    def _capture(
        self, key: tuple[int, int], compute: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> "_CapturedStage | None":
        if key[1] > MAX_CAPTURED_TOKENS or not self._recorder.can_record:
            return None
        fixed = [torch.empty_like(x) for x in inputs]
        recorded = self._recorder.record(lambda: compute(*fixed))
        if recorded is None:
            return None
        captured = self._stages[key] = _CapturedStage(recorded.graph, fixed, recorded.outputs)
        return captured


@dataclass(frozen=True)
class _CapturedStage:
    graph: KernelGraph
    inputs: Sequence[Tensor]  # memory that the captured kernels read; later inputs are copied into it
    outputs: Sequence[Tensor]

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        for fixed, x in zip(self.inputs, inputs, strict=True):
            fixed.copy_(x)
        self.graph.replay()
        return self.outputs
