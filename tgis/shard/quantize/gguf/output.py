"""Writes a checkpoint as a GGUF file."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from tgis.convert.gguf.architectures import find_architecture, make_config
from tgis.convert.gguf.files import open_gguf
from tgis.convert.gguf.tensor_names import list_sources
from tgis.convert.gguf.tensor_targets import GgufTarget, TensorCounts, list_targets
from tgis.errors import first_line
from tgis.hub import model_files
from tgis.shard.models import registry
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.models.unread_tensors import refuse_unread
from tgis.shard.quant.formats.settings import read_settings
from tgis.shard.quantize.gguf.metadata import (
    Value,
    check_equal,
    describe_model,
    find_written,
    rope_factors,
)
from tgis.shard.quantize.gguf.tensors import PlannedTensor, SpelledCheckpoint, plan_tensor
from tgis.shard.quantize.gguf.vocabulary import check_tokenizer, describe_templates, describe_tokenizer
from tgis.shard.quantize.output import part_name
from tgis.shard.quantize.settings import QuantizeError

GgufKind = Literal["q8_0", "q4_0", "q4_1"]

_TYPES = {
    "q8_0": (Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Type.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (Type.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
}


def write_gguf(directory: Path, output: Path, kind: GgufKind) -> str:
    """Write the model in a directory to the file `output` and return a message.

    Raises QuantizeError, ConversionError, UnsupportedModelError, WeightsError and ModelNotFoundError."""
    config = model_files.read_config(directory)
    name, architecture = find_written(directory, config)
    if (existing := read_settings(config, directory)) is not None:
        raise QuantizeError(f"{existing.place}: this model is already quantized; use the original model")
    spec = registry.make_spec(config)
    assert isinstance(spec, DecoderSpec), "GGUF architectures are decoders"
    prefix = getattr(registry.FAMILIES[config["model_type"]], "PREFIX", "")
    checkpoint = SpelledCheckpoint(directory, prefix)
    targets = [
        each
        for each in list_targets(architecture.names, _count(spec), checkpoint)
        if not (spec.tie_embeddings and each.name == "output.weight")
    ]
    codes, file_type = _TYPES[kind]
    planned = [plan_tensor(checkpoint, target, codes) for target in targets]
    refuse_unread(directory, checkpoint.list_unread(), config)
    metadata: dict[str, Value] = {
        "general.name": directory.resolve().name,
        "general.file_type": int(file_type),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        **describe_model(name, config, spec),
        **describe_tokenizer(directory, spec.vocab_size),
        **describe_templates(directory),
    }

    def check(part: Path) -> None:
        _check(part, directory, spec, targets)

    with _writing(output) as part:
        _write(part, name, metadata, _plan_factors(spec), planned, check)
    return f"Saved quantized model to {output}"


def _count(spec: DecoderSpec) -> TensorCounts:
    num_experts = spec.experts.num_experts if spec.experts else 0
    return TensorCounts(spec.num_layers, num_experts, spec.num_heads, spec.num_kv_heads)


def _plan_factors(spec: DecoderSpec) -> list[PlannedTensor]:
    return [
        PlannedTensor(name, factors.shape, Type.F32, partial(iter, (factors,)))
        for name, factors in rope_factors(spec.rope).items()
    ]


def _check(part: Path, directory: Path, spec: DecoderSpec, targets: Sequence[GgufTarget]) -> None:
    """Check that a file represents the model. Its tensors may still be empty.

    Raises QuantizeError and ConversionError."""
    files = open_gguf([part])
    architecture = find_architecture(files)
    check_equal(directory, spec, make_config(files, architecture))
    expected = {name for target in targets for name in target.sources}
    assert {*list_sources(files, architecture.names)} == expected, "reading and writing use the same names"
    check_tokenizer(directory, files.metadata)


def _write(
    part: Path,
    architecture: str,
    metadata: Mapping[str, Value],
    factors: Sequence[PlannedTensor],
    others: Sequence[PlannedTensor],
    check: Callable[[Path], None],
) -> None:
    """Write the header and the factors, which are part of the configuration. If the check raises no error,
    write the other tensors."""
    writer = gguf.GGUFWriter(part, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for each in (*factors, *others):
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), each.num_bytes, each.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with part.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
        for each in factors:
            each.write(file)
        file.flush()
        os.truncate(part, file.tell() + sum(each.padded_bytes for each in others))
        check(part)
        for each in others:
            each.write(file)
        file.flush()
        os.fsync(file.fileno())


def _add(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@contextmanager
def _writing(output: Path) -> Iterator[Path]:
    """Yield the name of the file while it is incomplete. An error removes it. Raises QuantizeError."""
    if output.exists():
        raise QuantizeError(f"{output} exists: use another name")
    part = output.with_name(part_name(output.name))
    try:
        yield part
        part.replace(output)
    except OSError as error:
        raise QuantizeError(f"{output} cannot be written: {error.strerror or first_line(error)}") from error
    finally:
        part.unlink(missing_ok=True)
