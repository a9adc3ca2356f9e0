"""Plan of a load: what is decided before any weights are read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tgis.config.processes import ShardConfig
from tgis.shard.adapters.loading import AdapterLimits
from tgis.shard.checkpoint.tensors import DTYPES
from tgis.shard.collectives import ProcessGroup
from tgis.shard.memory.kv_cache import bytes_per_block
from tgis.shard.quant.interface import Scheme
from tgis.shard.speculators.registry import count_bytes, find_cache
from tgis.shard.startup.engine_choice import Choice
from tgis.shard.startup.memory import memory_plan
from tgis.shard.startup.memory.cache_type import CacheType
from tgis.shard.startup.memory.memory_plan import Demand, MemoryBudget
from tgis.shard.startup.planned_speculator import choose_scheme
from tgis.shard.startup.platforms.interface import Platform
from tgis.shard.startup.quantize import check as quantize_check


@dataclass(frozen=True)
class LoadPlan:
    """Decisions that need no weights."""

    config: ShardConfig
    settings: dict[str, Any]  # config.json
    choice: Choice
    on: Platform
    demand: Demand
    limits: AdapterLimits
    dtype_name: str  # type of weights that are not stored as codes
    weight_type: str  # type of the weights of linear layers
    cache_type: CacheType

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def directory(self) -> Path:
        return Path(self.config.model_path)

    @property
    def tokenizer_directory(self) -> Path:
        return Path(self.config.tokenizer_path or self.config.model_path)

    @property
    def speculator_scheme(self) -> Scheme:
        """Scheme in which the weights of a speculator's heads are stored."""
        return choose_scheme(self.config, self.settings, self.on.kernels)

    def check_fit(self, group: ProcessGroup) -> None:
        """Check that the model fits. No rank reads weights before all ranks have measured the free memory.

        Raises ModelTooLargeError, CacheTooSmallError or ProcessGroupError."""
        weights = self._count_weights(group)
        block_bytes = bytes_per_block(self.choice.spec, group, self.demand.block_size, self.cache_type.dtype)
        budget = MemoryBudget(
            left=self.on.memory_left(group),
            step=0,
            num_ranks=group.local_size,
            cache_fraction=self.on.cache_fraction,
            adapter_bytes=self.limits.num_bytes,
            margin=self.on.memory.margin(),
        )
        memory_plan.check_fit(
            self.demand, block_bytes + self._count_draft_bytes(), budget, weights, self.weight_type
        )

    def _count_weights(self, group: ProcessGroup) -> int:
        """Return the bytes of the weights of this machine's ranks."""
        weights = self.choice.weight_bytes
        if weights is None:
            weights = quantize_check.count_bytes(self.config, self.settings, self.choice, self.on, self.dtype)
        if not self.choice.is_native:  # in other engines, every rank holds all weights
            weights *= group.size
        weights = weights * group.local_size // group.size
        if self.config.speculator is not None:
            itemsize = (self.on.product_dtype or self.dtype).itemsize
            weights += group.local_size * count_bytes(
                self.config.speculator, itemsize, self.speculator_scheme
            )
        return weights

    def _count_draft_bytes(self) -> int:
        """Return the bytes of a block that a speculator keeps."""
        if self.config.speculator is None:
            return 0
        cache = find_cache(self.config.speculator, self.choice.spec)
        return 0 if cache is None else cache.count_bytes(self.demand.block_size, self.cache_type.dtype)
