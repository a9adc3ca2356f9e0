"""Defines the commands that download models and convert them to the formats that the service loads."""

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tgis.cli.command import FileCommand
from tgis.config.model import DTYPES
from tgis.errors import OperatorError
from tgis.hub import cache
from tgis.hub.gguf_files import SUFFIX, find_gguf, refuse_gguf, refuse_gguf_on_hub, split_set
from tgis.hub.speculators import is_speculator

if TYPE_CHECKING:
    from tgis.hub.download import Repository

revision_option = click.option("--revision", help="Branch, tag or commit of MODEL_NAME; unset: main.")


def cache_root() -> Path:
    """Return the hub cache's root according to the environment. Raises cache.CacheConflictError."""
    names = ("hf_hub_cache", "transformers_cache", "huggingface_hub_cache", "hf_home", "home")
    return cache.cache_root(**{name: os.environ.get(name.upper()) for name in names})


@click.command("download-weights", cls=FileCommand)
@click.argument("model_name")
@revision_option
@click.option("--token", help="Access token of the hub; unset: HF_TOKEN, else the one of `hf auth login`.")
@click.option(
    "--extension",
    default=".safetensors",
    help="Extensions of the files to download, separated by commas; a single extension also includes .json, "
    ".py, .model, .md and .jinja.",
)
@click.option(
    "--auto-convert/--no-auto-convert",
    default=True,
    help="Convert to .safetensors if the hub has only .bin, and create tokenizer.json if it is missing.",
)
def download_weights(
    model_name: str, revision: str | None, token: str | None, extension: str, auto_convert: bool
) -> None:
    """Download MODEL_NAME from the hub to its cache. Files in the cache are not downloaded again."""
    from tgis.hub import download

    if Path(model_name).is_file():
        refuse_gguf(Path(model_name))
    model, _, file = model_name.rpartition(":")
    if model and file.endswith(SUFFIX):
        _fetch_gguf(download.Repository(model, revision, token, cache_root()), file)
        return
    extensions = download.choose_extensions(extension)
    converts = auto_convert and ".safetensors" in extensions
    if Path(model_name).is_dir():
        click.echo(f"{model_name} is a directory, nothing is downloaded")
        directory = Path(model_name)
        on_hub = [".safetensors"]
    else:
        repository = download.Repository(model_name, revision, token, cache_root())
        if SUFFIX not in extensions:
            refuse_gguf_on_hub(model_name, repository.select([""]))
        directory = repository.directory
        on_hub = repository.select(extensions)
        _fetch(repository, on_hub + repository.select_tokenizer() * auto_convert)
        if converts and ".bin" not in extensions and not _has_safetensors(directory):
            click.echo(".safetensors weights not found, downloading pytorch weights to convert...")
            _fetch(repository, repository.select([".bin"]))
    if converts:
        _convert(directory, any(name.endswith(".safetensors") for name in on_hub))
    if auto_convert and not is_speculator(directory):  # its tokenizer is the model's
        from tgis.convert import tokenizer

        click.echo(tokenizer.convert_to_fast_tokenizer(model_name, directory))


def _fetch_gguf(repository: "Repository", file: str) -> None:
    """Download a GGUF file and the other parts of its set. Raises OperatorError, DownloadError."""
    on_hub = repository.select([SUFFIX])
    if missing := [name for name in split_set(file) if name not in on_hub]:
        raise OperatorError(f"{repository.name} has no {missing[0]}")
    _fetch(repository, split_set(file))


def _fetch(repository: "Repository", names: list[str]) -> None:
    click.echo(f"Downloading {len(names)} files for model {repository.name}")
    repository.download(names)


def _convert(directory: Path, is_on_hub: bool) -> None:
    from tgis.convert import weights

    if not _has_safetensors(directory):
        click.echo(".safetensors weights not found, converting from pytorch weights...")
        click.echo(weights.convert_to_safetensors(directory))
    elif not is_on_hub:
        click.echo(
            ".safetensors weights not found on hub, but were found locally. Remove them first to re-convert"
        )


def _has_safetensors(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))


