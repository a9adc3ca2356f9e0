"""Captures the kernel launches of a draft head's small steps on the CPU and replays them."""

from dataclasses import dataclass

from torch import Tensor

from tgis.shard.attention.interface import Attention
from tgis.shard.kernels.cpu.kernel_graph import KernelGraph
from tgis.shard.models.interface import StepInputs
from tgis.shard.runner.graph_recorder import MAX_CAPTURED_TOKENS, GraphRecorder
from tgis.shard.runner.proposers.head_forward import HeadForward
from tgis.shard.speculators.draft_head import DraftHead


class GraphHeadForward(HeadForward):
    """`HeadForward` that captures steps with few tokens, and their scores, and replays them.

    Steps with the same number of tokens launch the same kernels. The tokens that are scored are fewer, so
    their kernels are separate graphs."""

    def __init__(self, head: DraftHead, attention: Attention) -> None:
        super().__init__(head, attention)
        self._recorder = GraphRecorder("steps of the speculator")
        self._steps = dict[int, _CapturedAdvance]()  # by number of tokens
        self._scores = dict[int, _CapturedScores]()  # by number of states

    def advance(self, states: Tensor, inputs: StepInputs) -> Tensor:
        step = self._steps.get(len(states)) or self._capture(states, inputs)
        return super().advance(states, inputs) if step is None else step.run(states, inputs)

    def _score(self, states: Tensor) -> Tensor:
        scores = self._scores.get(len(states)) or self._capture_scores(states)
        return super()._score(states) if scores is None else scores.run(states)

    def _capture(self, states: Tensor, inputs: StepInputs) -> "_CapturedAdvance | None":
        if len(states) > MAX_CAPTURED_TOKENS:
            return None
        fixed = self._recorder.pool.empty(states.shape)
        recorded = self._recorder.record(lambda: [self.head.advance(fixed, inputs, self._attention)])
        if recorded is None:
            return None
        step = self._steps[len(states)] = _CapturedAdvance(recorded.graph, fixed, inputs, recorded.outputs[0])
        return step

    def _capture_scores(self, states: Tensor) -> "_CapturedScores | None":
        if len(states) > MAX_CAPTURED_TOKENS:
            return None
        fixed = self._recorder.pool.empty(states.shape)
        recorded = self._recorder.record(lambda: [self.head.score(fixed)])
        if recorded is None:
            return None
        scores = self._scores[len(states)] = _CapturedScores(recorded.graph, fixed, recorded.outputs[0])
        return scores


@dataclass(frozen=True)
class _CapturedAdvance:
    graph: KernelGraph
    states: Tensor  # memory that the captured kernels read, like the next; later inputs are copied into it
    inputs: StepInputs
    output: Tensor

    def run(self, states: Tensor, inputs: StepInputs) -> Tensor:
        self.states.copy_(states)
        self.inputs.token_ids.copy_(inputs.token_ids)
        self.inputs.positions.copy_(inputs.positions)
        inputs.plan.copy_into(self.inputs.plan)
        self.graph.replay()
        return self.output.clone()  # the graphs of scores use the same memory


@dataclass(frozen=True)
class _CapturedScores:
    graph: KernelGraph
    states: Tensor
    output: Tensor

    def run(self, states: Tensor) -> Tensor:
        self.states.copy_(states)
        self.graph.replay()
        return self.output
