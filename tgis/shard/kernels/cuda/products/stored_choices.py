"""Choices of products in a file of the run, so that a shard that is started again chooses as before: other
sums would give the sequences that it continues other bits."""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from tgis.shard.kernels.cuda.products.few_rows import MatrixSize

logger = logging.getLogger(__name__)


class StoredChoices:
    """File with the choice for each size: True for `multiply_few`. Without a path, nothing is stored."""

    def __init__(self, path: Path | None):
        self._path = path

    def read(self, sizes: Iterable[MatrixSize]) -> dict[MatrixSize, bool] | None:
        """Return the choices for these sizes, or None if not all are stored."""
        if self._path is None:
            return None
        try:
            stored = json.loads(self._path.read_text())
            return {size: bool(stored[_name(size)]) for size in sizes}
        except (OSError, ValueError, KeyError):  # the first start, a file that was cut, or another model
            return None

    def write(self, choices: Mapping[MatrixSize, bool]) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({_name(size): is_used for size, is_used in choices.items()}))
        except OSError as error:
            logger.warning("a shard that is started again will time products again: %s", error)


NOT_STORED = StoredChoices(None)


def _name(size: MatrixSize) -> str:
    return f"{size} {size.dtype}{' wide' if size.is_wide else ''}"
