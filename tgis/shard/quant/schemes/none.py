"""The scheme that holds weights as the checkpoint has them."""

from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.quant.interface import MatrixRole


class Unquantized:
    layout = table_layout = None
    bytes_per_weight = 0.0  # that the scheme changes

    def encode(self, role: MatrixRole, stored: Stored) -> Stored:
        return stored


UNQUANTIZED = Unquantized()
