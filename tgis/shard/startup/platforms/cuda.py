"""Platform for a GPU. Importing this module imports triton."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tgis.errors import first_line
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.kernels.cuda.check.inputs import SMALL, ExpertSizes, KernelSizes
from tgis.shard.kernels.cuda.check.self_check import DTYPES, choose_implementations
from tgis.shard.kernels.cuda.codes.packing import can_pack
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.kernel_cache import is_compiling, use_cache
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.kernels.cuda.step_state import STATE_CHUNK
from tgis.shard.memory.cuda import CudaMemory
from tgis.shard.models.interface import ModelSpec
from tgis.shard.models.parts.states import find_state_shape
from tgis.shard.models.spec import DecoderSpec, EncoderDecoderSpec, LayerSpec
from tgis.shard.models.whole_model import WholeModelSpec
from tgis.shard.runner.device.build import make_device_runner
from tgis.shard.runner.device.cuda_stream import CudaStream
from tgis.shard.runner.device.stream import DeviceStream
from tgis.shard.runner.graph_sizes import GraphSize, add_adapter_sizes, graph_sizes
from tgis.shard.runner.interface import ModelRunner, RunnerParts
from tgis.shard.speculators.registry import DraftShape
from tgis.shard.startup.platforms.gpu.capture_probe import find_rank_obstacle
from tgis.shard.startup.platforms.gpu.dependent_launches import check_dependent_launches
from tgis.shard.startup.platforms.gpu.timing import time_captured
from tgis.shard.startup.platforms.interface import DeviceError, KernelCompiler, Platform
from tgis.shard.startup.platforms.requirements import CheckedModel

logger = logging.getLogger(__name__)


def on_cuda(
    device: torch.device, model: CheckedModel, kernel_cache: Path | None, memory_fraction: float | None
) -> Platform:
    """Return the platform of a GPU for a rank's share of a model. The GPU becomes torch's current device.
    Raises DeviceError."""
    memory = _open(device, memory_fraction)
    use_cache(kernel_cache)
    configure_products()
    dtypes = DTYPES if model.dtype is None else (model.dtype,)
    sizes = find_sizes(model.spec, model.num_ranks, model.layout, model.cache_type)
    draft_sizes = None if model.draft is None else find_draft_sizes(model.draft, sizes)
    implementations = choose_implementations(device, dtypes, sizes, draft_sizes)
    stream = CudaStream(device)
    check_dependent_launches(stream, implementations)
    kernels = CudaKernels(device, implementations)
    choices = None if kernel_cache is None else kernel_cache / f"products-{device.index}.json"
    return Platform(
        device=device,
        kernels=kernels,
        make_runner=partial(make_runner, implementations, stream),
        memory=memory,
        compiler=KernelCompiler(is_compiling, finish=lambda: None),
        is_memory_shared=False,
        cache_fraction=1,
        num_dummy_blocks=1,
        state_chunk=STATE_CHUNK,
        replaced_kernels=implementations.replaced,
        find_rank_obstacle=partial(find_rank_obstacle, stream, replaced=implementations.replaced),
        graph_sizes=partial(choose_graph_sizes, implementations),
        choose_products=partial(kernels.choose_products, partial(time_captured, stream), stored_in=choices),
    )


def configure_products() -> None:
    """Keep partial sums of 16-bit matrix products in float32, which torch may otherwise round to 16 bits."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def find_sizes(
    spec: ModelSpec,
    num_ranks: int,
    layout: CodeLayout | None = None,
    cache_type: torch.dtype | None = None,
) -> KernelSizes:
    """Return the sizes and types for which a rank's kernels are compiled."""
    codes = _list_packed(layout)
    layers = spec.decoder if isinstance(spec, EncoderDecoderSpec) else spec
    if isinstance(layers, WholeModelSpec):  # torch computes everything but attention and sampling
        return replace(
            SMALL,
            num_heads=max(1, layers.num_heads),
            num_kv_heads=max(1, layers.num_kv_heads),
            head_dim=layers.head_dim,
            vocab_size=layers.vocab_size,
            states=None,
            experts=None,
            codes=(),
            cache_types=(cache_type,),
        )
    if not isinstance(layers, LayerSpec):
        return replace(SMALL, codes=codes, cache_types=(cache_type,))
    state = find_state_shape(spec, num_ranks)
    heads = layers if layers.num_heads else SMALL  # a model without attention launches no such kernels
    return KernelSizes(
        num_heads=max(1, heads.num_heads // num_ranks),
        num_kv_heads=max(1, heads.num_kv_heads // num_ranks),
        head_dim=heads.head_dim,
        hidden_size=layers.hidden_size,
        ffn_size=max(1, layers.intermediate_size // num_ranks),
        vocab_size=spec.vocab_size,
        states=None if state is None else state.sizes,
        experts=_find_experts(layers, num_ranks),
        codes=codes,
        cache_types=(cache_type,),
    )


def find_draft_sizes(draft: DraftShape, model: KernelSizes) -> KernelSizes:
    """Return the sizes for which the kernels of a speculator are compiled, which is whole on every rank.
    Sampling has the model's vocabulary, and the cache the model's type."""
    if draft.spec is not None:
        [cache_type] = model.cache_types
        own = find_sizes(draft.spec, 1, draft.layout, cache_type)
    else:  # norms, and activations that are not gated, which are checked with twice the feed-forward size
        own = replace(
            model,
            hidden_size=draft.width,
            ffn_size=-(-draft.width // 2),
            states=None,
            experts=None,
            codes=_list_packed(draft.layout),
        )
    return replace(own, vocab_size=model.vocab_size, owner="the speculator's")


def _list_packed(layout: CodeLayout | None) -> tuple[CodeLayout, ...]:
    """Return the layout if weights are kept in it."""
    return () if layout is None or not can_pack(layout) else (layout,)


def _find_experts(layers: LayerSpec, num_ranks: int) -> ExpertSizes | None:
    experts = layers.experts if isinstance(layers, DecoderSpec) else None
    if experts is None:
        return None
    width = experts.latent_size or layers.hidden_size
    return ExpertSizes(width, max(1, experts.intermediate_size // num_ranks))


def choose_graph_sizes(
    implementations: Implementations,
    configured: Sequence[int] | None,
    max_rows: int,
    max_prompt_tokens: int,
    has_adapters: bool = False,
) -> Sequence[GraphSize]:
    """Return the sizes of steps to capture, as `graph_sizes` does, and those of steps with adapters if there
    may be any."""
    # A kernel's fallback reads as many keys as the longest sequence has, a number that a graph cannot know.
    if "attend_segments" in implementations.replaced:
        logger.warning("no CUDA graphs: they need the kernel attend_segments, which is replaced")
        return ()
    if "attend_tiles" in implementations.replaced:
        logger.warning("no CUDA graphs of prompts: they need the kernel attend_tiles, which is replaced")
        max_prompt_tokens = 0
    sizes = graph_sizes(configured, max_rows, max_prompt_tokens)
    if not has_adapters or not sizes:
        return sizes
    if "add_low_rank" in implementations.replaced:
        logger.warning(
            "no CUDA graphs of steps with adapters: they need the kernel add_low_rank, which is replaced"
        )
        return sizes
    return add_adapter_sizes(sizes)


def _open(device: torch.device, memory_fraction: float | None) -> CudaMemory:
    """Check that the GPU computes, and return its memory."""
    try:
        torch.cuda.set_device(device)
        torch.ones(1, device=device).add_(1).item()
        return CudaMemory(device, 1.0 if memory_fraction is None else memory_fraction)
    except RuntimeError as error:
        raise DeviceError(f"GPU {device.index} cannot be used: {first_line(error)}") from error


def make_runner(
    implementations: Implementations, stream: DeviceStream, on: Platform, parts: RunnerParts
) -> ModelRunner:
    return make_device_runner(parts, implementations, stream, on.memory.memory_left)
