"""Interface of the formats in which checkpoints store quantized weights."""

from typing import Protocol

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import FileTensor, StoredTensor


class Tensors(Protocol):
    """Tensors of a checkpoint, by name."""

    def __contains__(self, name: str) -> bool: ...

    def fetch_any(self, name: str) -> FileTensor:
        """Return a tensor of any type and shape, without reading its elements. Tensors that are never fetched
        count as unread. Raises WeightsError."""


class Format(Protocol):
    """Quantized storage of module weights: in other tensors than `{module}.weight`, or in non-float numbers
    in that tensor."""

    @property
    def layout(self) -> CodeLayout:
        """Layout of most weights, used to estimate memory."""

    def open(self, tensors: Tensors, module: str) -> StoredTensor | None:
        """Return the weight of a module as [out_features, in_features], or a stack of such matrices, without
        reading its elements; None if the module is not stored in this format. Raises WeightsError.

        The tensor's `read` and `codes` raise WeightsError, with its name and the sizes, for a part that
        cannot be cut out."""

    def count_weights(self, name: str, shape: tuple[int, ...]) -> int | None:
        """Return the number of weights in a tensor: 0 for auxiliary tensors such as scales, None for a tensor
        that is not in this format."""
