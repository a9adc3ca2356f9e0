"""Files of trained speculators, and reports of their training."""

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: x.contiguous() for name, x in tensors.items()}, directory / file)


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
