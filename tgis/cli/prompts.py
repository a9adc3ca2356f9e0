"""Defines the commands for soft prompts and LoRA adapters. They import torch late: it is slow to load."""

import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tgis.cli.command import FileCommand, parameters
from tgis.cli.models import cache_root
from tgis.config.processes import ShardConfig
from tgis.errors import OperatorError
from tgis.hub import model_files
from tgis.hub.cache import find_model
from tgis.hub.gguf_files import find_gguf
from tgis.prompts.errors import AdapterError, AdapterNotFoundError, TooLargeError

if TYPE_CHECKING:
    from torch import Tensor

    from tgis.prompts.soft_prompt import AdapterRequirements
    from tgis.shard.layers.ops import Parts

# Shard options that determine whether a prompt or adapter fits.
DECISIVE = (
    "dtype",
    "max_sequence_length",
    "max_prompt_prefix_length",
    "prompt_cache_size_mb",
    "adapter_cache_size_mb",
)
UNBOUNDED = 1 << 40  # bytes


class PromptCheckError(OperatorError):
    """Error for files that are invalid or do not fit the model; its text is one line that names them."""


@dataclass(frozen=True)
class Target:
    """Model to check against, with the limits on soft prompts and adapters."""

    parts: "Parts"
    required: "AdapterRequirements"


def _check_prompt(
    path: Path, model: str | None, revision: str | None, store: Path | None, **decisive: Any
) -> None:
    if path.exists():
        _check_links(path, store)
    if model is None:
        click.echo("\n".join(describe(path, None)))
        return
    with _directory_of_model(model, revision) as (directory, name):
        config = ShardConfig(model_path=str(directory), prefix_store_path=str(path), **decisive)
        click.echo("\n".join([*describe(path, config), f"fits {name}"]))


@contextmanager
def _directory_of_model(model: str, revision: str | None) -> Iterator[tuple[Path, Path]]:
    """Yield a directory of the model, temporary for a GGUF file, and the path to show for it.

    Raises ModelNotFoundError and ConversionError."""
    files = find_gguf(model, revision, cache_root())
    if files is None:
        directory = find_model(model, revision, cache_root())
        yield directory, directory
        return
    from tgis.convert.gguf.model_directory import write_weights_directory

    with tempfile.TemporaryDirectory() as temporary:
        write_weights_directory(files, Path(temporary))
        yield Path(temporary), files[0]


check_prompt = FileCommand(
    "check-prompt",
    callback=_check_prompt,
    help="Check that PATH, a directory or one of its files, is a valid soft prompt or LoRA adapter.",
    params=[
        click.Argument(["path"], type=click.Path(path_type=Path)),
        click.Option(
            ["--model"],
            help="Also check that it fits this model: a directory, a GGUF file or a model in the hub cache.",
        ),
        click.Option(["--revision"], help="Revision of the model in the hub cache; unset: main."),
        click.Option(
            ["--store"],
            type=click.Path(path_type=Path, exists=True, file_okay=False),
            help="Directory that links in PATH must stay in, as in --prefix-store-path; unset: PATH.",
        ),
        *(one for one in parameters(ShardConfig) if one.name in DECISIVE),
    ],
)


@click.command("convert-prompt", cls=FileCommand)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--with-decoder",
    is_flag=True,
    help="Also convert the decoder's half of an encoder-decoder's PEFT files, which PEFT itself never uses.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing prompt in TARGET.")
def convert_prompt(source: Path, target: Path, with_decoder: bool, overwrite: bool) -> None:
    """Convert the soft prompt in the directory SOURCE to the other layout in TARGET: from decoder.pt,
    encoder.pt or both to PEFT's files, or the reverse."""
    from tgis.convert import soft_prompts

    click.echo(soft_prompts.convert_prompt(source, target, with_decoder, overwrite))


def describe(path: Path, config: ShardConfig | None) -> list[str]:
    """Describe the soft prompt or adapter at `path`, which must fit the model of `config`, if given.

    Raises PromptCheckError, model_files.ModelNotFoundError, UnsupportedModelError, WeightsError."""
    from tgis.prompts.lora_files import LORA
    from tgis.prompts.soft_prompt import read_peft_type

    if not path.exists():
        raise PromptCheckError(f"there is no such file or directory: {path}")
    target = None if config is None else _find_target(config)
    missing = "no soft prompt and no adapter" + " for such a model" * (target is not None)
    with _path_in_errors(path, missing), _directory_of(path) as directory:
        describe_files = _describe_adapter if read_peft_type(directory) == LORA else _describe_prompt
        return [*describe_files(directory, target)]


