"""Interface of schemes, which decide how the matrices of a model are held in memory."""

from typing import Literal, Protocol

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import Stored

# "linear": linear layers that are split over ranks, including those of experts. "sensitive": linear layers,
# or rows of them, that quantization harms most (see `Sensitivity`). "head": the layer that computes the
# logits. "replicated": small matrices where rounding matters, such as routers of experts. "table":
# embeddings.
MatrixRole = Literal["linear", "sensitive", "head", "replicated", "table"]


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
    def bytes_per_weight(self) -> float:
        """Upper bound on the mean bytes per weight of linear layers in memory."""

    def encode(self, role: MatrixRole, stored: Stored) -> Stored:
        """Return the representation of a matrix, [out_features, in_features]."""
