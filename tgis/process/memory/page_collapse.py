"""Moves the memory of a started process into huge pages.

Between two tokens of a single stream, the shard reads all weights, which fill the caches and the tables of
addresses of all cores. The interpreter then waits for memory at most of its steps, and for a translation of
its address in pages of 4 KiB. Objects from the start, such as code and classes, are used most."""

import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tgis.process.memory.background_advice import MADV_COLLAPSE, advise_slowly

logger = logging.getLogger(__name__)

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_AREAS = Path("/proc/self/smaps")
_PAGES_PER_CALL = 8  # huge pages, about 4 ms
# Names of files are any bytes but newlines.
_AREA = re.compile(rb"(?P<begin>[0-9a-f]+)-(?P<end>[0-9a-f]+) rw.p \S+ \S+ 0 *(?P<name>.*)")
_USED = re.compile(rb"Rss: +(?P<kib>\d+) kB")
_MIN_USED = 0.75  # part of an area that must be in use; stacks of threads use little of theirs
# Maximum growth of the process, as a part of the memory in use. Routers and shards grow by 1 % to 4 %.
_MAX_GROWTH = 0.05


class _Area(NamedTuple):
    """Area of adjacent addresses."""

    begin: int
    end: int
    num_used: int  # bytes

    @property
    def size(self) -> int:
        return self.end - self.begin


def collapse_soon() -> None:
    """Collapse the process's pages on a background thread."""
    threading.Thread(target=_collapse_if_possible, name="huge pages", daemon=True).start()


def collapse_pages() -> None:
    """Ask the system to move the memory that the process uses into huge pages, unless its administrator has
    disabled them. Nothing happens on systems that cannot do that. This releases the GIL."""
    size = _huge_page_size()
    if not size:
        return
    for area in _choose_areas():
        begin = -(-area.begin // size) * size
        end = area.end // size * size
        for first in range(begin, end, _PAGES_PER_CALL * size):
            advise_slowly(first, min(_PAGES_PER_CALL * size, end - first), MADV_COLLAPSE)


def _collapse_if_possible() -> None:
    try:
        collapse_pages()
    except OSError as error:
        logger.info("memory stays in small pages: %s", error)


def _huge_page_size() -> int:
    """Return the bytes of a huge page, or 0 if the system has none."""
    try:
        if "[never]" in (_SETTINGS / "enabled").read_text():
            return 0
        return int((_SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError) as error:
        logger.debug("huge pages are not available: %s", error)
        return 0


def _choose_areas() -> list[_Area]:
    """Return the areas of which most is in use, best used first. The unused rest of all of them, by which
    the process may grow, is limited."""
    areas = list(_list_areas())
    left = _MAX_GROWTH * sum(area.num_used for area in areas)
    chosen = []
    for area in sorted(areas, key=lambda area: area.num_used / area.size, reverse=True):
        num_unused = area.size - area.num_used
        if area.num_used >= _MIN_USED * area.size and num_unused <= left:
            left -= num_unused
            chosen.append(area)
    return chosen


def _list_areas() -> Iterator[_Area]:
    """Yield the areas of the process's own memory, without the stack of the first thread."""
    bounds: tuple[int, int] | None = None
    for line in _AREAS.read_bytes().split(b"\n"):
        if found := _AREA.fullmatch(line):
            begin, end = int(found["begin"], 16), int(found["end"], 16)
            bounds = (begin, end) if begin < end and found["name"] != b"[stack]" else None
        elif b"-" in line.partition(b" ")[0]:
            bounds = None  # an area of a file, or one that is only read
        elif bounds is not None and (found := _USED.match(line)):
            yield _Area(*bounds, int(found["kib"]) << 10)
