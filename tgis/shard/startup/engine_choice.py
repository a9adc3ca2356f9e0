"""Chooses a model's engine: a native family if possible, else transformers' code; ONNX Runtime on request."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tgis.config.model import ENGINES
from tgis.shard.checkpoint.opening import is_gguf
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.ops import Kernels
from tgis.shard.layers.rotary import DynamicScaling, LongScaling
from tgis.shard.models import registry
from tgis.shard.models.families import falcon, granitemoehybrid, mistral3, mistral4
from tgis.shard.models.interface import ConfigurationError, Model, ModelSpec, UnsupportedModelError
from tgis.shard.models.onnx_runtime import load as onnx_runtime
from tgis.shard.models.rope_option import RopeOption, RopeOptionError
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.quant.interface import Scheme
from tgis.shard.quant.registry import find_format
from tgis.shard.quant.rounding import NO_INPUTS, InputFigures, Rounding
from tgis.shard.quant.schemes.none import UNQUANTIZED

logger = logging.getLogger(__name__)

NATIVE = "tgis_native"
TRANSFORMERS = "hf_transformers"
ONNX = "hf_optimum_ort"


class Loader(Protocol):
    def __call__(
        self,
        group: ProcessGroup,
        dtype: torch.dtype,
        kernels: Kernels,
        inputs: InputFigures = NO_INPUTS,
        /,
    ) -> Model:
        """Load the model. Only the native engine uses the kernels, and the figures of inputs for weights that
        are rounded. Raises UnsupportedModelError and WeightsError."""


@dataclass(frozen=True)
class Choice:
    """Engine for a model."""

    engine: str
    spec: ModelSpec  # derived from the configuration; the loaded model's own spec takes precedence
    load: Loader
    dtype: torch.dtype | None = None  # of weights and cache, if the model fixes it
    weight_bytes: int | None = None  # if different from the size of the checkpoint's tensors
    table_elements: int = 0  # elements of the embedding, which keeps its type if other weights are quantized
    gpu_obstacle: str | None = None  # reason why GPUs cannot run the model; None if they can

    @property
    def is_native(self) -> bool:
        return self.engine == NATIVE


def choose(
    directory: Path,
    settings: Mapping[str, Any],
    framework: str | None,
    size: int,
    trust_remote_code: bool,
    scheme: Scheme = UNQUANTIZED,
    rope: RopeOption | None = None,
) -> Choice:
    """Choose the engine for the model whose config.json is `settings`, on `size` ranks. If `rope` is given,
    it scales the positions.

    This reads no tensors. Raises UnsupportedModelError and WeightsError."""
    engine = ENGINES.get(framework or "")
    if engine == ONNX:
        if rope is not None:
            raise RopeOptionError("an ONNX model computes its positions itself")
        if is_gguf(directory):
            raise UnsupportedModelError("hf_optimum_ort does not support GGUF files; tgis_native does")
        return _choose_onnx(directory, settings)
    is_quantized = find_format(settings, directory) is not None
    if engine == TRANSFORMERS and size > 1:
        # Ignore the option like TGIS, because transformers cannot split a model over ranks.
        engine = None
    try:
        native = _choose_native(directory, settings, size, scheme, rope)
    except UnsupportedModelError as error:
        is_native_only = engine == NATIVE or not isinstance(error, _NotNativeError)
        if is_gguf(directory) or (engine != TRANSFORMERS and is_native_only):
            raise
        return _choose_transformers(directory, settings, size, trust_remote_code, rope, instead_of=error)
    if engine != TRANSFORMERS:
        return native
    obstacle = _find_obstacle(native.spec, settings["model_type"], is_quantized)
    if is_gguf(directory):
        obstacle = "it is a GGUF file"
    if obstacle is not None:
        logger.warning("tgis_native serves this model, because hf_transformers cannot: %s", obstacle)
        return native
    logger.warning("tgis_native would serve this model faster than hf_transformers")
    return _choose_transformers(directory, settings, size, trust_remote_code, rope)


class _NotNativeError(UnsupportedModelError):
    """Error when no native family implements the configuration."""


def _choose_native(
    directory: Path, settings: Mapping[str, Any], size: int, scheme: Scheme, rope: RopeOption | None
) -> Choice:
    try:
        spec = registry.make_spec(settings)
    except ConfigurationError:
        raise
    except UnsupportedModelError as error:
        raise _NotNativeError(str(error)) from error
    if rope is not None:
        spec = rope.scale_spec(spec, settings)
    registry.check_sharding(spec, size)

    def load(
        group: ProcessGroup, dtype: torch.dtype, kernels: Kernels, inputs: InputFigures = NO_INPUTS
    ) -> Model:
        return registry.load(directory, settings, group, dtype, kernels, Rounding(scheme, inputs), spec)

    table_elements = registry.count_embedding_elements(spec)
    return Choice(NATIVE, spec, load, table_elements=table_elements, gpu_obstacle=find_gpu_obstacle(spec))


def _choose_transformers(
    directory: Path,
    settings: Mapping[str, Any],
    size: int,
    trust_remote_code: bool,
    rope: RopeOption | None,
    instead_of: UnsupportedModelError | None = None,
) -> Choice:
    # Importing transformers takes seconds.
    from tgis.shard.models.hf_transformers import load as hf_transformers
    from tgis.shard.models.hf_transformers.arithmetic import choose_arithmetic

    # For a known family, this error names the feature that the native family lacks.
    reason = instead_of if registry.is_known(settings) else None

    def explain(error: UnsupportedModelError | WeightsError) -> UnsupportedModelError:
        return UnsupportedModelError(f"{reason}; through transformers: {error}")

    try:
        spec = hf_transformers.make_spec(directory, settings, trust_remote_code, rope)
    except UnsupportedModelError as error:
        if reason is None:
            raise
        raise explain(error) from error
    if reason:
        logger.warning(
            "this model runs through transformers' code, which is slower than a native family: %s", reason
        )

    def load(group: ProcessGroup, dtype: torch.dtype, kernels: Kernels, _: InputFigures = NO_INPUTS) -> Model:
        arithmetic = choose_arithmetic(kernels, dtype)
        try:
            return hf_transformers.load(directory, spec, group, dtype, trust_remote_code, rope, arithmetic)
        except (UnsupportedModelError, WeightsError) as error:
            if reason is None:
                raise
            raise explain(error) from error

    # Some operators of torch add in an order that changes, so ranks could sample different tokens.
    obstacle = "hf_transformers supports several shards only on the CPU" if size > 1 else None
    return Choice(TRANSFORMERS, spec, load, gpu_obstacle=obstacle)


def _find_obstacle(spec: ModelSpec, model_type: str, is_quantized: bool) -> str | None:
    """Return why transformers' code cannot run a model of a native family, or None if no reason is known."""
    if is_quantized:
        return "its weights are quantized"
    if not isinstance(spec, DecoderSpec):
        return "it is an encoder-decoder model"
    if spec.slopes:
        return "it uses ALiBi"
    # transformers marks also those models of Granite 4 that have only attention.
    if spec.mamba or spec.delta_net or model_type in granitemoehybrid.MODEL_TYPES:
        return "it keeps a state other than keys and values"
    if spec.sinks:
        return "it has attention sinks"
    if model_type in falcon.MODEL_TYPES:
        return "its code does not use the attention interface"
    if spec.chunks:
        return "its attention is in chunks"
    if model_type in mistral3.MODEL_TYPES + mistral4.MODEL_TYPES:
        return "its type is no causal language model in transformers"
    if spec.rope and isinstance(spec.rope.scaling, DynamicScaling | LongScaling):
        return "its rotary embedding lets sequences of one step affect each other"
    return None


def find_gpu_obstacle(spec: ModelSpec) -> str | None:
    """Return why GPUs cannot run a model of a native family yet, or None if they can."""
    if not isinstance(spec, DecoderSpec):
        return None
    if spec.layer_shapes:
        return "its layers have different heads"
    if spec.latent:
        return "its latent attention has not been tried on GPUs"
    return None


def _choose_onnx(directory: Path, settings: Mapping[str, Any]) -> Choice:
    spec = onnx_runtime.make_spec(directory, settings)

    def load(group: ProcessGroup, dtype: torch.dtype, kernels: Kernels, _: InputFigures = NO_INPUTS) -> Model:
        return onnx_runtime.load(spec, group, torch.get_num_threads())

    obstacle = f"{ONNX} supports only the CPU"
    return Choice(ONNX, spec, load, spec.dtype, spec.weight_bytes, gpu_obstacle=obstacle)
