"""Selects the kernels that a case measures: Triton's, run by its interpreter on a CPU."""

from bench.gpu.target import Target
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.kernel_cache import use_cache


def load_kernels(target: Target) -> Implementations:
    if target.is_rehearsal:
        from tests.support.cuda.interpreter import interpreted

        return interpreted()
    from tgis.shard.startup.platforms.cuda import configure_products

    use_cache(None)
    configure_products()
    return Implementations.choose()
