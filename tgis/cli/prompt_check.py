"""Checks a soft prompt or LoRA adapter on disk: describes it, validates it and tests that it fits a model."""

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tgis.config.processes import ShardConfig
from tgis.errors import OperatorError
from tgis.hub import model_files
from tgis.prompts.errors import AdapterError, AdapterNotFoundError, TooLargeError
from tgis.prompts.lora_files import CONFIG, LORA, MAX_HEADER_BYTES, WEIGHTS, read_adapter_files
from tgis.prompts.soft_prompt import DECODER, ENCODER, AdapterRequirements, read_peft_type, read_prompt
from tgis.prompts.store import measure_adapter, measure_prompt
from tgis.shard.adapters.loading import adapter_limits
from tgis.shard.adapters.lora_mapping import read_adapter
from tgis.shard.checkpoint.tensors import DTYPES
from tgis.shard.layers.ops import Parts
from tgis.shard.models.skeleton import build_skeleton

UNBOUNDED = 1 << 40  # bytes


class PromptCheckError(OperatorError):
    """Error when the files are invalid or do not fit the model; the text is one line that names them."""


@dataclass(frozen=True)
class Target:
    """Model to check against, with the limits on soft prompts and adapters."""

    parts: Parts
    required: AdapterRequirements


def describe(path: Path, config: ShardConfig | None) -> list[str]:
    """Return lines that describe the soft prompt or adapter at `path`, a directory or one of its files.

    If `config` is given, the prompt or adapter must fit its model.

    Raises PromptCheckError, model_files.ModelNotFoundError, UnsupportedModelError, WeightsError."""
    if not path.exists():
        raise PromptCheckError(f"there is no such file or directory: {path}")
    target = None if config is None else _find_target(config)
    what = "no soft prompt and no adapter" + " for such a model" * (target is not None)
    with _told_with(path, what), _directory_of(path) as directory:
        tell = _describe_adapter if read_peft_type(directory) == LORA else _describe_prompt
        lines = [*tell(directory, target)]
    return lines if config is None else [*lines, f"fits {config.model_path}"]


def _describe_prompt(directory: Path, target: Target | None) -> Iterator[str]:
    prompt = read_prompt(directory, target.required if target else None)
    num_bytes = measure_prompt(prompt, target.required.max_prompt_bytes if target else UNBOUNDED)
    tensors = prompt.tensors
    stored = read_prompt(directory, None).tensors
    counts = " and ".join(f"{len(tensor)} virtual tokens for the {name}" for name, tensor in tensors.items())
    yield f"soft prompt: {counts}"
    yield f"{num_bytes} bytes"
    yield from _list({name: stored[name] for name in tensors})


def _describe_adapter(directory: Path, target: Target | None) -> Iterator[str]:
    max_bytes = target.required.max_adapter_bytes if target else UNBOUNDED
    tensors, scales = read_adapter_files(directory, max_bytes + MAX_HEADER_BYTES)
    num_bytes = measure_adapter(tensors, max_bytes)
    if target:
        read_adapter(target.parts, tensors, scales)
    yield f"LoRA adapter: {len(scales)} modules"
    for (rank, scale), modules in _group(tensors, scales).items():
        names = ", ".join(f"{name} ({count})" for name, count in modules.items())
        yield f"rank {rank}, scale {scale:g}: {names}"
    yield f"{num_bytes} bytes"
    yield from _list(tensors)


def _group(
    tensors: Mapping[str, Tensor], scales: Mapping[str, float]
) -> dict[tuple[int, float], Counter[str]]:
    """Count the modules by the last part of their names, for each (rank, scale)."""
    found: dict[tuple[int, float], Counter[str]] = {}
    for module, scale in scales.items():
        a = tensors.get(f"{module}.lora_A.weight", tensors.get(f"{module}.lora_embedding_A"))
        assert a is not None, "what has a scale has tensors"
        found.setdefault((len(a), scale), Counter())[module.rpartition(".")[2]] += 1
    return found


def _list(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    width = max(map(len, tensors))
    for name, tensor in tensors.items():
        yield f"  {name:{width}}  {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _find_target(config: ShardConfig) -> Target:
    settings = model_files.read_json(Path(config.model_path), "config.json")
    dtype = DTYPES[config.dtype or model_files.stored_dtype(settings)]
    model = build_skeleton(Path(config.model_path), settings, dtype)
    length = config.max_sequence_length or model_files.max_sequence_length(settings)
    limits = adapter_limits(config, True, length)
    return Target(model.parts, limits.require(model.parts, model.prompt_width, model.spec.is_encoder_decoder))


@contextmanager
def _told_with(path: Path, what: str) -> Iterator[None]:
    """Convert errors in the block to PromptCheckError with the path."""
    try:
        yield
    except AdapterNotFoundError as error:
        raise PromptCheckError(f"{path} holds {what}") from error
    except TooLargeError as error:
        raise PromptCheckError(f"{path} exceeds the allowed cache size") from error
    except AdapterError as error:
        raise PromptCheckError(f"{path}: {error}") from error
    except OSError as error:
        raise PromptCheckError(f"{path} cannot be read: {error.strerror or error}") from error


@contextmanager
def _directory_of(path: Path) -> Iterator[Path]:
    """Yield a directory with the files that belong to `path`.

    A single tensor file counts as the decoder's prompt, unless its name is the encoder's."""
    if path.is_dir():
        yield path
    elif path.name in (CONFIG, *WEIGHTS):
        yield path.parent
    else:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / (ENCODER if path.name == ENCODER else DECODER)).symlink_to(path.absolute())
            yield Path(directory)
