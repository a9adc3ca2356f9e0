"""Defines the commands that download a model's files and convert them to the formats that are served."""

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from tgis.cli.command import FileCommand
from tgis.config.model import DTYPES
from tgis.errors import OperatorError
from tgis.hub import cache
from tgis.hub.gguf_files import SUFFIX, find_gguf, refuse_gguf, refuse_gguf_on_hub, split_set

if TYPE_CHECKING:
    from tgis.hub.download import Repository
    from tgis.shard.quantize.gguf.output import GgufKind
    from tgis.shard.quantize.settings import Method

_revision = click.option("--revision", help="Branch, tag or commit of MODEL_NAME; unset: main.")


def cache_root() -> Path:
    """Return the hub cache's root, read from the environment. Raises cache.CacheConflictError."""
    names = ("hf_hub_cache", "transformers_cache", "huggingface_hub_cache", "hf_home", "home")
    return cache.cache_root(**{name: os.environ.get(name.upper()) for name in names})


@click.command("download-weights", cls=FileCommand)
@click.argument("model_name")
@_revision
@click.option("--token", help="Access token of the hub; unset: HF_TOKEN, else that of `hf auth login`.")
@click.option(
    "--extension",
    default=".safetensors",
    help="Files to download, by the ends of their names, separated by commas; one alone also stands for "
    ".json, .py, .model, .md and .jinja.",
)
@click.option(
    "--auto-convert/--no-auto-convert",
    default=True,
    help="Make .safetensors where the hub has none, and a tokenizer.json.",
)
def download_weights(
    model_name: str, revision: str | None, token: str | None, extension: str, auto_convert: bool
) -> None:
    """Download MODEL_NAME from the hub to its cache; what is there already is not downloaded again."""
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
        directory, on_hub = Path(model_name), [".safetensors"]
    else:
        repository = download.Repository(model_name, revision, token, cache_root())
        if SUFFIX not in extensions:
            refuse_gguf_on_hub(model_name, repository.select([""]))
        directory, on_hub = repository.directory, repository.select(extensions)
        _fetch(repository, on_hub + repository.select_tokenizer() * auto_convert)
        if converts and ".bin" not in extensions and not _has_safetensors(directory):
            click.echo(".safetensors weights not found, downloading pytorch weights to convert...")
            _fetch(repository, repository.select([".bin"]))
    if converts:
        _convert(directory, any(name.endswith(".safetensors") for name in on_hub))
    if auto_convert:
        from tgis.convert import tokenizer

        click.echo(tokenizer.convert_to_fast_tokenizer(model_name, directory))


def _fetch_gguf(repository: "Repository", file: str) -> None:
    """Download a GGUF file with the other parts of its set. Raises OperatorError, DownloadError."""
    there = repository.select([SUFFIX])
    if missing := [name for name in split_set(file) if name not in there]:
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
        found = "not found on hub, but were found locally. Remove them first to re-convert"
        click.echo(f".safetensors weights {found}")


def _has_safetensors(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))


def _find_files(model_name: str, revision: str | None, root: Path) -> Path:
    """Return the directory of a model that is not in GGUF form. Raises ModelNotFoundError."""
    refuse_gguf(Path(model_name))
    directory = cache.find_model_files(model_name, revision, root)
    refuse_gguf(directory)
    return directory


@click.command("convert-to-safetensors", cls=FileCommand)
@click.argument("model_name")
@click.argument("output_dir", type=click.Path(path_type=Path), required=False)
@_revision
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Type of the weights of a GGUF file; unset: float32."
)
def convert_to_safetensors(
    model_name: str, output_dir: Path | None, revision: str | None, dtype: str | None
) -> None:
    """Make .safetensors files of the .bin files of MODEL_NAME, a directory or in the hub cache, beside them.
    If it is a GGUF file, write the whole model to OUTPUT_DIR."""
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
@_revision
@click.option(
    "--output-path", type=click.Path(path_type=Path), help="Directory that gets it; unset: the model's own."
)
def convert_to_fast_tokenizer(model_name: str, revision: str | None, output_path: Path | None) -> None:
    """Make a tokenizer.json of the tokenizer of MODEL_NAME, a directory or in the hub cache."""
    directory = _find_files(model_name, revision, cache_root())
    from tgis.convert import tokenizer

    click.echo(tokenizer.convert_to_fast_tokenizer(model_name, directory, output_path))


