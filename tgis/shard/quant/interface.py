"""Interface of schemes, which decide how the matrices of a model are held in memory."""

from collections.abc import Callable
from typing import Literal, Protocol

from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import Stored

# "linear": linear layers that are split over ranks, including those of experts. "sensitive": linear layers,
# or rows of them, that quantization harms most (see `Sensitivity`). "head": the layer that computes the
# logits. "replicated": small matrices where rounding matters, such as routers of experts. "table":
# embeddings.
MatrixRole = Literal["linear", "sensitive", "head", "replicated", "table"]


CountBytes = Callable[[CodeLayout], float]
"""Function that returns the bytes per weight of a layout on a platform."""


class Rounder(Protocol):
    """Rounding of weights, [num_rows, num_columns] of any float type, to signed codes of `layout.bits` bits.
    Groups begin at the first column. A group that contains infinity or NaN has scale NaN; a group with only
    tiny magnitudes becomes zeros. Every platform returns the same bits."""

    def round_with_offsets(
        self, weights: Tensor, layout: CodeLayout, importance: Tensor | None = None
    ) -> Codes:
        """Round with the scale and the offset of each group that a search finds best. `importance`, float32
        [num_columns], positive, multiplies the squared errors of columns."""

    def round_to_integers(self, weights: Tensor, layout: CodeLayout) -> Codes:
        """Round half to even, with a scale that makes a group's largest magnitude the largest code."""


class Scheme(Protocol):
    """Representation of the weights of a model in memory. Weights that the checkpoint quantized may stay
    so."""

    @property
    def layout(self) -> CodeLayout | None:
        """Layout of most matrices that the scheme quantizes, or None if it quantizes none."""

    @property
    def table_layout(self) -> CodeLayout | None:
        """Layout of the head and the embedding, or None unless the scheme quantizes both."""

    @property
    def sensitive_layout(self) -> CodeLayout | None:
        """Layout of weights of the role "sensitive", or None if they are treated like those of the role
        "linear"."""

    def count_bytes_per_weight(self, sensitive_share: float, count: CountBytes) -> float:
        """Return the mean bytes per weight of linear layers in memory if this share of them is sensitive."""

    def encode(
        self, role: MatrixRole, stored: Stored, rounder: Rounder = ..., importance: Tensor | None = None
    ) -> Stored:
        """Return the representation of a matrix, [out_features, in_features]. By default, torch rounds it.
        Searches use the columns' `importance`, if it is known."""
