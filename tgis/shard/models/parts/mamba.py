"""Mamba 2 layer, split over ranks by heads."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.linear import ColumnParallel, RowParallel
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.ops import Parts
from tgis.shard.layers.states import Mamba2
from tgis.shard.memory.state_cache import StateSizes, StepStates
from tgis.shard.models.parts.blocks import BranchInput, BranchOutput, Finish
from tgis.shard.models.spec import DecoderSpec, MambaSpec


class MambaMixer:
    """Mamba 2 layer number `layer` among those of the model."""

    def __init__(self, spec: DecoderSpec, parts: Parts, path: str, layer: int, finish: Finish | None = None):
        mamba = spec.mamba
        assert mamba is not None, "only models with such layers have this part"
        self._group = parts.group
        self._kernels = parts.kernels
        self._layer = layer
        # Number of ranks that share a norm's group.
        self._num_sharing = max(parts.group.size // mamba.num_groups, 1) if mamba.gating != "no_norm" else 1
        self._gate_scale, *_, self._step_scale = mamba.part_scales
        widths, pieces = _list_widths(mamba, parts.group)
        self._in = ColumnParallel(parts, f"{path}.in", spec.hidden_size, widths, mamba.proj_bias, pieces)
        out = RowParallel(parts, f"{path}.out", mamba.width, spec.hidden_size, mamba.out_bias)
        self._output = BranchOutput(parts, out, finish)
        self._mixer = _read_mixer(mamba, parts, path, spec.norm_eps)

    def __call__(
        self, x: Tensor, source: BranchInput, states: StepStates | None, adapters: TokenAdapters | None
    ) -> Tensor | None:
        """Return the output still to be added to x, the residual stream, or None if it was added."""
        assert states is not None, "a step of this model has states"
        rows = self._kernels.norm_product(*source, self._in, None, adapters)
        self._scale_parts(rows)
        y = self._kernels.mix_states(rows, self._mixer, self._layer, states)  # [num_tokens, own width]
        y = (
            self._gate_norm(y, rows)
            if self._num_sharing > 1
            else self._kernels.gate_norm(y, rows, self._mixer)
        )
        return self._output(x, y, adapters)

    def _gate_norm(self, y: Tensor, rows: Tensor) -> Tensor:
        """Normalise over all ranks that have parts of this rank's only group."""
        gate = F.silu(rows[:, : y.shape[1]].float())
        gates_first = self._mixer.gating == "before_norm"
        y = y * gate if gates_first else y
        squares = self._group.all_gather(y.square().sum(-1, keepdim=True))  # [num_tokens, num_ranks]
        first = self._group.rank // self._num_sharing * self._num_sharing
        total = squares[:, first : first + self._num_sharing].sum(-1, keepdim=True)
        scale = (total / (y.shape[1] * self._num_sharing) + self._mixer.eps).rsqrt()
        y = y * scale * self._mixer.norm_weight
        return y if gates_first else y * gate

    def _scale_parts(self, rows: Tensor) -> None:
        """Multiply gate and time step by their factors. The convolution multiplies the other parts."""
        sizes = self._mixer.sizes
        if self._gate_scale != 1:
            self._kernels.scale(rows[:, : sizes.width], self._gate_scale)
        if self._step_scale != 1:
            self._kernels.scale(rows[:, -sizes.num_heads :], self._step_scale)


def local_sizes(mamba: MambaSpec, size: int) -> StateSizes:
    return StateSizes(
        mamba.num_heads // size,
        mamba.head_dim,
        max(mamba.num_groups // size, 1),
        mamba.state_size,
        mamba.kernel_size,
    )


def _list_widths(mamba: MambaSpec, group: ProcessGroup) -> tuple[list[int], list[int]]:
    """Return the widths of the first matrix's parts, and the number of pieces into which ranks cut each."""
    size = group.size
    shared = min(group.size, mamba.num_groups)
    widths = [mamba.width, mamba.width, mamba.group_width, mamba.group_width, mamba.num_heads]
    return widths, [size, size, shared, shared, size]


def _read_mixer(mamba: MambaSpec, parts: Parts, path: str, eps: float) -> Mamba2:
    """Read this rank's part of the vectors and the convolution. Raises WeightsError."""
    group = parts.group
    sizes = local_sizes(mamba, group.size)
    heads = [group.slice(mamba.num_heads)]
    channels = _list_channels(mamba, group)

    def read(name: str, shape: tuple[int, ...], rows: Sequence[slice]) -> Tensor:
        # These stay float32, because rounding errors of the decay grow with every token.
        stored = parts.weights.find(f"{path}.{name}", shape)
        return torch.cat([stored.read(part) for part in rows]).to(parts.kernels.device, torch.float32)

    num_channels = mamba.width + 2 * mamba.group_width
    kernel = read("conv.weight", (num_channels, 1, mamba.kernel_size), channels).squeeze(1)
    kernel = kernel * _repeat_scales(mamba, sizes).to(kernel.device)
    bias = read("conv.bias", (num_channels,), channels) if mamba.conv_bias else kernel.new_zeros(len(kernel))
    has_norm = mamba.gating != "no_norm"
    own = [group.slice(mamba.width)]
    return Mamba2(
        sizes=sizes,
        kernel=kernel.T.contiguous(),
        kernel_bias=bias,
        decay=-read("A_log", (mamba.num_heads,), heads).exp(),
        time_bias=read("dt_bias", (mamba.num_heads,), heads),
        skip=read("D", (mamba.num_heads,), heads),
        norm_weight=read("norm.weight", (mamba.width,), own) if has_norm else kernel.new_ones(sizes.width),
        eps=eps,
        min_step=mamba.min_step,
        max_step=mamba.max_step,
        gating=mamba.gating,
    )


def _repeat_scales(mamba: MambaSpec, sizes: StateSizes) -> Tensor:
    """Return the factors of this rank's channels of the convolution, [num_channels, 1]."""
    widths = [sizes.width, sizes.group_width, sizes.group_width]
    return torch.tensor(mamba.part_scales[1:4]).repeat_interleave(torch.tensor(widths)).unsqueeze(1)


def _list_channels(mamba: MambaSpec, group: ProcessGroup) -> list[slice]:
    shared = min(group.size, mamba.num_groups)
    own = group.slice(mamba.width)
    own_group = group.slice(mamba.group_width, shared)
    starts = (mamba.width, mamba.width + mamba.group_width)
    return [own, *(slice(start + own_group.start, start + own_group.stop) for start in starts)]
