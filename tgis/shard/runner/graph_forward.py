"""Captures the kernel launches of small steps on the CPU and replays them for similar steps."""

from dataclasses import dataclass

from torch import Tensor

from tgis.shard.attention.interface import Attention
from tgis.shard.kernels.cpu.kernel_graph import KernelGraph
from tgis.shard.models.interface import NO_TAPS, Model, StepInputs, Taps
from tgis.shard.runner.batch_builder import Batch
from tgis.shard.runner.forward import Forward, Outputs
from tgis.shard.runner.graph_recorder import MAX_CAPTURED_TOKENS, GraphRecorder


class GraphForward(Forward):
    """Forward pass that captures small steps and replays them.

    A step qualifies if it has few tokens and samples after each of them. Steps with the same number of tokens
    launch the same kernels, so the first such step is captured and later ones replay it. All other steps run
    layer by layer, as do models that use torch operators in addition to kernels."""

    def __init__(self, model: Model, attention: Attention, taps: Taps = NO_TAPS):
        super().__init__(model, attention, taps)
        self._recorder = GraphRecorder("steps")
        self._prompt_recorder = GraphRecorder("prompts", self._recorder.pool)
        self._steps = dict[tuple[int, bool], _CapturedStep]()  # by number of tokens, and whether it has taps

    def __call__(self, batch: Batch, is_tapped: bool = True) -> Outputs:
        if not self._recorder.can_record or not _is_plain(batch):
            return super().__call__(batch, is_tapped)
        taps = self.taps if is_tapped else NO_TAPS
        key = len(batch.inputs.token_ids), bool(taps)
        step = self._steps.get(key) or self._capture(batch.inputs, taps)
        return super().__call__(batch, is_tapped) if step is None else step.run(batch.inputs)

    def find_graph(self, num_tokens: int) -> KernelGraph | None:
        """Return the kernel graph of plain steps with that many tokens, without taps if there are several, or
        None before the first such step."""
        step = self._steps.get((num_tokens, False)) or self._steps.get((num_tokens, True))
        return None if step is None else step.graph

    def run_layers(self, inputs: StepInputs, taps: Taps) -> tuple[Tensor, Tensor | None]:
        """Record all kernels, and then run them."""
        if not self._can_record(inputs):
            return super().run_layers(inputs, taps)
        recorded = self._prompt_recorder.record(lambda: self._list_outputs(inputs, taps))
        if recorded is None:
            return super().run_layers(inputs, taps)
        recorded.graph.replay()
        x, *tapped = recorded.outputs
        return x, tapped[0] if tapped else None

    def _can_record(self, inputs: StepInputs) -> bool:
        return self._prompt_recorder.can_record and _is_bare(inputs)

    def _capture(self, inputs: StepInputs, taps: Taps) -> "_CapturedStep | None":
        def run() -> list[Tensor]:
            x, *tapped = self._list_outputs(inputs, taps)
            return [x, self.model.logits(x), *tapped]

        recorded = self._recorder.record(run)
        if recorded is None:
            return None
        step = _CapturedStep(recorded.graph, inputs, Outputs(*recorded.outputs))
        self._steps[len(inputs.token_ids), bool(taps)] = step
        return step


    def _list_outputs(self, inputs: StepInputs, taps: Taps) -> list[Tensor]:
        x, tapped = super().run_layers(inputs, taps)
        return [x] if tapped is None else [x, tapped]


@dataclass(frozen=True)
class _CapturedStep:
    graph: KernelGraph
    inputs: StepInputs  # memory that the captured kernels read; later inputs are copied into it
    outputs: Outputs

    def run(self, inputs: StepInputs) -> Outputs:
        fixed = self.inputs
        fixed.token_ids.copy_(inputs.token_ids)
        fixed.positions.copy_(inputs.positions)
        inputs.plan.copy_into(fixed.plan)
        if fixed.cross is not None and inputs.cross is not None:
            inputs.cross.copy_into(fixed.cross)
        if fixed.states is not None and inputs.states is not None:
            inputs.states.copy_into(fixed.states)
        self.graph.replay()
        return self.outputs


def _is_plain(batch: Batch) -> bool:
    inputs = batch.inputs
    num_tokens = len(inputs.token_ids)
    is_sampled = len(batch.sampled_x) == num_tokens and not batch.input_spans
    return num_tokens <= MAX_CAPTURED_TOKENS and _is_bare(inputs) and is_sampled


def _is_bare(inputs: StepInputs) -> bool:
    """Return True if the layers compute these inputs without torch operators, as far as inputs decide."""
    return inputs.is_long is None and inputs.virtual is None and inputs.adapters is None
