"""The interface of formats, in which checkpoints store quantized weights."""

from typing import Protocol

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import FileTensor, StoredTensor


class Tensors(Protocol):
    """Tensors of a checkpoint, by name."""

    def __contains__(self, name: str) -> bool: ...

    def fetch_any(self, name: str) -> FileTensor:
        """Return a tensor of any type and shape, without reading its elements. Tensors that are not fetched
        count as unread. Raises WeightsError."""


class Format(Protocol):
    """Way in which a checkpoint stores the weights of some modules: instead of `{module}.weight`, or as
    numbers in it that are not floats."""

    @property
    def layout(self) -> CodeLayout:
        """Layout of most weights, for the memory that they take."""

    def open(self, tensors: Tensors, module: str) -> StoredTensor | None:
        """Return the weight of a module as [out_features, in_features], or a stack of such matrices, without
        reading its elements; None if the module is not stored in this format.

        Its `read` and `codes` raise WeightsError, with the tensor's name and the sizes, for a part that
        cannot be cut out. Raises WeightsError."""

    def count_weights(self, name: str, shape: tuple[int, ...]) -> int | None:
        """Return the number of weights that a tensor holds: 0 for scales and the like, None for a tensor
        that is not of this format."""
