"""Loads models in ONNX form, as optimum exports them. ONNX Runtime runs them with this service's cache.

onnxruntime is an optional dependency, so it is imported only when such a model is described."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tgis.errors import first_line
from tgis.hub import model_files
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.collectives import ProcessGroup
from tgis.shard.models.interface import Model, UnsupportedModelError
from tgis.shard.models.onnx_runtime import model
from tgis.shard.models.onnx_runtime.graph import OnnxGraph, OnnxValue, read_graph
from tgis.shard.models.onnx_runtime.model import GraphRunner, OnnxModel
from tgis.shard.models.whole_model import (
    NotServedError,
    WholeModelSpec,
    choose_tokens,
    scores_agree,
    warn_of_copies,
)

EXTRA = "pip install 'tgis-next[onnx]'"
HOW_TO_EXPORT = (
    "export it where optimum-onnx is installed, with `optimum-cli export onnx --model MODEL --task "
    "text-generation-with-past DIRECTORY`"
)
FILES = ("model.onnx", "decoder_model_merged.onnx")
FOLDERS = ("", "onnx")  # in the model's directory; the second is usual on the hub
PARTS = ("decoder_model.onnx", "decoder_with_past_model.onnx")
ENCODER = "encoder_model.onnx"
CPU = "CPUExecutionProvider"
QUIET = 4  # log level that suppresses even errors, which ONNX Runtime also raises
# Tokens of the self-check, and the ends of the chunks in which they are scored a second time.
NUM_CHECKED = 9
CHUNK_ENDS = (0, 4, 5, 9)
# Maximum difference, relative to the largest score.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2}


@dataclass(frozen=True, kw_only=True)
class OnnxSpec(WholeModelSpec):
    file: Path
    dtype: torch.dtype  # of the graph's keys and values, and so of the cache

    @property
    def weight_bytes(self) -> int:
        """Size of the weights on disk, including external data files, whose names begin with the graph's."""
        return sum(file.stat().st_size for file in self.file.parent.glob(f"{self.file.name}*"))


def make_spec(directory: Path, config: Mapping[str, Any]) -> OnnxSpec:
    """Read the model's shape from its graph. Raises UnsupportedModelError and WeightsError."""
    if find_spec("onnxruntime") is None:
        raise UnsupportedModelError(f"models in ONNX form need ONNX Runtime: {EXTRA}")
    file = _find_file(directory, config)
    try:
        return _read_spec(file, read_graph(file), dict(config))
    except NotServedError as error:
        raise UnsupportedModelError(f"{file} cannot be served: {error}") from error


def load(spec: OnnxSpec, group: ProcessGroup, num_threads: int) -> Model:
    """Load the model and check it on a few tokens. Raises UnsupportedModelError and WeightsError."""
    warn_of_copies(group)
    session = _open_session(spec.file, num_threads)
    runner = GraphRunner(read_graph(spec.file), session, spec.num_layers)
    try:
        _check_chunks(spec, runner)
    except NotServedError as error:
        raise UnsupportedModelError(f"{spec.file} cannot be served: {error}") from error
    return OnnxModel(replace(spec, num_kv_heads=spec.num_kv_heads * group.size), runner, spec.num_kv_heads)


def _find_file(directory: Path, config: Mapping[str, Any]) -> Path:
    folders = [directory / folder for folder in FOLDERS]
    if config.get("is_encoder_decoder") or any((folder / ENCODER).exists() for folder in folders):
        raise UnsupportedModelError(
            "encoder-decoder models are not served in ONNX form: serve the checkpoint itself, as tgis_native"
        )
    for folder in folders:
        for name in FILES:
            if (folder / name).is_file():
                return folder / name
    if any((folder / name).exists() for folder in folders for name in PARTS):
        cause = "has its model in ONNX form as two graphs, and only a single graph can be served"
    else:
        cause = "has no model in ONNX form, " + " or ".join(FILES)
    raise UnsupportedModelError(f"{directory} {cause}: {HOW_TO_EXPORT}")