@click.command("convert-to-onnx", cls=FileCommand)
@click.argument("model_name")
@click.argument("target_model_name", type=click.Path(path_type=Path))
@_revision
@click.option("--merge-graphs/--no-merge-graphs", default=False, help="One graph with and without past.")
@click.option("--optimize/--no-optimize", default=False, help="O3 on a GPU, O1 on a CPU.")
@click.option("--provider", help="ONNX Runtime's execution provider; unset: CUDA's where there is a GPU.")
def convert_to_onnx(
    model_name: str,
    target_model_name: Path,
    revision: str | None,
    merge_graphs: bool,
    optimize: bool,
    provider: str | None,
) -> None:
    """Write MODEL_NAME, a directory or in the hub cache, as ONNX to the directory TARGET_MODEL_NAME. Needs
    optimum-onnx, which works in another environment only: without it, the error says how to make one."""
    directory = _find_files(model_name, revision, cache_root())
    from tgis.convert import onnx

    onnx.check_extra()
    provider = provider or onnx.default_provider()
    click.echo(f"Provider: {provider}, merge graphs: {merge_graphs}, optimize: {optimize}")
    click.echo(f"Model type: {onnx.model_type_of(directory)}")
    click.echo(onnx.convert_to_onnx(directory, target_model_name, provider, merge_graphs, optimize))


@click.command("quantize", cls=FileCommand)
@click.argument("model_name")
@click.argument("output", type=click.Path(path_type=Path))
@_revision
@click.option(
    "--method",
    type=click.Choice(["gptq", "fp8", "int8", "gguf"]),
    default="gptq",
    help="fp8 and int8: per row. gguf: OUTPUT is a file, for llama.cpp too.",
)
@click.option("--gguf-type", type=click.Choice(["q8_0", "q4_0", "q4_1"]), help="Unset: q8_0.")
@click.option("--bits", type=click.Choice(["2", "3", "4", "8"]), default="4", help="GPTQ: bits of a weight.")
@click.option("--groupsize", type=click.IntRange(-1), default=128, help="GPTQ: columns of a scale; -1: all.")
@click.option("--act-order/--no-act-order", default=False, help="GPTQ: columns by the size of their inputs.")
@click.option("--sym/--no-sym", default=True, help="GPTQ: codes symmetric around zero.")
@click.option("--percdamp", type=click.FloatRange(0, min_open=True), default=0.01, help="GPTQ: damping.")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help='Text, or .jsonl of objects with a "text"; unset: wikitext-2, if it is in the hub cache.',
)
@click.option("--samples", type=click.IntRange(1), default=128, help="Windows of the text.")
@click.option(
    "--seqlen", type=click.IntRange(8), default=2048, help="Tokens of a window, or the model's most."
)
@click.option("--seed", type=int, default=0, help="Seed of the windows' places.")
@click.option("--trust-remote-code/--no-trust-remote-code", default=False, help="No effect: no code is run.")
@click.option("--upload-to-model-id", help="Refused: `hf upload` uploads OUTPUT.")
def quantize(
    model_name: str,
    output: Path,
    revision: str | None,
    method: str,
    gguf_type: str | None,
    calibration: Path | None,
    bits: str,
    groupsize: int,
    trust_remote_code: bool,
    upload_to_model_id: str | None,
    **others: Any,
) -> None:
    """Write MODEL_NAME, a directory or in the hub cache, with quantized weights to the directory OUTPUT, or
    as the GGUF file OUTPUT. A run that was interrupted goes on when it is started again, except for GGUF."""
    if upload_to_model_id:
        text = f"hf upload {upload_to_model_id} {output}"
        raise OperatorError(f"--upload-to-model-id is not supported: quantize without it, then: {text}")
    if groupsize == 0:
        raise click.BadParameter("0 is neither -1 nor a number of columns.", param_hint="--groupsize")
    if gguf_type is not None and method != "gguf":
        raise click.UsageError("--gguf-type is for --method gguf only.")
    root = cache_root()
    directory = _find_files(model_name, revision, root)
    from tgis.process.control_groups import count_cores
    from tgis.shard.startup.platform import configure_torch

    configure_torch(count_cores())
    if method == "gguf":
        from tgis.shard.quantize.gguf import output as gguf_output

        click.echo(gguf_output.write_gguf(directory, output, cast("GgufKind", gguf_type or "q8_0")))
        return
    from tgis.shard.quantize import run
    from tgis.shard.quantize.settings import QuantizeSettings

    settings = QuantizeSettings(method=cast("Method", method), bits=int(bits), group_size=groupsize, **others)
    click.echo(run.quantize(directory, output, settings, calibration, root))


@click.command("read-gguf", cls=FileCommand, hidden=True)
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.argument("directory", type=click.Path(path_type=Path))
def read_gguf(files: tuple[Path, ...], directory: Path) -> None:
    """Write what a model in GGUF form is served from to the empty DIRECTORY. The launcher runs this."""
    gc.disable()  # a vocabulary makes millions of objects and no garbage
    from tgis.convert.gguf.model_directory import write_model_directory

    write_model_directory(files, directory)


COMMANDS = (
    read_gguf,
    download_weights,
    convert_to_safetensors,
    convert_to_fast_tokenizer,
    convert_to_onnx,
    quantize,
)