def _describe_prompt(directory: Path, target: Target | None) -> Iterator[str]:
    from tgis.prompts.soft_prompt import read_prompt
    from tgis.prompts.store import measure_prompt

    prompt = read_prompt(directory, target.required if target else None)
    num_bytes = measure_prompt(prompt, target.required.max_prompt_bytes if target else UNBOUNDED)
    tensors = prompt.tensors
    stored = read_prompt(directory, None).tensors
    counts = " and ".join(f"{len(tensor)} virtual tokens for the {name}" for name, tensor in tensors.items())
    yield f"soft prompt: {counts}"
    yield f"{num_bytes} bytes"
    yield from _list_tensors({name: stored[name] for name in tensors})


def _describe_adapter(directory: Path, target: Target | None) -> Iterator[str]:
    from tgis.prompts.lora_files import MAX_HEADER_BYTES, read_adapter_files
    from tgis.prompts.store import measure_adapter
    from tgis.shard.adapters.lora_mapping import read_adapter

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
    yield from _list_tensors(tensors)


def _group(
    tensors: "Mapping[str, Tensor]", scales: Mapping[str, float]
) -> dict[tuple[int, float], Counter[str]]:
    """Count the modules by the last part of their names, for each (rank, scale)."""
    counts: dict[tuple[int, float], Counter[str]] = {}
    for module, scale in scales.items():
        a = tensors.get(f"{module}.lora_A.weight", tensors.get(f"{module}.lora_embedding_A"))
        assert a is not None, "each module with a scale has tensors"
        counts.setdefault((len(a), scale), Counter())[module.rpartition(".")[2]] += 1
    return counts


def _list_tensors(tensors: "Mapping[str, Tensor]") -> Iterator[str]:
    width = max(map(len, tensors))
    for name, tensor in tensors.items():
        yield f"  {name:{width}}  {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _find_target(config: ShardConfig) -> Target:
    from tgis.shard.adapters.loading import adapter_limits
    from tgis.shard.checkpoint.tensors import DTYPES
    from tgis.shard.models.skeleton import build_skeleton

    settings = model_files.read_json(Path(config.model_path), "config.json")
    dtype = DTYPES[config.dtype or model_files.stored_dtype(settings)]
    model = build_skeleton(Path(config.model_path), settings, dtype)
    length = config.max_sequence_length or model_files.max_sequence_length(settings)
    limits = adapter_limits(config, True, length)
    return Target(model.parts, limits.require(model.parts, model.prompt_width, model.spec.is_encoder_decoder))


@contextmanager
def _path_in_errors(path: Path, missing: str) -> Iterator[None]:
    """Convert errors in the block to PromptCheckError with the path."""
    try:
        yield
    except AdapterNotFoundError as error:
        raise PromptCheckError(f"{path} contains {missing}") from error
    except TooLargeError as error:
        raise PromptCheckError(f"{path} exceeds the allowed cache size") from error
    except AdapterError as error:
        raise PromptCheckError(f"{path}: {error}") from error
    except OSError as error:
        raise PromptCheckError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_links(path: Path, store: Path | None) -> None:
    """Raise PromptCheckError for a link to a file outside the store, which the service would not follow."""
    from tgis.prompts.lora_files import CONFIG, WEIGHTS
    from tgis.prompts.soft_prompt import DECODER, ENCODER

    directory = path if path.is_dir() else path.parent
    names = [CONFIG, *WEIGHTS]
    if path.is_dir():
        names += [DECODER, ENCODER]
    elif path.name not in names:
        names = []
    root = store or directory
    if not _is_inside(root, path if store else directory):
        raise PromptCheckError(f"{path} is outside {root}")
    for file in map(directory.joinpath, names):
        if file.exists() and not _is_inside(root, file):
            raise PromptCheckError(
                f"{file} links to a file outside {root}; --store sets the directory that links must stay in"
            )


def _is_inside(root: Path, path: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


@contextmanager
def _directory_of(path: Path) -> Iterator[Path]:
    """Yield a directory with the files of `path`.

    A single file is the encoder's if its name says so, else the decoder's."""
    from tgis.prompts.lora_files import CONFIG, WEIGHTS
    from tgis.prompts.soft_prompt import DECODER, ENCODER

    if path.is_dir():
        yield path
    elif path.name in (CONFIG, *WEIGHTS):
        yield path.parent
    else:
        with tempfile.TemporaryDirectory() as temporary:
            name = ENCODER if path.name == ENCODER else DECODER
            (Path(temporary) / name).symlink_to(path.absolute())
            yield Path(temporary)


COMMANDS = (check_prompt, convert_prompt)
