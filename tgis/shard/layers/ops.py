"""Interface of the kernels that a platform provides to layers, and the common arguments of all layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import (
    ALL,
    ScaledColumns,
    Sliced,
    StackedRows,
    Stored,
    split_by_layout,
    transpose,
)
from tgis.shard.checkpoint.weights import Weights
from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.lora import Cut, Deltas, LowRank, TokenAdapters
from tgis.shard.layers.states import DeltaNet, Mamba2
from tgis.shard.memory.state_cache import StepStates
from tgis.shard.quant.importance import Importance
from tgis.shard.quant.interface import MatrixRole, Rounder, Scheme
from tgis.shard.quant.schemes.none import UNQUANTIZED
from tgis.shard.quant.schemes.portable_rounder import PortableRounder
from tgis.shard.quant.sensitivity import UNKNOWN, Sensitivity
from tgis.shard.quant.smoothing import Factors

Product = Callable[[Tensor], Tensor]
"""Product x W^T with a packed weight: [num_tokens, in_features] -> [num_tokens, out_features]."""


class Table(Protocol):
    """Table of weights whose rows are looked up."""

    @property
    def num_rows(self) -> int: ...
    @property
    def width(self) -> int: ...
    def look_up(self, ids: Tensor) -> Tensor:
        """Return rows, int64 [num_tokens], as float32 [num_tokens, width]."""


class CodeTable(Table, Protocol):
    """Table of codes that is also a packed weight."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm of every head of queries and keys, and of values if `v_weight` is set; weights are float32
    [head_dim]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    v_weight: Tensor | None = None


@dataclass(frozen=True)
class Activation:
    """Activation silu, gelu, gelu_tanh, relu, relu2 (the square of relu) or quick_gelu of [num_tokens, size].
    If it is gated, it applies to the first half of [num_tokens, 2 * size] and is multiplied by the second
    half. `CLAMPED_SWIGLU` is always gated."""

    name: str
    is_gated: bool


class NormLayer(Protocol):
    """Layer norm if `is_centred`, else RMS norm."""

    weight: Tensor  # float32 [size]
    bias: Tensor | None
    eps: float
    is_centred: bool

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Return the norm of x + delta, both [num_tokens, size]. Overwrites x with the sum."""


class BiasedProduct(NamedTuple):
    product: Product
    bias: Tensor | None  # float32 [out_features]


class ExpertProducts(NamedTuple):
    """Two linear layers of one expert."""

    up: BiasedProduct
    down: BiasedProduct  # this rank's summand


MixExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function that returns the weighted sums of the tokens' experts, [num_tokens, width], for inputs
[num_tokens, width], weights [num_tokens, num_chosen], and the numbers of the experts, int64 [num_tokens,
num_chosen]."""


