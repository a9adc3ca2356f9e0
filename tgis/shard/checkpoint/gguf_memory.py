"""Computes the memory that the matrices of GGUF files need, by type."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.gguf.checkpoint import GgufCheckpoint
from tgis.shard.checkpoint.gguf.codes import CODINGS
from tgis.shard.checkpoint.gguf.tensor import PLAIN_TYPES
from tgis.shard.checkpoint.opening import is_gguf, list_gguf
from tgis.tensor_files.gguf_types import TYPES, GgufType

_BY_NAME = {each.name: each for each in TYPES.values()}

HasProducts = Callable[[CodeLayout], bool]
"""Function that returns True if matrices of a layout are kept as codes."""


@dataclass(frozen=True)
class GgufMemory:
    """Matrices of a model's GGUF files. `elements` maps each type to its number of weights."""

    elements: Mapping[str, int]

    @property
    def main_type(self) -> str:
        """Most frequent type that can be kept as codes, or the most frequent type if none can."""
        kept = [name for name in self.elements if name in CODINGS]
        return max(kept or self.elements, key=lambda name: self.elements[name])

    @property
    def main_layout(self) -> CodeLayout | None:
        """Layout of the main type; None if no weights can be kept as codes."""
        coding = CODINGS.get(self.main_type)
        return coding.layout if coding else None

    def list_shares(self) -> list[str]:
        """Return texts such as `63 % Q8_0`: the types with their shares of the weights, the largest first."""
        total = sum(self.elements.values())
        ordered = sorted(self.elements.items(), key=lambda item: -item[1])
        shares = [(name, round(100 * count / total)) for name, count in ordered]
        return [f"{share} % {name}" if share else f"under 1 % {name}" for name, share in shares]

    def keeps(self, name: str, has_products: HasProducts) -> bool:
        """Return True if weights of a type are kept as codes."""
        return name in CODINGS and has_products(CODINGS[name].layout)

    def count_bytes(
        self, has_products: HasProducts, float_bytes: int, count_code_bytes: Callable[[CodeLayout], float]
    ) -> int:
        """Return the bytes of all weights. Weights that are not kept as codes take `float_bytes` each,
        others what `count_code_bytes` returns."""
        total = 0.0
        for name, count in self.elements.items():
            is_kept = self.keeps(name, has_products)
            total += count * (count_code_bytes(CODINGS[name].layout) if is_kept else float_bytes)
        return int(total)

    def list_widened(self, has_products: HasProducts) -> Iterator[tuple[GgufType, int]]:
        """Yield the quantized types that are not kept as codes, each with its number of weights."""
        for name, count in self.elements.items():
            if name not in PLAIN_TYPES and not self.keeps(name, has_products):
                yield _BY_NAME[name], count


def measure_gguf(directory: Path) -> GgufMemory | None:
    """Return the matrices of the GGUF files in a directory; None if its weights are in other files. Raises
    WeightsError."""
    if not is_gguf(directory):
        return None
    paths = tuple(list_gguf(directory))
    return _measure(paths, tuple(map(_version_of, paths)))


@lru_cache(maxsize=1)  # a start asks five times, and reading a vocabulary takes a tenth of a second
def _measure(paths: tuple[Path, ...], versions: tuple[tuple[int, ...], ...]) -> GgufMemory | None:
    """Return the matrices of files that have these versions."""
    counts = GgufCheckpoint(paths).count_by_type()
    return GgufMemory(counts) if counts else None


def _version_of(path: Path) -> tuple[int, ...]:
    """Return numbers that change with a file's content; none if the file is missing."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