def _read_spec(file: Path, graph: OnnxGraph, config: dict[str, Any]) -> OnnxSpec:
    num_layers = sum(model.past_names(layer)[0] in graph.inputs for layer in range(len(graph.inputs)))
    _check_names(graph, num_layers)
    cached = [graph.inputs[name] for layer in range(num_layers) for name in model.past_names(layer)]
    num_kv_heads, head_dim = _cache_shape(cached)
    dtype = cached[0].dtype
    if dtype not in TOLERANCE or {value.dtype for value in cached} != {dtype}:
        raise NotServedError("its keys and values are neither all float32 nor all float16")
    scores = graph.outputs[model.LOGITS].shape
    vocab_size = (scores[-1] if scores else None) or config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise NotServedError("neither it nor config.json gives the size of the vocabulary")
    return OnnxSpec(
        file=file,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        dtype=dtype,
        max_positions=model_files.length_of_model(config) or 0,
    )


def _check_names(graph: OnnxGraph, num_layers: int) -> None:
    if not num_layers:
        raise NotServedError(f"it has no inputs for the keys and values of earlier tokens; {HOW_TO_EXPORT}")
    layers = range(num_layers)
    past = {name for layer in layers for name in model.past_names(layer)}
    known = past | {model.TOKENS, model.MASK, model.POSITIONS, model.HAS_PAST}
    expected = {model.LOGITS, *(name for layer in layers for name in model.present_names(layer))}
    if unknown := [name for name, value in graph.inputs.items() if name not in known or value.dtype is None]:
        raise NotServedError(f"its input {unknown[0]} has an unknown name or type")
    if missing := [*({model.TOKENS, *past} - set(graph.inputs)), *(expected - set(graph.outputs))]:
        raise NotServedError(f"it has no {min(missing)}")


def _cache_shape(cached: list[OnnxValue]) -> tuple[int, int]:
    """Return the number and size of key/value heads."""
    shapes = {value.shape[1::2] for value in cached if len(value.shape) == 4}
    if len(shapes) != 1 or any(len(value.shape) != 4 for value in cached):
        raise NotServedError("its keys and values do not have one shape, [batch, heads, tokens, head size]")
    num_kv_heads, head_dim = shapes.pop()
    if not num_kv_heads or not head_dim:
        raise NotServedError("it does not give the number and size of the key/value heads")
    return num_kv_heads, head_dim


def _open_session(file: Path, num_threads: int) -> Any:
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    onnxruntime.set_default_logger_severity(QUIET)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    # Without arenas, freed memory returns to the process, so that a step's memory can be measured.
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=[CPU])
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        raise WeightsError(f"{file} cannot be loaded: {first_line(error)}") from error


def _check_chunks(spec: OnnxSpec, runner: GraphRunner) -> None:
    try:
        whole, cut = (_score(spec, runner, ends) for ends in ((0, NUM_CHECKED), CHUNK_ENDS))
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        raise NotServedError(f"ONNX Runtime failed with {first_line(error)}") from error
    if whole.shape != (NUM_CHECKED, spec.vocab_size):
        raise NotServedError(f"it gives scores of shape {[*whole.shape]} for {NUM_CHECKED} tokens")
    if not scores_agree(cut, whole, TOLERANCE[spec.dtype]):
        raise NotServedError(
            "its scores change if a prompt comes in chunks, as they do if it is quantized dynamically or was "
            f"exported for single tokens; {HOW_TO_EXPORT}"
        )


def _score(spec: OnnxSpec, runner: GraphRunner, ends: Sequence[int]) -> Tensor:
    """Return logits, [NUM_CHECKED, vocab_size], computed in chunks with these ends."""
    token_ids = choose_tokens(spec.vocab_size, NUM_CHECKED)
    nothing = torch.empty(spec.num_kv_heads, 0, spec.head_dim)
    past = [(nothing, nothing)] * spec.num_layers
    parts = []
    for start, end in pairwise(ends):
        logits, past = runner.run(token_ids[start:end], torch.arange(start, end), past)
        parts.append(logits)
    return torch.cat(parts)