class LinearLayer(Protocol):
    def __call__(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """Return the layer's output with the adapters' updates, [num_tokens, out_features]."""

    def as_product(self, adapters: TokenAdapters | None) -> BiasedProduct | None:
        """Return the product and bias if the layer is nothing else: no adapter changes it, and no sum over
        ranks follows. Platforms fuse such a product with the operations before and after it."""

    def input_product(self, adapters: TokenAdapters | None) -> Product | None:
        """Return the product if it alone reads the layer's input: no adapter does."""

    def adapt(self, x: Tensor, y: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """Add the adapters' updates for x, [num_tokens, in_features], to y, [num_tokens, out_features], in
        place, and return y."""


class Kernels(Rounder, Protocol):
    """Kernels of a platform. Activations are contiguous. Results are new unless stated otherwise.

    The residual stream, logits and products of roles other than "linear" are float32. Activations between a
    norm and the next addition to the residual stream are float32 or, on a GPU, have the weights' type. Norms
    that are called alone return float32."""

    @property
    def device(self) -> torch.device:
        """Device of weights, activations and results."""

    def pack(self, weight: Stored, dtype: torch.dtype, role: MatrixRole = "linear") -> Product:
        """Pack a weight [out_features, in_features]. It is read a few rows at a time, so that it is never in
        memory twice. Raises WeightsError."""

    def find_code_packer(
        self, layout: CodeLayout, role: MatrixRole = "linear", dtype: torch.dtype = torch.bfloat16
    ) -> Callable[[Stored], Product] | None:
        """Return the variant of `pack` for codes of a layout, or None if they must be packed as floats.
        Products of some platforms round x to `dtype`."""

    def count_code_bytes(self, layout: CodeLayout) -> float:
        """Return the bytes per weight of packed codes of a layout, including scales."""

    def rounds_inputs(self, layout: CodeLayout) -> bool:
        """Return True if products with codes of a layout, and those with the head, round x to 8 bits."""

    def find_table_packer(self, layout: CodeLayout) -> Callable[[Stored], CodeTable] | None:
        """Return the function that packs codes of a layout as a table, or None if there is none."""

    def join(self, products: Sequence[Product]) -> Product:
        """Return the product with the concatenated rows of several matrices of codes."""

    def prepare_adapters(self) -> None:
        """Compile the kernels of the next two methods. This may take seconds."""

    def place_low_rank(self, update: LowRank, is_table: bool) -> LowRank:
        """Return an update on this device, in the layout that the next two methods read: a row-major, unless
        the platform prefers another order. `is_table` is true for updates of embeddings."""

    def add_low_rank(self, y: Tensor, x: Tensor, deltas: Deltas, adapters: TokenAdapters) -> None:
        """Add the adapters' updates for x, [num_tokens, in_features], to y, [num_tokens, out_features]."""

    def add_looked_up(self, y: Tensor, token_ids: Tensor, deltas: Deltas, adapters: TokenAdapters) -> None:
        """Do the same for an embedding: row i of x is one-hot at token_ids[i], int64 [num_tokens]."""

    def rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Return the RMS norm of x + delta, [num_tokens, size]. Overwrites x with the sum."""

    def layer_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Return the layer norm of x + delta, [num_tokens, size]. Overwrites x with the sum."""

    def look_up(self, table: Tensor, ids: Tensor, offset: int = 0) -> Tensor:
        """Return rows ids + offset, int64 [num_tokens], of a table of weights: [num_tokens, size]."""

    def select_ids(self, ids: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return id - begin, int64 [num_tokens], and 1, float32 [num_tokens], for each id from `begin` to
        `end`; 0 and 0 for all others."""

    def clear_rows(self, x: Tensor, is_kept: Tensor) -> Tensor:
        """Set rows of x, [num_tokens, size], to 0 where `is_kept`, float32 [num_tokens], is 0, in place, and
        return x. Unlike products with 0, this also clears NaN and infinity."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add y, [num_tokens, size] or [size], to x in place and return x. In this method,
        `multiply_sigmoid`, `scale` and `clamp`, x may have a row stride larger than `size`."""

    def multiply_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply x by sigmoid(gate), both [num_tokens, size], in place and return x. Either may have a row
        stride larger than `size`."""

    def concatenate(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x and y side by side, float32 [num_tokens, sum of both sizes]."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Multiply x, [num_tokens, size], by a factor in place and return x."""

    def clamp(self, x: Tensor, limit: float) -> Tensor:
        """Clamp x, [num_tokens, size], to -limit ... limit in place and return x."""

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Set x, [num_tokens, size], to cap * tanh(x / cap) in place and return x."""

    def activate(self, x: Tensor, name: str) -> Tensor:
        """Apply an `Activation` to x, [num_tokens, size], in place and return x."""

    def multiply_gated(self, gate_up: Tensor, name: str) -> Tensor:
        """Return activation(gate) * up, [num_tokens, size]. gate_up: [num_tokens, 2 * size]."""

    def angles(
        self,
        positions: Tensor,
        inv_freq: Tensor,
        amplitudes: Tensor,
        factor_sets: Tensor | None = None,
        growth: Tensor | None = None,
    ) -> Tensor:
        """Return the cosines and sines of rotary angles times an amplitude, [2, num_tokens, half].

        positions: int64 [num_tokens], inv_freq: [num_sets, half], amplitudes: [num_sets]. `factor_sets`,
        int64 [num_tokens], selects each token's set; None selects the first for all. `growth`, float32
        [num_tokens], is defined by `DynamicScaling`."""

    def position_factors(self, positions: Tensor, beta: float, length: int, shift: int) -> Tensor:
        """Return 1 + beta * log(1 + floor((position + shift) / length)), float32 [num_tokens], for positions
        int64 [num_tokens]."""

    def scale_rows(self, x: Tensor, factors: Tensor) -> Tensor:
        """Multiply each row of x, [num_tokens, size], by its factor in place and return x. x may have a row
        stride larger than `size`."""

    def mix_states(self, rows: Tensor, mixer: Mamba2, layer: int, states: StepStates) -> Tensor:
        """Return y of a Mamba 2 layer, float32 [num_tokens, width], and update the states of layer number
        `layer`. rows: [num_tokens, any], the product of its first matrix."""

    def gate_norm(self, x: Tensor, rows: Tensor, mixer: Mamba2) -> Tensor:
        """Return x, [num_tokens, width], gated and with an RMS norm in each group, as `Mamba2.gating` says.
        Overwrites x. The gate is the first part of `rows`."""

    def mix_delta(
        self, rows: Tensor, gates: Tensor, mixer: DeltaNet, layer: int, states: StepStates
    ) -> Tensor:
        """Return y of a gated DeltaNet layer, float32 [num_tokens, width], and update the states of layer
        number `layer`. rows: [num_tokens, any], the product of its first matrix; gates: [num_tokens, 2 *
        total_heads]."""

    def join_experts(
        self,
        experts: Sequence[ExpertProducts],
        activation: Activation,
        gate_scale: float,
        scales_input: bool,
    ) -> MixExperts | None:
        """Return the function that computes a layer's experts without adapters, or None if each must be
        computed alone. A gate is multiplied by `gate_scale` before its activation. If `scales_input`, weights
        multiply the experts' inputs instead of their outputs."""

    def norm_product(
        self,
        x: Tensor,
        delta: Tensor | None,
        norm: NormLayer | None,
        linear: LinearLayer,
        then: Activation | None,
        adapters: TokenAdapters | None,
        reader: LinearLayer | None = None,
    ) -> Tensor:
        """Return then(linear(norm(x + delta))), leaving out what is None. Overwrites x with the sum.

        x, delta: [num_tokens, size]. A platform may fuse the parts. If only `reader` reads the result, it may
        have the type that its product reads fastest."""

    def product_add(
        self, x: Tensor, y: Tensor, linear: LinearLayer, adapters: TokenAdapters | None
    ) -> Tensor | None:
        """Add linear(y) to x, [num_tokens, size], in place and return None, or return linear(y) for the next
        `norm_product`, norm or `add` to add: of any shape that these read. y: [num_tokens, in_features]."""


class Unfused(PortableRounder):
    """Default methods for platforms that do not fuse layers, have no products of codes, and round weights,
    select ids and clear rows with torch."""

    def place_low_rank(self: Kernels, update: LowRank, is_table: bool) -> LowRank:
        return LowRank(update.a.to(self.device), update.b.to(self.device), update.first)

    def select_ids(self, ids: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        is_inside = (ids >= begin) & (ids < end)
        return (ids - begin).where(is_inside, 0), is_inside.float()

    def clear_rows(self, x: Tensor, is_kept: Tensor) -> Tensor:
        return x.masked_fill_((is_kept == 0).unsqueeze(1), 0.0)

    def find_code_packer(
        self, layout: CodeLayout, role: MatrixRole = "linear", dtype: torch.dtype = torch.bfloat16
    ) -> Callable[[Stored], Product] | None:
        return None

    def count_code_bytes(self, layout: CodeLayout) -> float:
        return layout.bytes_per_weight

    def rounds_inputs(self, layout: CodeLayout) -> bool:
        return False

    def find_table_packer(self, layout: CodeLayout) -> Callable[[Stored], CodeTable] | None:
        return None

    def join_experts(
        self,
        experts: Sequence[ExpertProducts],
        activation: Activation,
        gate_scale: float,
        scales_input: bool,
    ) -> MixExperts | None:
        return None

    def join(self, products: Sequence[Product]) -> Product:
        raise AssertionError("there are no products of codes")

    def norm_product(
        self: Kernels,
        x: Tensor,
        delta: Tensor | None,
        norm: NormLayer | None,
        linear: LinearLayer,
        then: Activation | None,
        adapters: TokenAdapters | None,
        reader: LinearLayer | None = None,
    ) -> Tensor:
        y = linear(normalise(self, x, delta, norm), adapters)
        if then is None:
            return y
        return self.multiply_gated(y, then.name) if then.is_gated else self.activate(y, then.name)

    def product_add(
        self: Kernels, x: Tensor, y: Tensor, linear: LinearLayer, adapters: TokenAdapters | None
    ) -> Tensor:
        return linear(y, adapters)


def normalise(kernels: Kernels, x: Tensor, delta: Tensor | None, norm: NormLayer | None) -> Tensor:
    """Return norm(x + delta), leaving out what is None. Overwrites x with the sum."""
    if norm is not None:
        return norm(x, delta)
    return x if delta is None else kernels.add(x, delta)


@dataclass(frozen=True)
class Parts:
    """Common arguments of all layers. Weights are converted to `dtype` unless they are held as codes."""

    group: ProcessGroup
    weights: Weights
    dtype: torch.dtype
    kernels: Kernels
    cuts: dict[str, Cut] = field(default_factory=dict)
    """This rank's part of every matrix that adapters may change, by path."""
    scheme: Scheme = UNQUANTIZED
    sensitivity: Sensitivity = UNKNOWN
    factors: Factors = field(default_factory=dict)
    importance: Importance = field(default_factory=dict)
    tables: dict[tuple[str, range, CodeLayout], CodeTable] = field(default_factory=dict)
    """Packed tables of codes by label, rows and layout. A tied head shares the codes of its table."""
    widened: list[float] = field(default_factory=list)
    """Extra bytes of each matrix held as floats because this rank's columns split groups of codes."""

    def pack(
        self,
        role: MatrixRole,
        path: str,
        shape: tuple[int, int],
        rows: Sequence[slice] = (ALL,),
        columns: slice = ALL,
    ) -> Product:
        """Pack `rows`, in this order, and `columns` of a module's weight. Raises WeightsError."""
        stored = self._encode(role, path, shape)
        if role == "head" and (table := self._pack_table(stored, *rows)) is not None:
            return table
        slices = [Sliced(stored, each, columns) for each in rows]
        part = slices[0] if len(slices) == 1 else StackedRows(slices, stored.label)
        if (product := self._pack_codes(part, role)) is not None:
            return product
        layout = stored.layout()
        if layout is not None and columns != ALL and self.kernels.find_code_packer(layout) is not None:
            self.widened.append(
                prod(part.shape) * (self.dtype.itemsize - self.kernels.count_code_bytes(layout))
            )
        return self.kernels.pack(part, self.dtype, role)

    def pack_transposed(self, path: str, shape: tuple[int, int]) -> Product:
        """Pack the transpose of a module's weight, [in_features, out_features], as floats. Raises
        WeightsError."""
        return self.kernels.pack(transpose(self.weights.find_matrix(path, shape)), self.dtype, "replicated")

    def _encode(self, role: MatrixRole, path: str, shape: tuple[int, int]) -> Stored:
        stored = self.weights.find_matrix(path, shape)
        if (factors := self.factors.get(path)) is not None:
            stored = ScaledColumns(stored, factors)
        rows = self.sensitivity.find_rows(path, shape[0])
        importance = self.importance.get(path)
        if role != "linear" or rows.start == shape[0] or self.scheme.sensitive_layout is None:
            return self.scheme.encode(role, stored, self.kernels, importance)
        sensitive = self.scheme.encode("sensitive", Sliced(stored, rows), self.kernels)
        if rows.start == 0:
            return sensitive
        plain = Sliced(stored, slice(0, rows.start))
        others = self.scheme.encode("linear", plain, self.kernels, importance)
        return StackedRows([others, sensitive], stored.label)

    def _pack_codes(self, part: Stored, role: MatrixRole) -> Product | None:
        products = []
        for one in [part] if part.layout() is not None else split_by_layout(part):
            layout = one.layout()
            pack = None if layout is None else self.kernels.find_code_packer(layout, role, self.dtype)
            if pack is None:
                return None
            products.append((pack, one))
        if len(products) > 1:
            return self.kernels.join([pack(one) for pack, one in products])
        return products[0][0](products[0][1]) if products else None

    def _pack_table(self, stored: Stored, rows: slice) -> CodeTable | None:
        """Pack rows of a matrix of codes as a table, once. Return None if the platform has no such tables."""
        layout = stored.layout()
        pack = None if layout is None else self.kernels.find_table_packer(layout)
        if layout is None or pack is None:
            return None
        key = stored.label, range(stored.shape[0])[rows], layout
        if key not in self.tables:
            self.tables[key] = pack(Sliced(stored, rows))
        return self.tables[key]

    def open_table(self, path: str, shape: tuple[int, int], rows: slice = ALL) -> Table:
        """Read `rows` of a module's weight as a table, as codes if the platform supports them. Raises
        WeightsError."""
        stored = self.scheme.encode("table", self.weights.find_matrix(path, shape), self.kernels)
        return self._pack_table(stored, rows) or DenseTable(self._read_dense(stored, rows), self.kernels)

    def read_table(
        self, path: str, shape: tuple[int, int], rows: slice = ALL, columns: slice = ALL
    ) -> Tensor:
        """Read `rows` and `columns` of a module's weight as a table of `dtype`. Raises WeightsError."""
        return self._read_dense(self.weights.find_matrix(path, shape), rows, columns)

    def _read_dense(self, stored: Stored, rows: slice, columns: slice = ALL) -> Tensor:
        return stored.read(rows, columns).to(self.kernels.device, self.dtype, copy=True)

    def read_vector(self, path: str, length: int, rows: Sequence[slice] = (ALL,)) -> Tensor:
        """Read `rows` of a bias or a norm's weight, concatenated as float32. Raises WeightsError."""
        stored = self.weights.find(path, (length,))
        return torch.cat([stored.read(part) for part in rows]).to(self.kernels.device, self.dtype).float()


@dataclass(frozen=True)
class DenseTable:
    """Table of floats."""

    weights: Tensor  # [num_rows, width]
    kernels: Kernels

    @property
    def num_rows(self) -> int:
        return len(self.weights)

    @property
    def width(self) -> int:
        return self.weights.shape[1]

    def look_up(self, ids: Tensor) -> Tensor:
        return self.kernels.look_up(self.weights, ids)
