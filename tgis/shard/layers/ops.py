"""What a platform provides to the layers, chosen once when a model is loaded, and what every layer is made
from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from tgis.shard.checkpoint.weights import Weights
from tgis.shard.collectives import World
from tgis.shard.layers.lora import Cut, Deltas, TokenAdapters

Quantization = Literal["none", "int8"]


class Product(Protocol):
    """x W^T for a weight that has been packed."""

    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def num_bytes(self) -> int:
        """Of the weight as it is packed."""

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features], newly allocated."""


@dataclass(frozen=True)
class HeadNorm:
    """The RMS norm of every head of queries and keys; weights are float32 [head_dim]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class Kernels(Protocol):
    """Activations are float32 and contiguous; results are new tensors unless it says otherwise."""

    @property
    def device(self) -> torch.device:
        """Where weights, activations and results are."""

    def pack(self, weight: Tensor, dtype: torch.dtype, label: str) -> Product:
        """weight: [out_features, in_features], not kept. `label` names it in warnings."""

    @property
    def pack_int8(self) -> Callable[[Tensor], Product] | None:
        """As `pack`, with 8 bits for a weight; None where there are no such products."""

    def prepare_adapters(self) -> None:
        """Whatever the two below need, which may take seconds; called before the first of them is."""

    def add_low_rank(self, y: Tensor, x: Tensor, deltas: Deltas, adapters: TokenAdapters) -> None:
        """Adds to every row of y, [num_tokens, out_features], what its adapter makes of the same row of x,
        [num_tokens, in_features]."""

    def add_looked_up(self, y: Tensor, token_ids: Tensor, deltas: Deltas, adapters: TokenAdapters) -> None:
        """As `add_low_rank`, the rows of x being those of an identity matrix: int64 [num_tokens]."""

    def rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """The norm of x + delta, [num_tokens, size]; x becomes that sum."""

    def layer_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """The norm of x + delta, [num_tokens, size]; x becomes that sum."""

    def look_up(self, table: Tensor, ids: Tensor, offset: int = 0) -> Tensor:
        """Rows ids + offset, int64 [num_tokens], of a table in the weights' type: [num_tokens, size]."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x itself, [num_tokens, size], now x + y; y is of the same shape, or [size]. Here and in the next
        three, rows may lie apart."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x itself, [num_tokens, size], now x * factor."""

    def clamp(self, x: Tensor, limit: float) -> Tensor:
        """x itself, [num_tokens, size], now between -limit and limit."""

    def soften(self, x: Tensor, cap: float) -> Tensor:
        """x itself, [num_tokens, size], now cap * tanh(x / cap)."""

    def activate(self, x: Tensor, name: str) -> Tensor:
        """x itself, [num_tokens, size], every element now its activation. Names: silu, gelu, gelu_tanh, relu,
        quick_gelu."""

    def multiply_gated(self, gate_up: Tensor, name: str) -> Tensor:
        """[num_tokens, 2 * size], gates before values -> activation(gate) * value, [num_tokens, size]."""

    def angles(
        self,
        positions: Tensor,
        inv_freq: Tensor,
        amplitudes: Tensor,
        regimes: Tensor | None = None,
        growth: Tensor | None = None,
    ) -> Tensor:
        """positions: int64 [num_tokens] -> cosines and sines times an amplitude, [2, num_tokens, half].

        inv_freq: [num_regimes, half], amplitudes: [num_regimes]; `regimes`, int64 [num_tokens], tells which
        a token has, absent the first. `growth`, float32 [num_tokens], is how much slower a token's last
        channel turns; the first is left as it is, and those between follow in geometric steps."""

    def split_heads(
        self,
        qkv: Tensor,
        num_heads: int,
        num_kv_heads: int,
        angles: Tensor | None,
        head_norm: HeadNorm | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> q, k, v of [num_tokens, heads,
        head_dim].

        The heads of q and k are normalised, then their first channels turned by `angles`, as many as it has
        cosines and sines; channel i with channel i + half of them."""


@dataclass(frozen=True)
class Parts:
    """What a layer is made from. `dtype` is the type that weights are rounded to, but those of linear layers
    where `quantize` says otherwise."""

    world: World
    weights: Weights
    dtype: torch.dtype
    kernels: Kernels
    cuts: dict[str, Cut] = field(default_factory=dict)
    """Of every matrix that an adapter may change, by its path: what is this rank's."""
    quantize: Quantization = "none"

    def pack(self, weight: Tensor, label: str) -> Product:
        """For a linear layer; as `Kernels.pack`."""
        if self.quantize == "none":
            return self.kernels.pack(weight, self.dtype, label)
        assert self.kernels.pack_int8 is not None, "refused before weights are read"
        return self.kernels.pack_int8(weight)

    def read_vector(self, path: str, length: int, rows: Sequence[slice] = (slice(None),)) -> Tensor:
        """The `rows` of a bias or a norm's weight, one after the other; float32. Raises WeightsError."""
        stored = self.weights.find(path, (length,))
        return torch.cat([stored.read(part) for part in rows]).to(self.kernels.device, self.dtype).float()
