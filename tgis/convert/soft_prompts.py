"""Converts a soft prompt between its two layouts: `decoder.pt` and `encoder.pt`, and PEFT's files.

The values stay bit-identical, and readers never see a partial file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tgis.convert.atomic_write import ConversionError, staging_directory
from tgis.hub import model_files
from tgis.prompts.errors import AdapterError, AdapterNotFoundError
from tgis.prompts.lora_files import CONFIG, SAFETENSORS, WEIGHTS, UnsupportedTypeError
from tgis.prompts.soft_prompt import (
    DECODER,
    ENCODER,
    PEFT_KEY,
    choose_prompt_files,
    read_peft_type,
    read_prompt,
)

TORCH_FILES = (ENCODER, DECODER)
# PEFT's prompt tuning stores the decoder's half, but neither trains nor uses it.
_NOT_USED = "; PEFT itself never uses the decoder's half of a prompt"


def convert_prompt(source: Path, target: Path, with_decoder: bool, overwrite: bool) -> str:
    """Convert the prompt in the directory `source` to the other layout, in `target`; return a message.

    PEFT's files for an encoder-decoder contain a half for the decoder, which PEFT does not use. It is left
    out unless `with_decoder` is True. Raises ConversionError and model_files.ModelNotFoundError."""
    try:
        names = choose_prompt_files(os.listdir(source), takes_encoder=True)
        prompt = read_prompt(source, None)
    except AdapterNotFoundError as error:
        raise ConversionError(f"{source} contains no soft prompt") from error
    except UnsupportedTypeError as error:
        kind = read_peft_type(source)
        raise ConversionError(f"{source} has peft_type {kind}; only soft prompts can be converted") from error
    except AdapterError as error:
        raise ConversionError(f"{source}: {error}") from error
    except OSError as error:
        raise ConversionError(f"{source} cannot be read: {error.strerror}") from error
    parts = prompt.tensors
    is_peft = any(name in WEIGHTS for name in names)
    if is_peft:
        parts = split_embeddings(parts["decoder"], model_files.read_json(source, CONFIG))
    has_both = len(parts) == 2
    if is_peft and has_both and not with_decoder:
        del parts["decoder"]
    written = write_prompt(parts, target, not is_peft, overwrite)
    counts = " and ".join(f"{len(part)} virtual tokens for the {name}" for name, part in parts.items())
    return f"Wrote {' and '.join(written)} to {target}: {counts}{_NOT_USED * has_both}"


def write_prompt(parts: Mapping[str, Tensor], target: Path, is_peft: bool, overwrite: bool) -> list[str]:
    """Write a prompt's `parts` to the directory `target`; return the names of the files.

    The parts are "decoder", "encoder" or both, [num_virtual_tokens, width] each. Raises ConversionError, also
    if `target` contains a prompt and `overwrite` is False."""
    existing = [name for name in (*WEIGHTS, CONFIG, *TORCH_FILES) if (target / name).exists()]
    if existing and not overwrite:
        raise ConversionError(f"{target} already has {' and '.join(existing)}; --overwrite replaces them")
    is_new = not target.exists()
    try:
        (target.parent if is_new else target).mkdir(parents=True, exist_ok=True)
        with staging_directory(target.parent if is_new else target) as staged:
            made = staged / "prompt"
            made.mkdir()
            names = (_write_peft if is_peft else _write_torch)(parts, made)
            if is_new:
                made.rename(target)
            else:
                _replace(made, target, names, existing)
    except OSError as error:
        raise ConversionError(f"{target} cannot be written to: {error.strerror}") from error
    return names


def split_embeddings(embeddings: Tensor, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Split PEFT's tensor, [rows, width], into its parts; the encoder's is first. Raises ConversionError."""
    is_encoder_decoder = config.get("task_type") == "SEQ_2_SEQ_LM"
    num_parts = config.get("num_transformer_submodules") or (2 if is_encoder_decoder else 1)
    num_rows = len(embeddings)
    num_tokens = config.get("num_virtual_tokens")
    if num_parts not in (1, 2) or num_parts > 1 + is_encoder_decoder:
        text = f"num_transformer_submodules is {num_parts} and task_type {config.get('task_type')}"
        raise ConversionError(f"{CONFIG}: {text}, which is not a soft prompt for text generation")
    if num_tokens is not None and (type(num_tokens) is not int or num_tokens * num_parts != num_rows):
        text = f"{num_parts} parts of {num_tokens} virtual tokens do not match {num_rows} rows"
        raise ConversionError(f"{CONFIG}: {text}")
    if not is_encoder_decoder:
        return {"decoder": embeddings}
    if num_parts == 1:
        return {"encoder": embeddings}
    if num_rows % 2:
        raise ConversionError(f"{num_rows} rows cannot be split evenly between encoder and decoder")
    encoder, decoder = embeddings.chunk(2)
    return {"encoder": encoder, "decoder": decoder}


def _write_torch(parts: Mapping[str, Tensor], staged: Path) -> list[str]:
    names = []
    for name in TORCH_FILES:
        part = parts.get(name.removesuffix(".pt"))
        if part is not None:
            # torch.save writes a tensor's entire storage, so a view must be copied.
            torch.save(part.detach().clone(), staged / name)
            names.append(name)
    return names


def _write_peft(parts: Mapping[str, Tensor], staged: Path) -> list[str]:
    embeddings = _join(parts)
    num_parts = len(parts)
    config = {
        "peft_type": "PROMPT_TUNING",
        "task_type": "SEQ_2_SEQ_LM" if "encoder" in parts else "CAUSAL_LM",
        "num_virtual_tokens": len(embeddings) // num_parts,
        "token_dim": embeddings.shape[1],
        "num_transformer_submodules": num_parts,
        "prompt_tuning_init": "RANDOM",
        "inference_mode": True,
    }
    (staged / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file({PEFT_KEY: embeddings}, staged / SAFETENSORS, metadata={"format": "pt"})
    return [CONFIG, SAFETENSORS]


def _join(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the parts as one tensor [rows, width], the encoder's rows before the decoder's.

    Raises ConversionError if their shapes or types differ."""
    encoder, decoder = parts.get("encoder"), parts.get("decoder")
    if encoder is None or decoder is None:
        return next(part for part in (encoder, decoder) if part is not None).detach().contiguous()
    if encoder.shape != decoder.shape or encoder.dtype != decoder.dtype:
        shapes = " and ".join(f"{list(part.shape)} {_name(part.dtype)}" for part in (encoder, decoder))
        raise ConversionError(f"PEFT stores encoder and decoder with the same shape and type, not {shapes}")
    return torch.cat((encoder.detach(), decoder.detach()))


def _replace(made: Path, target: Path, names: list[str], existing: list[str]) -> None:
    """Move the files `names`, the last of which determines the layout, then remove the other existing
    files."""
    for name in names:
        os.replace(made / name, target / name)
    for name in existing:
        if name not in names:
            (target / name).unlink(missing_ok=True)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
