"""The kernels that a section measures: Triton's, which on a CPU its interpreter runs."""

from bench.gpu.target import Target
from tgis.shard.kernels.cuda.implementations import Implementations


def load_kernels(target: Target) -> Implementations:
    if target.is_rehearsal:
        from tests.support.cuda.interpreter import interpreted

        return interpreted()
    return Implementations.choose()
