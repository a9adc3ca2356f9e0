"""Requirements of a model for the platform that is opened for it. Nothing here imports kernels."""

from dataclasses import dataclass

import torch

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.models.interface import ModelSpec
from tgis.shard.quant.schemes import int8
from tgis.shard.speculators.registry import DraftShape


@dataclass(frozen=True)
class CpuProducts:
    """Matrix products that a model needs of a CPU."""

    arithmetic: str = "float32"
    layout: CodeLayout | None = None  # of the weights' codes; None: they have none
    rounds_activations: bool = False  # to 8 bits, in products with codes
    allows_amx: bool = False

    @property
    def may_use_amx(self) -> bool:
        """True if AMX is allowed and a product could use it. Only products in bfloat16 and int8 can."""
        return self.allows_amx and (self.multiplies_int8 or self.arithmetic != "float32")

    @property
    def multiplies_int8(self) -> bool:
        return self.rounds_activations or self.layout == int8.LAYOUT

    @property
    def multiplies_codes(self) -> bool:
        """True if activations that are not rounded multiply other codes than int8."""
        return self._has_other_codes and (not self.rounds_activations or self._has_table)

    @property
    def multiplies_rounded(self) -> bool:
        """True if rounded activations multiply other codes than int8."""
        return self._has_other_codes and self.rounds_activations

    @property
    def _has_other_codes(self) -> bool:
        return self.layout is not None and self.layout != int8.LAYOUT

    @property
    def _has_table(self) -> bool:
        return self.layout is not None and bool(self.layout.table)


FLOAT32_PRODUCTS = CpuProducts()


@dataclass(frozen=True)
class CheckedModel:
    """Model for a rank's share of which a GPU's kernels are compiled and checked."""

    spec: ModelSpec
    num_ranks: int = 1
    dtype: torch.dtype | None = None  # of the weights; None: the 16-bit types
    layout: CodeLayout | None = None  # of the weights' codes; None: they have none
    cache_type: torch.dtype | None = None  # None: the weights' type
    draft: DraftShape | None = None  # of the model's speculator
