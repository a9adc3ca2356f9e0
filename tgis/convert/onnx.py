"""Converts a model to ONNX with optimum-onnx, which must be installed."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tgis.convert.atomic_write import ConversionError
from tgis.errors import first_line
from tgis.hub import model_files

# The newest release of optimum-onnx needs an older transformers than this service.
ELSEWHERE = (
    "convert-to-onnx needs optimum-onnx, which needs transformers below 4.58 and therefore a separate "
    "environment: python -m venv onnxenv; onnxenv/bin/pip install 'optimum-onnx[onnxruntime]'; "
    "onnxenv/bin/optimum-cli export onnx --model MODEL --task text-generation-with-past DIRECTORY"
)
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
LEVELS = {CPU: "O1", CUDA: "O3"}


def default_provider() -> str:
    return CUDA if torch.cuda.is_available() else CPU


def check_extra() -> None:
    """Check that optimum-onnx is installed. Raises ConversionError if not."""
    try:
        is_installed = all(find_spec(name) for name in ("optimum.exporters.onnx", "onnxruntime"))
    except ModuleNotFoundError:  # a parent package of optimum.exporters.onnx is missing
        is_installed = False
    if not is_installed:
        raise ConversionError(ELSEWHERE)


def _import_exporter() -> Any:
    check_extra()
    try:
        from optimum.exporters.onnx import main_export
    except ImportError as error:
        versions = ", ".join(f"{name} {version(name)}" for name in ("optimum-onnx", "transformers", "torch"))
        raise ConversionError(f"{ELSEWHERE} (installed here: {versions})") from error
    return main_export


def model_type_of(directory: Path) -> str:
    """Return the model type in config.json. Raises ConversionError if there is none."""
    model_type = model_files.read_json(directory, "config.json").get("model_type")
    if not isinstance(model_type, str):
        raise ConversionError(f"{directory}: config.json has no model_type")
    return model_type


def convert_to_onnx(directory: Path, target: Path, provider: str, merge_graphs: bool, optimize: bool) -> str:
    """Write the ONNX model and its other files to `target`; return a message. Raises ConversionError."""
    main_export = _import_exporter()
    is_encoder_decoder = bool(model_files.read_json(directory, "config.json").get("is_encoder_decoder"))
    try:
        main_export(
            str(directory),
            str(target),
            task="text2text-generation-with-past" if is_encoder_decoder else "text-generation-with-past",
            device="cuda" if provider == CUDA else "cpu",
            optimize=LEVELS.get(provider, LEVELS[CPU]) if optimize else None,
            no_post_process=not merge_graphs,
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # the exporter raises many types, from several libraries
        raise ConversionError(f"{directory} cannot be converted to ONNX: {first_line(error)}") from error
    return f"Saved ONNX model to {target}"
