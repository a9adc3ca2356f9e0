"""How a step goes through the model: call by call, or as a tape of the kernels that an equal step called."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tgis.shard.attention.interface import Attention, AttentionMetadata
from tgis.shard.kernels.cpu.jit import compiler
from tgis.shard.kernels.cpu.kernel_graph import Pool, Recorder, Tape
from tgis.shard.models.interface import Model, StepInputs
from tgis.shard.runner.batch_builder import Batch

logger = logging.getLogger(__name__)

MAX_TAPED_TOKENS = 64  # of a step; larger ones take so long that a tape would save next to nothing

# What the model makes of the step's tokens, [num_tokens, any], and the logits of those that are sampled
# after, float32 [num_sampled, vocab_size], where there are any.
Outputs = tuple[Tensor, Tensor | None]


class Forward:
    """Steps through `model`, whose keys and values `attention` keeps. Outputs are valid until the next
    step."""

    def __init__(self, model: Model, attention: Attention):
        self.model, self.attention = model, attention

    def __call__(self, batch: Batch) -> Outputs:
        x = self.model.forward(batch.inputs, self.attention)
        adapters, at = batch.inputs.adapters, batch.sampled_x
        if not len(at):
            return x, None
        if len(at) == len(x):
            return x, self.model.logits(x, adapters)
        return x, self.model.logits(x[at], adapters and adapters.take(at))


class TapedForward(Forward):
    """Records the first step of every small number of tokens, all of which are sampled after; such steps call
    the same kernels, so that later ones only run the tape.

    Steps with more to them, and models that compute with more than kernels, go call by call."""

    def __init__(self, model: Model, attention: Attention):
        super().__init__(model, attention)
        self._pool, self._tapes = Pool(), dict[int, _TapedStep]()
        self._is_recordable = True

    def __call__(self, batch: Batch) -> Outputs:
        if not self._is_recordable or not _is_plain(batch):
            return super().__call__(batch)
        step = self._tapes.get(len(batch.inputs.token_ids)) or self._record(batch.inputs)
        return super().__call__(batch) if step is None else step.run(batch.inputs)

    def find_tape(self, num_tokens: int) -> Tape | None:
        """Of plain steps of so many tokens, once there was one."""
        step = self._tapes.get(num_tokens)
        return None if step is None else step.tape

    def _record(self, inputs: StepInputs) -> "_TapedStep | None":
        recorder, fixed = Recorder(self._pool), _copy(inputs)
        try:
            with _NoOperators(), compiler.record(recorder):  # type: ignore[no-untyped-call]
                x = self.model.forward(fixed, self.attention)
                logits = self.model.logits(x)
        except _OperatorError as error:
            logger.info("steps are not taped: the model computes with %s", error)
            self._is_recordable = False
            return None
        outputs = self._pool.keep(x), self._pool.keep(logits)
        step = _TapedStep(recorder.make_tape(), fixed, outputs)
        self._tapes[len(fixed.token_ids)] = step
        return step


@dataclass(frozen=True)
class _TapedStep:
    tape: Tape
    inputs: StepInputs
    """Where the tape's kernels look for them."""
    outputs: tuple[Tensor, Tensor]

    def run(self, inputs: StepInputs) -> Outputs:
        fixed = self.inputs
        fixed.token_ids.copy_(inputs.token_ids)
        fixed.positions.copy_(inputs.positions)
        fixed.metadata.table.copy_(inputs.metadata.table)
        if fixed.cross is not None and inputs.cross is not None:
            fixed.cross.table.copy_(inputs.cross.table)
        self.tape.run()
        return self.outputs


def _is_plain(batch: Batch) -> bool:
    inputs, num_tokens = batch.inputs, len(batch.inputs.token_ids)
    is_bare = inputs.is_long is None and inputs.virtual is None and inputs.adapters is None
    is_sampled = len(batch.sampled_x) == num_tokens and not batch.input_spans
    return num_tokens <= MAX_TAPED_TOKENS and is_bare and is_sampled


def _copy(inputs: StepInputs) -> StepInputs:
    """Inputs that stay where they are."""
    return replace(
        inputs,
        token_ids=inputs.token_ids.clone(),
        positions=inputs.positions.clone(),
        metadata=_copy_table(inputs.metadata),
        cross=None if inputs.cross is None else _copy_table(inputs.cross),
    )


def _copy_table(metadata: AttentionMetadata) -> AttentionMetadata:
    copy = replace(metadata)
    copy.__dict__["table"] = metadata.table.clone()
    return copy


class _OperatorError(Exception):
    """An operator of torch's has no place on a tape; the text is its name."""


class _NoOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets nothing of torch pass but other views of the same memory."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aliases = [given.alias_info for given in func._schema.returns]
        if not aliases or any(alias is None or alias.is_write for alias in aliases):
            raise _OperatorError(func)
        return func(*args, **(kwargs or {}))
