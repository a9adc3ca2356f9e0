"""Reads torch's pickled tensors without running other code from the pickle.

Only the calls that build tensors are allowed."""

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from tgis.errors import OperatorError

TORN = "cannot be read: it is truncated or damaged"
INCOMPLETE = "the checkpoint is truncated or damaged"
_ZIP = b"PK\x03\x04"
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


class PickleError(OperatorError):
    """Error when a file cannot be used; the text is one line that names it."""


def open_pickle(file: Path) -> dict[str, Any]:
    """Return the file's contents by name, with the tensors memory-mapped.

    Files from before torch 1.6 cannot be mapped and are read as a whole.

    Raises PickleError, OSError."""
    found = load_pickle(file)
    if not isinstance(found, dict):
        raise PickleError(f"{file} does not hold tensors by name")
    return found


def load_pickle(file: Path) -> object:
    """Return the object in the file, of any type; otherwise like `open_pickle`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of an unusual pickle protocol
            found: object = torch.load(file, map_location="cpu", weights_only=True, mmap=can_map(file))
    except pickle.UnpicklingError as error:
        raise PickleError(f"{file} {_explain(error, file)}") from error
    except (FileNotFoundError, MemoryError):
        raise
    # On a truncated or damaged file the reader may raise any exception.
    except Exception as error:
        raise PickleError(f"{file} {TORN}") from error
    return found


def can_map(file: Path) -> bool:
    """Return True if the file is a zip archive, the format that can be mapped. Raises OSError."""
    with file.open("rb") as content:
        return content.read(len(_ZIP)) == _ZIP


def _explain(error: pickle.UnpicklingError, file: Path) -> str:
    refused = _GLOBAL.search(str(error))
    if refused is None:
        return f"{TORN}, or not a pickle of tensors"
    if _ends_within(file, refused[1]):
        return TORN
    return f"wants to call {refused[1]}, which tensors do not need; it was not run"


def _ends_within(file: Path, name: str) -> bool:
    """Return True if the file ends within `name`, the name of what the pickle wants to call.

    A complete pickle has a line break after the module and after the attribute. torch drops the last
    character of each, whatever it is."""
    module, _, attribute = name.rpartition(".")
    begun = tuple(f"c{text}".encode() for text in (module, f"{module}\n{attribute}"))
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - len(name) - 3))
        tail = content.read()
    return tail.endswith(begun) or tail[:-1].endswith(begun)
