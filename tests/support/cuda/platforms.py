"""GPUs' kernels and attention on the CPU: by their twins, or by Triton's interpreter."""

from dataclasses import replace

from tests.support.shard.portable import plain
from tgis.shard.collectives import CPU
from tgis.shard.kernels.cuda.attention import CudaAttention
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.startup.host_runner import HostRunners
from tgis.shard.startup.platform import Platform

GROUP_SIZE = 8  # at least that of any model of the tests; smaller ones could have longer tiles


def make_platform(implementations: Implementations) -> Platform:
    def attend(cache: KVCache) -> CudaAttention:
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
        return CudaAttention(cache, implementations, GROUP_SIZE)

    kernels = CudaKernels(CPU, implementations)
<<<<<<< HEAD
    return replace(plain(CPU), kernels=kernels, make_runner=HostRunners(attend), num_dummy_blocks=1)
=======
    return replace(plain(CPU), kernels=kernels, make_runner=HostRunners(attend))


def with_dummy_block(cache: KVCache) -> KVCache:
    """Return a cache like this with one more block, which nobody counts. It holds NaN."""
    sizes = (cache.num_layers, cache.num_blocks + 1, cache.block_size, cache.num_kv_heads, cache.head_dim)
    made = KVCache(*sizes, cache.dtype)
    made.keys.fill_(float("nan"))
    made.values.fill_(float("nan"))
    return made
>>>>>>> h-ops
