"""The interface of schemes, which decide how the matrices of a model are held in memory."""

from typing import Literal, Protocol

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import Stored

# "linear": layers that are cut over ranks, those of experts included. "sensitive": those of them, or rows
# of them, that lose most when they are rounded, by the rule of `Sensitivity`. "head": the last of them, of
# which come the logits. "replicated": small matrices that matter a lot, such as the router of experts.
# "table": tables whose rows are looked up.
MatrixRole = Literal["linear", "sensitive", "head", "replicated", "table"]


class Scheme(Protocol):
    """Way to hold the weights of a model. What a checkpoint's format has quantized may stay as it is."""

    @property
    def layout(self) -> CodeLayout | None:
        """Layout of most matrices that the scheme changes, if it changes any."""

    @property
    def table_layout(self) -> CodeLayout | None:
        """Layout of the head and the embedding, if the scheme changes both."""

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight of linear layers on average, or more, as products hold them."""

    def encode(self, role: MatrixRole, stored: Stored) -> Stored:
        """Return a matrix of the model, [out_features, in_features], as it is to be held."""
