"""Memory layout of streamed weights: consecutive panels of a few columns of W^T."""

from tgis.shard.kernels.cpu.huge_pages import Arena
from tgis.shard.kernels.cpu.jit.llvm import has_feature

LANES = 16 if has_feature("avx512f") else 8  # float32 elements of a vector
PANEL = 2 * LANES  # outputs of a panel; a panel is [in_features, PANEL]


def count_panels(out_features: int) -> int:
    """Return the number of panels. The last one is padded with zeros."""
    return -(-out_features // PANEL)


arena = Arena()
