"""The scheme that holds weights as the checkpoint has them."""

from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.quant.interface import Place


class Unquantized:
    layout = None

    def encode(self, place: Place, stored: Stored) -> Stored:
        return stored


UNQUANTIZED = Unquantized()
