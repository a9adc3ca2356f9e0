"""Gated DeltaNet layer, split over ranks by heads of values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.linear import ColumnParallel, Replicated, RowParallel
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.ops import Parts, normalise
from tgis.shard.layers.states import DeltaNet
from tgis.shard.memory.state_cache import StateSizes, StepStates
from tgis.shard.models.parts.blocks import BranchInput, BranchOutput, Finish
from tgis.shard.models.spec import DecoderSpec, DeltaNetSpec


class DeltaNetMixer:
    """Gated DeltaNet layer number `layer` among those of the model."""

    def __init__(self, spec: DecoderSpec, parts: Parts, path: str, layer: int, finish: Finish | None = None):
        delta = spec.delta_net
        assert delta is not None, "only models with such layers have this part"
        self._kernels = parts.kernels
        self._layer = layer
        size = parts.group.size
        shared = min(size, delta.num_key_heads)  # ranks may share heads of queries and keys
        widths = [delta.width, delta.key_width, delta.key_width, delta.width]
        pieces = [size, shared, shared, size]
        self._in = ColumnParallel(parts, f"{path}.in", spec.hidden_size, widths, False, pieces)
        # Rounding errors of the decay grow with every token.
        self._gates = Replicated(parts, f"{path}.gates", spec.hidden_size, 2 * delta.num_heads)
        out = RowParallel(parts, f"{path}.out", delta.width, spec.hidden_size, False)
        self._output = BranchOutput(parts, out, finish)
        self._mixer = _read_mixer(delta, parts, path, spec.norm_eps)

    def __call__(
        self, x: Tensor, source: BranchInput, states: StepStates | None, adapters: TokenAdapters | None
    ) -> Tensor | None:
        """Return the output still to be added to x, the residual stream, or None if it was added."""
        assert states is not None, "a step of this model has states"
        normed = normalise(self._kernels, *source)
        rows, gates = self._in(normed, adapters), self._gates(normed, adapters)
        y = self._kernels.mix_delta(rows, gates, self._mixer, self._layer, states)
        return self._output(x, y, adapters)


def local_sizes(delta: DeltaNetSpec, size: int) -> StateSizes:
    return StateSizes(
        delta.num_heads // size,
        delta.head_dim,
        max(delta.num_key_heads // size, 1),
        delta.key_dim,
        delta.kernel_size,
    )


def _read_mixer(delta: DeltaNetSpec, parts: Parts, path: str, eps: float) -> DeltaNet:
    """Read this rank's part of the vectors and the convolution. Raises WeightsError."""
    group = parts.group
    heads = group.slice(delta.num_heads)

    def read(name: str, shape: tuple[int, ...], rows: Sequence[slice]) -> Tensor:
        stored = parts.weights.find(f"{path}.{name}", shape)
        return torch.cat([stored.read(part) for part in rows]).to(parts.kernels.device, torch.float32)

    num_channels = delta.width + 2 * delta.key_width
    kernel = read("conv.weight", (num_channels, 1, delta.kernel_size), _list_channels(delta, group)).squeeze(
        1
    )
    return DeltaNet(
        sizes=local_sizes(delta, group.size),
        first_head=heads.start,
        total_heads=delta.num_heads,
        kernel=kernel.T.contiguous(),
        kernel_bias=kernel.new_zeros(len(kernel)),
        decay=-read("A_log", (delta.num_heads,), [heads]).exp(),
        time_bias=read("dt_bias", (delta.num_heads,), [heads]),
        norm_weight=read("norm.weight", (delta.head_dim,), [slice(0, delta.head_dim)]),
        eps=eps,
    )


def _list_channels(delta: DeltaNetSpec, group: ProcessGroup) -> list[slice]:
    """Return this rank's channels of the convolution: queries, keys, values."""
    shared = min(group.size, delta.num_key_heads)
    keys = group.slice(delta.key_width, shared)
    values = group.slice(delta.width)
    parts = ((0, keys), (delta.key_width, keys), (2 * delta.key_width, values))
    return [slice(start + own.start, start + own.stop) for start, own in parts]
