"""`Kernels` in plain torch operators, for any device. Activations are float32. Products convert activations
to the weights' type."""

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.checkpoint.tensors import Stored, read_pieces
from tgis.shard.kernels.portable import delta_net, mamba
from tgis.shard.layers.activation import CLAMPED_SWIGLU
from tgis.shard.layers.lora import Deltas, LowRank, TokenAdapters
from tgis.shard.layers.ops import HeadNorm, Product, Unfused
from tgis.shard.layers.states import DeltaNet, Mamba2
from tgis.shard.memory.state_cache import StepStates
from tgis.shard.quant.interface import MatrixRole

logger = logging.getLogger(__name__)

_PIECE = 1 << 22  # approximate number of weights read at a time

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


class TorchKernels(Unfused):
    """`Kernels` by torch operators on `device`. `pack` accepts weights from any device."""

    def __init__(self, device: torch.device):
        self.device = device

    def pack(self, weight: Stored, dtype: torch.dtype, role: MatrixRole = "linear") -> Product:
        """Implement `Kernels.pack`. A matrix outside the range of float16 stays float32, with a warning."""
        packed = read_packed(weight, dtype, self.device)
        return lambda x: F.linear(x.to(packed.dtype), packed).float()

    def prepare_adapters(self) -> None:
        """Do nothing: no kernel needs to be compiled."""

    def add_low_rank(self, y: Tensor, x: Tensor, deltas: Deltas, adapters: TokenAdapters) -> None:
        for i, tokens in adapters.groups:
            rows = x[tokens].float() if deltas.parts[i] else x  # [n, in_features]
            for one in deltas.parts[i]:
                _columns(y, one).index_add_(0, tokens, (rows @ one.a @ one.b).to(y.dtype))

    def add_looked_up(self, y: Tensor, token_ids: Tensor, deltas: Deltas, adapters: TokenAdapters) -> None:
        for i, tokens in adapters.groups:
            for one in deltas.parts[i]:
                _columns(y, one).index_add_(0, tokens, one.a[token_ids[tokens]] @ one.b)

    def rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(_add(x, delta), weight.shape, weight, eps)

    def layer_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        return F.layer_norm(_add(x, delta), weight.shape, weight, bias, eps)

    def look_up(self, table: Tensor, ids: Tensor, offset: int = 0) -> Tensor:
        return F.embedding(ids + offset if offset else ids, table).to(torch.float32, copy=True)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    def multiply_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return x.mul_(torch.sigmoid(gate.float()))

    def concatenate(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x, y), 1)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x.mul_(factor)

    def clamp(self, x: Tensor, limit: float) -> Tensor:
        return x.clamp_(-limit, limit)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return x.div_(cap).tanh_().mul_(cap)

    def position_factors(self, positions: Tensor, beta: float, length: int, shift: int) -> Tensor:
        periods = torch.div(positions + shift, length, rounding_mode="floor")
        return 1 + beta * torch.log1p(periods.float())

    def scale_rows(self, x: Tensor, factors: Tensor) -> Tensor:
        return x.mul_(factors.unsqueeze(1))

    def activate(self, x: Tensor, name: str) -> Tensor:
        return x.copy_(ACTIVATIONS[name](x))

    def multiply_gated(self, gate_up: Tensor, name: str) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return multiply_gated(gate, up, name)

    def mix_states(self, rows: Tensor, mixer: Mamba2, layer: int, states: StepStates) -> Tensor:
        return mamba.mix_states(rows, mixer, layer, states)

    def gate_norm(self, x: Tensor, rows: Tensor, mixer: Mamba2) -> Tensor:
        return mamba.gate_norm(x, rows, mixer)

    def mix_delta(
        self, rows: Tensor, gates: Tensor, mixer: DeltaNet, layer: int, states: StepStates
    ) -> Tensor:
        return delta_net.mix_delta(rows, gates, mixer, layer, states)

    def angles(
        self,
        positions: Tensor,
        inv_freq: Tensor,
        amplitudes: Tensor,
        factor_sets: Tensor | None = None,
        growth: Tensor | None = None,
    ) -> Tensor:
        if factor_sets is None:
            inv_freq, amplitudes = inv_freq[:1], amplitudes[:1]
        else:
            inv_freq, amplitudes = inv_freq[factor_sets], amplitudes[factor_sets]
        if growth is not None:
            half = inv_freq.shape[1]
            steps = torch.arange(half, device=growth.device) / max(half - 1, 1)  # [half]
            shrunk = torch.exp(-growth.double().log().unsqueeze(-1) * steps)  # [num_tokens, half]
            inv_freq = (inv_freq * shrunk).float()
        rotations = positions.float().unsqueeze(-1) * inv_freq  # [num_tokens, half]
        return torch.stack((rotations.cos(), rotations.sin())) * amplitudes.unsqueeze(-1)


def multiply_gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    if name == CLAMPED_SWIGLU:
        return ACTIVATIONS["quick_gelu"](gate.clamp(max=7.0)) * (up.clamp(-7.0, 7.0) + 1)
    return ACTIVATIONS[name](gate) * up


def read_packed(weight: Stored, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Read a weight a few rows at a time. It stays float32 if it is outside the range of float16."""
    packed = torch.empty(weight.shape, dtype=dtype, device=device)
    largest = torch.tensor(0.0)
    for rows, piece in read_pieces(weight, _PIECE):
        packed[rows] = piece.to(device)
        largest = largest.maximum(piece.abs().max())
    if dtype == torch.float16 and not largest <= torch.finfo(dtype).max:
        logger.warning("%s does not fit float16 and is kept as float32", weight.label)
        return read_packed(weight, torch.float32, device)
    return packed


def split_heads(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    angles: Tensor | None,
    head_norm: HeadNorm | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv into q, k, v of [num_tokens, heads, head_dim]. See `Attention.run`."""
    num_rows = num_heads + 2 * num_kv_heads
    heads = qkv.view(len(qkv), num_rows, qkv.shape[1] // num_rows)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
    if head_norm is not None:
        q = F.rms_norm(q, q.shape[2:], head_norm.q_weight, head_norm.eps)
        k = F.rms_norm(k, k.shape[2:], head_norm.k_weight, head_norm.eps)
        if head_norm.v_weight is not None:
            v = F.rms_norm(v, v.shape[2:], head_norm.v_weight, head_norm.eps)
    return _rotate(q, angles), _rotate(k, angles), _rotate(v, None)


def _add(x: Tensor, delta: Tensor | None) -> Tensor:
    return x if delta is None else x.add_(delta)


def _columns(y: Tensor, one: LowRank) -> Tensor:
    return y[:, one.first : one.first + one.b.shape[1]]


def _rotate(x: Tensor, angles: Tensor | None) -> Tensor:
    """Apply rotary embeddings. Return a new tensor, [num_tokens, heads, head_dim]."""
    if angles is None:
        return x.clone(memory_format=torch.contiguous_format)
    half = angles.shape[-1]
    cosines, sines = angles.unsqueeze(2)  # [num_tokens, 1, half] each
    one, other, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat((one * cosines - other * sines, other * cosines + one * sines, rest), -1)
