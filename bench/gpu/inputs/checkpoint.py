"""Creates a checkpoint of the service's size in a temporary directory, and thereby in the page cache."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.gpu.target import Target
from bench.shapes import write_checkpoint


@contextmanager
def written_checkpoint(target: Target, name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tgis-gpu-") as directory:
        path = Path(directory)
        write_checkpoint(target.shape(name), path, target.device)
        yield path
