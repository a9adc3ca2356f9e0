"""Reads .bin checkpoints without ever running what a pickle may hold: only what builds tensors is allowed."""

import logging
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tgis.shard.stored import WeightsError

logger = logging.getLogger(__name__)

_ZIP = b"PK\x03\x04"
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def open_pickle(file: Path) -> Mapping[str, Tensor]:
    """The file's tensors by name, mapped into memory; files from before torch 1.6 are read as a whole.

    Raises WeightsError, OSError."""
    mapped = can_map(file)
    if not mapped:
        logger.warning("%s is of an old format that takes memory for all of it while it is read", file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a pickle is of another protocol than usual
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise WeightsError(f"{file} {_explain(error)}") from error
    # Of a torn file the reader raises whatever it stumbles over.
    except Exception as error:
        raise WeightsError(f"{file} cannot be read: it is truncated or damaged") from error
    if not isinstance(found, dict):
        raise WeightsError(f"{file} does not hold tensors by name")
    return {name: tensor.detach() for name, tensor in found.items() if _is_plain(tensor)}


def can_map(file: Path) -> bool:
    """Whether the file is of a format that can be mapped. Raises OSError."""
    with file.open("rb") as content:
        return content.read(len(_ZIP)) == _ZIP


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _explain(error: pickle.UnpicklingError) -> str:
    refused = _GLOBAL.search(str(error))
    if refused is None:
        return "cannot be read: it is not a pickle of tensors"
    return f"wants to call {refused[1]}, which tensors do not need; it was not run"
