"""Records the kernel launches of steps on the CPU, and replays them for similar steps."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tgis.shard.attention.interface import Attention
from tgis.shard.kernels.cpu.kernel_graph import KernelGraph
from tgis.shard.models.interface import NO_TAPS, Model, StepInputs, Taps
from tgis.shard.runner.batch_builder import Batch
from tgis.shard.runner.forward import Forward, Outputs
from tgis.shard.runner.graph_recorder import MAX_CAPTURED_TOKENS, GraphRecorder

# Maximum number of sizes of steps with prompts whose kernels are kept.
_MAX_KEPT = 32


class GraphForward(Forward):
    """Forward pass that records its kernels and runs them without Python between them.

    Steps with the same number of tokens launch the same kernels. If a step has few tokens and samples after
    each of them, the kernels of all its parts are recorded; otherwise only those of the layers. Both are kept
    for later steps, the latter for the sizes that were used last. Steps with adapters or virtual tokens run
    layer by layer, as do models that use torch operators in addition to kernels."""

    def __init__(self, model: Model, attention: Attention, taps: Taps = NO_TAPS):
        super().__init__(model, attention, taps)
        self._recorder = GraphRecorder("steps")
        self._layers_recorder = GraphRecorder("prompts", self._recorder.pool)
        # By number of tokens, and whether the step has taps.
        self._steps = dict[tuple[int, bool], _RecordedStep]()
        self._layers = OrderedDict[tuple[int, bool], _RecordedStep]()

    def __call__(self, batch: Batch, is_tapped: bool = True) -> Outputs:
        if not self._recorder.can_record or not _is_whole(batch):
            return super().__call__(batch, is_tapped)
        taps = self.taps if is_tapped else NO_TAPS
        key = len(batch.inputs.token_ids), bool(taps)
        step = self._steps.get(key)
        if step is None:
            step = _record(self._recorder, batch.inputs, lambda: self._compute_all(batch.inputs, taps))
            if step is None:
                return super().__call__(batch, is_tapped)
            self._steps[key] = step
        return Outputs(*step.run(batch.inputs))

    def run_layers(self, inputs: StepInputs, taps: Taps) -> tuple[Tensor, Tensor | None]:
        if not self._layers_recorder.can_record or not _is_bare(inputs):
            return super().run_layers(inputs, taps)
        key = len(inputs.token_ids), bool(taps)
        step = self._layers.get(key)
        if step is None:
            step = _record(self._layers_recorder, inputs, lambda: self._compute_layers(inputs, taps))
            if step is None:
                return super().run_layers(inputs, taps)
        if inputs.states is None:  # with states, the kernels also depend on the number of sequences
            self._keep_layers(key, step)
        x, *tapped = step.run(inputs)
        return x, tapped[0] if tapped else None

    def find_graph(self, num_tokens: int) -> KernelGraph | None:
        """Return the kernel graph of steps with that many tokens that sample after each, or else of the
        layers of other steps; those without taps if there are several. Return None before the first such
        step."""
        keys = [(num_tokens, is_tapped) for is_tapped in (False, True)]
        steps = (kept.get(key) for kept in (self._steps, self._layers) for key in keys)
        return next((step.graph for step in steps if step is not None), None)

    def _keep_layers(self, key: tuple[int, bool], step: "_RecordedStep") -> None:
        self._layers[key] = step
        self._layers.move_to_end(key)
        if len(self._layers) > _MAX_KEPT:
            self._layers.popitem(last=False)

    def _compute_all(self, inputs: StepInputs, taps: Taps) -> list[Tensor]:
        x, *tapped = self._compute_layers(inputs, taps)
        return [x, self.model.logits(x), *tapped]

    def _compute_layers(self, inputs: StepInputs, taps: Taps) -> list[Tensor]:
        x, tapped = super().run_layers(inputs, taps)
        return [x] if tapped is None else [x, tapped]


@dataclass(frozen=True)
class _RecordedStep:
    graph: KernelGraph
    inputs: StepInputs  # memory that the kernels read; later inputs are copied into it
    outputs: Sequence[Tensor]

    def run(self, inputs: StepInputs) -> Sequence[Tensor]:
        if inputs is not self.inputs:
            self._copy(inputs)
        self.graph.replay()
        return self.outputs

    def _copy(self, inputs: StepInputs) -> None:
        fixed = self.inputs
        fixed.token_ids.copy_(inputs.token_ids)
        fixed.positions.copy_(inputs.positions)
        inputs.plan.copy_into(fixed.plan)
        if fixed.cross is not None and inputs.cross is not None:
            inputs.cross.copy_into(fixed.cross)
        if fixed.states is not None and inputs.states is not None:
            inputs.states.copy_into(fixed.states)


def _record(
    recorder: GraphRecorder, inputs: StepInputs, compute: Callable[[], Sequence[Tensor]]
) -> _RecordedStep | None:
    recorded = recorder.record(compute)
    return None if recorded is None else _RecordedStep(recorded.graph, inputs, recorded.outputs)


def _is_whole(batch: Batch) -> bool:
    """Return True if all parts of a step are recorded."""
    num_tokens = len(batch.inputs.token_ids)
    is_sampled = len(batch.sampled_x) == num_tokens and not batch.input_spans
    return num_tokens <= MAX_CAPTURED_TOKENS and _is_bare(batch.inputs) and is_sampled


def _is_bare(inputs: StepInputs) -> bool:
    """Return True if the inputs need no torch operators in the layers."""
    return inputs.is_long is None and inputs.virtual is None and inputs.adapters is None
