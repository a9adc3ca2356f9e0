"""States of sequences in models with recurrent layers of any kind."""

import torch

from tgis.shard.collectives import ProcessGroup
from tgis.shard.memory.state_cache import StateCache, StateShape, StepStates
from tgis.shard.models.parts import delta_net, mamba
from tgis.shard.models.spec import DecoderSpec


def find_state_shape(spec: object, size: int, chunk: int = 0) -> StateShape | None:
    """Return the shape of a sequence's state on one of `size` ranks, or None if the model keeps none. `chunk`
    is the platform's, see `StateShape`."""
    if not isinstance(spec, DecoderSpec):
        return None
    if spec.mamba is not None:
        return StateShape(len(spec.mamba.layers), mamba.local_sizes(spec.mamba, size), chunk)
    if spec.delta_net is not None:
        return StateShape(len(spec.delta_net.layers), delta_net.local_sizes(spec.delta_net, size), chunk)
    return None


def open_state(spec: object, group: ProcessGroup, num_tokens: int) -> StepStates | None:
    """Return the state of one sequence before its first token, for a step of that many tokens, or None if the
    model keeps none."""
    shape = find_state_shape(spec, group.size)
    if shape is None:
        return None
    return StepStates(StateCache(shape, 1, group.device), torch.tensor([0]), torch.tensor([0, num_tokens]))