def find_files(model_name: str, revision: str | None, root: Path) -> Path:
    """Return the directory of a model that is not in GGUF format. Raises ModelNotFoundError."""
    refuse_gguf(Path(model_name))
    directory = cache.find_model_files(model_name, revision, root)
    refuse_gguf(directory)
    return directory


@click.command("convert-to-safetensors", cls=FileCommand)
@click.argument("model_name")
@click.argument("output_dir", type=click.Path(path_type=Path), required=False)
@revision_option
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Data type to convert a GGUF file's weights to; unset: float32.",
)
def convert_to_safetensors(
    model_name: str, output_dir: Path | None, revision: str | None, dtype: str | None
) -> None:
    """Convert the .bin files of MODEL_NAME, a directory or a model in the hub cache, to .safetensors files
    beside them. If MODEL_NAME is a GGUF file, write the whole model to OUTPUT_DIR."""
    files = find_gguf(model_name, revision, cache_root())
    if files is not None:
        if output_dir is None:
            raise click.UsageError(
                "Missing argument 'OUTPUT_DIR', the directory for the model of a GGUF file."
            )
        from tgis.shard.checkpoint.gguf_conversion import convert_gguf

        click.echo(convert_gguf(files, output_dir, dtype or DTYPES[0]))
        return
    if output_dir is not None or dtype is not None:
        raise click.UsageError("OUTPUT_DIR and --dtype are for GGUF files only.")
    directory = cache.find_model_files(model_name, revision, cache_root())
    from tgis.convert import weights

    click.echo(weights.convert_to_safetensors(directory))


@click.command("convert-to-fast-tokenizer", cls=FileCommand)
@click.argument("model_name")
@revision_option
@click.option(
    "--output-path",
    type=click.Path(path_type=Path),
    help="Directory for tokenizer.json; unset: the model's own.",
)
def convert_to_fast_tokenizer(model_name: str, revision: str | None, output_path: Path | None) -> None:
    """Create tokenizer.json from the tokenizer of MODEL_NAME, a directory or a model in the hub cache."""
    directory = find_files(model_name, revision, cache_root())
    from tgis.convert import tokenizer

    click.echo(tokenizer.convert_to_fast_tokenizer(model_name, directory, output_path))


@click.command("convert-to-onnx", cls=FileCommand)
@click.argument("model_name")
@click.argument("target_model_name", type=click.Path(path_type=Path))
@revision_option
@click.option(
    "--merge-graphs/--no-merge-graphs",
    default=False,
    help="Write one graph that runs with and without cached keys and values.",
)
@click.option(
    "--optimize/--no-optimize", default=False, help="Optimize the graphs: level O3 on a GPU, O1 on a CPU."
)
@click.option(
    "--provider", help="ONNX Runtime's execution provider; unset: CUDA's if there is a GPU, else the CPU's."
)
def convert_to_onnx(
    model_name: str,
    target_model_name: Path,
    revision: str | None,
    merge_graphs: bool,
    optimize: bool,
    provider: str | None,
) -> None:
    """Convert MODEL_NAME, a directory or a model in the hub cache, to ONNX in directory TARGET_MODEL_NAME.
    This needs optimum-onnx in a separate environment; without it, the error explains how to create one."""
    directory = find_files(model_name, revision, cache_root())
    from tgis.convert import onnx

    onnx.check_extra()
    provider = provider or onnx.default_provider()
    click.echo(f"Provider: {provider}, merge graphs: {merge_graphs}, optimize: {optimize}")
    click.echo(f"Model type: {onnx.model_type_of(directory)}")
    click.echo(onnx.convert_to_onnx(directory, target_model_name, provider, merge_graphs, optimize))


@click.command("read-gguf", cls=FileCommand, hidden=True)
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.argument("directory", type=click.Path(path_type=Path))
def read_gguf(files: tuple[Path, ...], directory: Path) -> None:
    """Write the configuration and tokenizer of a GGUF model to the empty DIRECTORY, for the launcher."""
    gc.disable()  # reading a vocabulary creates millions of objects and no garbage
    from tgis.convert.gguf.model_directory import write_model_directory

    write_model_directory(files, directory)


COMMANDS = (
    read_gguf,
    download_weights,
    convert_to_safetensors,
    convert_to_fast_tokenizer,
    convert_to_onnx,
)
