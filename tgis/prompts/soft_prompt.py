"""Reads and checks the directory of a tuned soft prompt before it is loaded into a model.

The directory contains decoder.pt and encoder.pt, or the files that PEFT saves."""

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tgis.prompts.errors import AdapterError, AdapterNotFoundError, TooLargeError, quote
from tgis.prompts.ids import is_unfinished
from tgis.prompts.lora_files import CONFIG, MAX_CONFIG_BYTES, STEM, WEIGHTS, UnsupportedTypeError
from tgis.tensor_files.errors import TensorFileError
from tgis.tensor_files.mapped_safetensors import map_untrusted
from tgis.tensor_files.safe_pickle import load_untrusted

DECODER, ENCODER = "decoder.pt", "encoder.pt"
PEFT_KEY = "prompt_embeddings"
# PEFT's types that consist only of the saved embeddings.
PEFT_PROMPTS = ("PROMPT_TUNING", "P_TUNING")

SLACK_BYTES = 1 << 20  # of a file, in addition to the elements
MAX_HEADER_BYTES = 1 << 20
MAX_UNFITTED_BYTES = 2 << 30  # of a file, if no model is given
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NO_TENSOR = "Invalid prefix embedding tensor"


@dataclass(frozen=True)
class AdapterRequirements:
    """Shapes and sizes of soft prompts and adapters that a model accepts."""

    prompt_width: int
    dtype: torch.dtype
    is_encoder_decoder: bool
    max_prompt_tokens: int
    max_prompt_bytes: int
    max_adapter_bytes: int


@dataclass(frozen=True)
class SoftPrompt:
    """Embeddings of virtual tokens, [num_tokens, width] and contiguous. At least one tensor is given."""

    decoder: Tensor | None
    encoder: Tensor | None

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = {"decoder": self.decoder, "encoder": self.encoder}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def read_prompt(directory: Path, required: AdapterRequirements | None) -> SoftPrompt:
    """Read the soft prompt in `directory`. Tensors may be memory-mapped.

    With `required`, the tensors are checked against that model and converted to its dtype. Without it, they
    keep their stored dtype, and only tensors that no model accepts are refused. Raises AdapterNotFoundError
    if there is no soft prompt, TooLargeError, AdapterError with the cause, and OSError."""
    try:
        names = choose_prompt_files(os.listdir(directory), required is None or required.is_encoder_decoder)
        _check_files(directory, names, required)
        contents = {name: _read(directory, name) for name in names if name != CONFIG}
    except FileNotFoundError as error:
        raise AdapterNotFoundError from error
    checked = {name: _check(content, required) for name, content in contents.items()}
    decoders = [checked[name] for name in (*WEIGHTS, DECODER) if name in checked]
    return SoftPrompt(next(iter(decoders), None), checked.get(ENCODER))


def read_peft_type(directory: Path) -> str | None:
    """Return PEFT's type of an adapter; None if its configuration is missing or invalid. Raises OSError."""
    try:
        with (directory / CONFIG).open("rb") as content:
            config = json.loads(content.read(MAX_CONFIG_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    return kind if isinstance(kind, str) else None


def choose_prompt_files(names: Collection[str], takes_encoder: bool) -> list[str]:
    """Return the files of a soft prompt among the names in a directory; none if there is no soft prompt."""
    if any(Path(name).stem == STEM and not is_unfinished(name) for name in names):
        chosen = choose_adapter_files(names)
        return chosen if any(name in WEIGHTS for name in chosen) else []
    return [name for name in (DECODER, ENCODER)[: 1 + takes_encoder] if name in names]


def choose_adapter_files(names: Collection[str]) -> list[str]:
    """Return the files that PEFT saves among the names in a directory."""
    weights = [name for name in WEIGHTS if name in names][:1]
    return [*weights, *(name for name in (CONFIG,) if name in names)]


def max_file_bytes(required: AdapterRequirements | None) -> int:
    """Return the maximum size of a soft prompt's file that `required` accepts, in any dtype."""
    if required is None:
        return MAX_UNFITTED_BYTES
    return required.max_prompt_bytes // required.dtype.itemsize * torch.float64.itemsize + SLACK_BYTES


def _check_files(directory: Path, names: Collection[str], required: AdapterRequirements | None) -> None:
    if not names:
        raise AdapterNotFoundError
    if any((directory / name).stat().st_size > max_file_bytes(required) for name in names):
        raise TooLargeError
    if not any(name in WEIGHTS for name in names):
        return
    if required and required.is_encoder_decoder:
        raise AdapterError("encoder-decoder architectures not supported for peft models")
    kind = read_peft_type(directory)
    if kind is not None and kind not in PEFT_PROMPTS:
        raise UnsupportedTypeError(f"adapter type {quote(kind)} is not currently supported")


def _read(directory: Path, name: str) -> object:
    """Read the object that should be the embeddings. Raises AdapterError and OSError."""
    file = directory / name
    is_pickle = file.suffix != ".safetensors"
    try:
        content = load_untrusted(file) if is_pickle else map_untrusted(file, MAX_HEADER_BYTES)
    except TensorFileError as error:
        raise AdapterError(_NO_TENSOR) from error
    if name in WEIGHTS:
        return content.get(PEFT_KEY) if isinstance(content, dict) else None
    return content


def _check(content: object, required: AdapterRequirements | None) -> Tensor:
    """Return the checked embeddings, [num_tokens, width]. Clients rely on the order of the checks."""
    if not isinstance(content, Tensor) or content.dtype not in _DTYPES or content.dim() != 2:
        raise AdapterError(_NO_TENSOR)
    tensor = content.detach()
    num_tokens, width = tensor.shape
    if not num_tokens or (required and num_tokens > required.max_prompt_tokens):
        raise AdapterError(f"Invalid prefix embedding length of {num_tokens}")
    if required and required.is_encoder_decoder and num_tokens % 2:
        raise AdapterError("Encoder/decoder prefix tensor must be of even length")
    if not width or (required and width != required.prompt_width):
        expected = required.prompt_width if required else "1 or more"
        raise AdapterError(f"Prefix embedding tensor dim {width} does not match model ({expected})")
    if tensor.numel() * tensor.element_size() > max_file_bytes(required):  # rows may share memory
        raise TooLargeError
    return _cast(tensor, required.dtype if required else tensor.dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor of that dtype. Raises AdapterError for elements that are not finite."""
    if not tensor.isfinite().all():
        raise AdapterError("Prefix contains non-finite elements")
    cast = tensor.to(dtype).contiguous()
    if not cast.isfinite().all():
        change = f"from {tensor.dtype} to {dtype}"
        raise AdapterError(f"Prefix contains non-finite elements after conversion {change}")
    return cast
