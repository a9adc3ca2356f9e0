"""Platform for CPUs. Importing this module imports numba."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from tgis.shard.collectives import CPU
from tgis.shard.kernels.cpu.amx import permission
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.kernels.cpu.bf16 import self_check
from tgis.shard.kernels.cpu.bf16.attention import choose_attention
from tgis.shard.kernels.cpu.bf16.ops import BfloatKernels
from tgis.shard.kernels.cpu.codes.integer_sums import CAN_ROUND
from tgis.shard.kernels.cpu.codes.tiles import self_check as code_check
from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.int8 import self_check as int8_check
from tgis.shard.kernels.cpu.jit.cache import add_run_directory
from tgis.shard.kernels.cpu.jit.compiler import compile_progress, is_compiling
from tgis.shard.kernels.cpu.ops import CPU_KERNELS, CpuKernels
from tgis.shard.kernels.cpu.shared_memory.collectives import open_collectives
from tgis.shard.memory.host_limits import HostMemory
from tgis.shard.startup.platforms.host_runner import HostRunners
from tgis.shard.startup.platforms.interface import KernelCompiler, Platform
from tgis.shard.startup.platforms.requirements import FLOAT32_PRODUCTS, CpuProducts

logger = logging.getLogger(__name__)

ON_CPU = Platform(
    device=CPU,
    kernels=CPU_KERNELS,
    make_runner=HostRunners(CpuAttention, captures_steps=True),
    memory=HostMemory(),
    compiler=KernelCompiler(is_compiling, compile_progress.finish),
    is_memory_shared=True,
    cache_fraction=0.25,
    open_local=open_collectives,
)


def on_cpu(products: CpuProducts = FLOAT32_PRODUCTS, kernel_cache: Path | None = None) -> Platform:
    """Return the platform that computes these products. Only their kernels are checked. Attention uses the
    same arithmetic. Compiled code is stored in `kernel_cache` if there is no better directory."""
    if kernel_cache is not None:
        add_run_directory(kernel_cache)
    rounds_activations = products.rounds_activations and _can_round()
    has_tiles = products.may_use_amx and permission.may_use_tiles()
    if products.arithmetic == "float32" and not products.multiplies_int8:
        return ON_CPU
    int8 = int8_check.choose_kernel(has_tiles and products.multiplies_int8)
    rounds_codes = products.multiplies_rounded and rounds_activations
    rounded = code_check.choose_rounded_kernels(has_tiles and rounds_codes)
    if products.arithmetic == "float32":
        kernels = CpuKernels(rounds_activations, int8.kernel, rounded.by_kind)
        return replace(ON_CPU, kernels=kernels, replaced_kernels=(*int8.replaced, *rounded.replaced))
    assert products.arithmetic == "bfloat16"
    packer = self_check.choose_packer(has_tiles)
    codes = code_check.choose_tile_kernels(has_tiles and products.multiplies_codes)
    attention = choose_attention(
        multiplies_pairs=self_check.REPLACED not in packer.replaced, has_tiles=has_tiles
    )
    logger.debug("matrix products and attention multiply in bfloat16 and accumulate in float32")
    return replace(
        ON_CPU,
        kernels=BfloatKernels(
            packer.pack, rounds_activations, int8.kernel, {**codes.by_kind, **rounded.by_kind}
        ),
        make_runner=HostRunners(attention, captures_steps=True),
        product_dtype=torch.bfloat16,
        cache_dtype=torch.bfloat16,
        replaced_kernels=(
            *packer.replaced,
            *codes.replaced,
            *rounded.replaced,
            *int8.replaced,
            *attention.replaced,
        ),
    )


def has_fast_bfloat16(may_use_amx: bool) -> bool:
    """Return True if this processor multiplies bfloat16 numbers faster than float32: with AMX, if it may be
    used, or with fast products of pairs."""
    return pairs.are_fast() or (may_use_amx and permission.may_use_tiles())


def _can_round() -> bool:
    if CAN_ROUND:
        logger.info("products with integer codes round activations to 8 bits")
    else:
        logger.warning("--activations int8 has no effect: the processor has no AVX2, VNNI or ARM dot product")
    return CAN_ROUND
