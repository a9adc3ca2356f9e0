"""Decides how a speculator is kept, before its weights are read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tgis.config.processes import ShardConfig
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.layers.ops import Kernels
from tgis.shard.models.interface import ModelSpec
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.quant.interface import Scheme
from tgis.shard.quant.registry import find_scheme
from tgis.shard.quant.schemes import int8
from tgis.shard.quant.schemes.none import UNQUANTIZED
from tgis.shard.speculators.interface import SpeculatorError
from tgis.shard.speculators.registry import DraftShape, find_cache, find_shape
from tgis.shard.startup import engine_choice
from tgis.shard.startup.quantize import check as quantize_check


def find_draft_shape(
    config: ShardConfig, settings: Mapping[str, Any], spec: ModelSpec, layout: CodeLayout | None
) -> DraftShape | None:
    """Return the shape of the model's speculator, if it has one. `layout` is that of the model's codes."""
    if config.speculator is None:
        return None
    assert isinstance(spec, DecoderSpec), "others have no speculators"
    head_layout = None if layout is None else int8.LAYOUT
    return find_shape(config.speculator, Path(config.model_path), settings, spec, head_layout)


def check_gpu(path: str, spec: ModelSpec, keeps_state: bool) -> None:
    """Raise SpeculatorError if only CPUs can run a speculator for a model of this specification."""
    cache = find_cache(path, spec)
    obstacle = None if cache is None else engine_choice.find_gpu_obstacle(cache.spec)
    if keeps_state:
        obstacle = "the model keeps a state, which drafts cannot roll back there"
    if obstacle is not None:
        raise SpeculatorError(f"--speculator {path}: GPUs cannot use it: {obstacle}: set --device cpu")


def choose_scheme(config: ShardConfig, settings: Mapping[str, Any], kernels: Kernels) -> Scheme:
    """Return how the weights of a speculator's heads are stored. Drafts change no output, so those of a
    quantized model are rounded to 8 bits."""
    is_quantized = quantize_check.find_layout(config, settings) is not None
    has_products = kernels.find_code_packer(int8.LAYOUT) is not None
    return find_scheme("int8") if is_quantized and has_products else UNQUANTIZED
