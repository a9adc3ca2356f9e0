"""Choice of how the weights of a model are rounded when they are read."""

from dataclasses import dataclass
from typing import NamedTuple

from tgis.shard.quant.importance import NO_IMPORTANCE, Importance
from tgis.shard.quant.interface import Scheme
from tgis.shard.quant.schemes.none import UNQUANTIZED
from tgis.shard.quant.smoothing import NO_FACTORS, Factors


class InputFigures(NamedTuple):
    """Figures that the inputs of linear layers determine."""

    factors: Factors = NO_FACTORS  # that smooth activations; none if the model's activations are not rounded
    importance: Importance = NO_IMPORTANCE  # of columns; none if no search needs it


NO_INPUTS = InputFigures()


@dataclass(frozen=True)
class Rounding:
    scheme: Scheme = UNQUANTIZED
    inputs: InputFigures = NO_INPUTS


UNROUNDED = Rounding()
