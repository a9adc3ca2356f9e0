"""`Rounder` in torch operators, the reference of compiled ones."""

from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.quant.schemes import rounding, search


class PortableRounder:
    def round_with_offsets(
        self, weights: Tensor, layout: CodeLayout, importance: Tensor | None = None
    ) -> Codes:
        return search.round_with_offsets(weights, layout, importance)

    def round_to_integers(self, weights: Tensor, layout: CodeLayout) -> Codes:
        return rounding.round_to_integers(weights, layout)


PORTABLE = PortableRounder()
