"""Counts the kernels that Triton compiles, and those that it loads from its cache."""

from typing import Any

from triton import knobs


class Compilations:
    def __init__(self) -> None:
        self.num_new = self.num_found = 0

    def __call__(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        self.num_found += cache_hit
        self.num_new += not cache_hit
        print(f"{getattr(src, 'name', 'kernel')}: code is {'found' if cache_hit else 'new'}", flush=True)

    def __str__(self) -> str:
        return f"{self.num_new} new, {self.num_found} found"


def count_compilations() -> Compilations:
    """Start to count."""
    count = Compilations()
    knobs.compilation.listener = count
    return count
