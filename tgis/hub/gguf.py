"""Refuses GGUF files, which are not served, with the command by which transformers converts them."""

import os
import shlex
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from tgis.hub.model_files import WEIGHT_FILES, ModelNotFoundError

SCRIPT = (
    "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T, GgufConfig as G; "
    "d, f, o = sys.argv[1:]; "
    "M.from_pretrained(d, gguf_file=f, quantization_config=G(dequantize=True)).save_pretrained(o); "
    "T.from_pretrained(d, gguf_file=f).save_pretrained(o)"
)
"""Converts a GGUF file in Python; its arguments are the file's directory and name, and the new directory."""
COMMAND = f'pip install gguf && python -c "{SCRIPT}"'
SUFFIX, MAGIC = ".gguf", b"GGUF"


def refuse_gguf(place: Path) -> None:
    """Raise ModelNotFoundError for a GGUF file, and for a directory that has no weights but such files."""
    file = place if os.path.isfile(place) and _is_gguf(place) else _only_weights(place)
    if file is not None:
        raise ModelNotFoundError(f"{file} is {_refusal(str(file.parent), file.name)}")


def refuse_gguf_on_hub(name: str, files: Sequence[str]) -> None:
    """Raise ModelNotFoundError for a model of the hub that has no weights but GGUF files."""
    found = min((file for file in files if file.endswith(SUFFIX)), default=None)
    if found is not None and not any(fnmatch(file, pattern) for file in files for pattern in WEIGHT_FILES):
        raise ModelNotFoundError(f"{found} of {name} is {_refusal(name, found)}")


def _refusal(directory: str, name: str) -> str:
    arguments = shlex.join([directory, name, Path(name).stem])
    return f"a GGUF file, which is not served yet; transformers converts it: {COMMAND} {arguments}"


def _only_weights(directory: Path) -> Path | None:
    """Return a GGUF file of a directory without other weights."""
    if not os.path.isdir(directory) or any(any(directory.glob(pattern)) for pattern in WEIGHT_FILES):
        return None
    return min(directory.glob(f"*{SUFFIX}"), default=None)


def _is_gguf(file: Path) -> bool:
    if file.suffix == SUFFIX:
        return True
    try:
        with file.open("rb") as content:
            return content.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
