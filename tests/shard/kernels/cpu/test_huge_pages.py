"""Memory of several sizes and chunks."""

import pytest

from tgis.shard.kernels.cpu import huge_pages
from tgis.shard.kernels.cpu.huge_pages import Arena


def test_parts_are_zeroed_aligned_and_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_CHUNK", 4096)
    arena = Arena()
    parts = [arena.allocate(num_bytes) for num_bytes in (100, 1, 64, 5000, 3000, 2000)]
    for i, part in enumerate(parts):
        assert part.data_ptr() % 64 == 0
        assert not part.any(), "not zero, or overlapping"
        part.fill_(i + 1)
    assert [part.unique().tolist() for part in parts] == [[i + 1] for i in range(len(parts))]
