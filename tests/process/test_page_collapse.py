"""Check that memory in use moves into huge pages, and that areas of which little is used do not grow."""

import ctypes
import json
import logging
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tgis.process.memory import background_advice, page_collapse

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE = 2 << 20
KIB = 8 << 10
# Uses an area wholly and of another one page in every MiB. Prints the KiB of both that are in memory and in
# huge pages, before and after. An area that is only read separates them.
SCRIPT = """
import ctypes, json, mmap
from pathlib import Path
from tgis.process.memory.page_collapse import collapse_pages

def map_area(protection=mmap.PROT_READ | mmap.PROT_WRITE):
    return mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=protection)

areas = [map_area(mmap.PROT_READ), map_area(), map_area(mmap.PROT_READ), map_area(), map_area(mmap.PROT_READ)]
for memory, step in ((areas[1], 1 << 12), (areas[3], 1 << 20)):
    for start in range(0, 8 << 20, step):
        memory[start : start + 1] = b"x"

def look():
    sizes = []
    for memory in (areas[1], areas[3]):
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first, _, rest = line.partition(" ")
            if "-" in first:
                begin, end = (int(part, 16) for part in first.split("-"))
            elif begin <= address < end and first in ("Rss:", "AnonHugePages:"):
                sizes.append(int(rest.split()[0]))
    return sizes

before = look()
collapse_pages()
print(json.dumps([before, look()]))
"""


def can_collapse() -> bool:
    """Return True if the system uses huge pages where they are requested, and only there."""
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    return ENABLED.is_file() and "[madvise]" in ENABLED.read_text() and (major, minor) >= (6, 1)


@pytest.mark.skipif(not can_collapse(), reason="huge pages only on request need Linux 6.1 and a setting")
def test_used_memory_moves_into_huge_pages() -> None:
    output = subprocess.check_output([sys.executable, "-c", SCRIPT], text=True)
    (_, huge_before, sparse_before, _), (rss, huge, sparse, sparse_huge) = json.loads(output)
    assert huge_before == 0
    assert rss >= KIB
    assert huge >= KIB - 2 * 2048  # the area need not begin at a huge page
    assert (sparse, sparse_huge) == (sparse_before, 0)


@pytest.fixture
def areas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the list of areas, which does not exist yet, of a process on a system with huge pages."""
    (tmp_path / "enabled").write_text("always [madvise] never")
    (tmp_path / "hpage_pmd_size").write_text(f"{HUGE}")
    monkeypatch.setattr(page_collapse, "_SETTINGS", tmp_path)
    monkeypatch.setattr(page_collapse, "_AREAS", tmp_path / "smaps")
    return tmp_path / "smaps"


def write_areas(path: Path, areas: list[tuple[int, int, int]]) -> None:
    """Write the beginnings, ends and used bytes of areas."""
    path.write_text("".join(describe(*area) for area in areas))


def describe(begin: int, end: int, used: int, file: str = "00:00 0 ") -> str:
    size = (end - begin) >> 10
    return f"{begin:x}-{end:x} rw-p 00000000 {file}\nSize: {size} kB\nRss: {used >> 10} kB\n"


@pytest.mark.usefixtures("areas")
def test_a_process_that_cannot_read_its_areas_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        page_collapse.collapse_soon()
        for thread in threading.enumerate():
            if thread.name == "huge pages":
                thread.join()
    assert [message.partition(":")[0] for message in caplog.messages] == ["memory stays in small pages"]


def test_calls_are_short_and_have_the_priority_of_the_process(
    areas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process waits for the end of a call, which a busy system hardly runs at a lower priority."""
    calls: list[tuple[int, int, int]] = []

    def record(address: ctypes.c_void_p, size: ctypes.c_size_t, _advice: int) -> int:
        priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        calls.append((address.value or 0, size.value, priority))
        return 0

    begin, end = 33 * HUGE, 70 * HUGE + 4096
    write_areas(areas, [(begin - 8192, end, end - begin)])
    monkeypatch.setattr(background_advice, "_madvise", record)
    page_collapse.collapse_soon()
    for thread in threading.enumerate():
        if thread.name == "huge pages":
            thread.join()
    sizes = [size // HUGE for _, size, _ in calls]
    assert sizes == [8, 8, 8, 8, 5]
    assert [address for address, _, _ in calls] == [(33 + 8 * i) * HUGE for i in range(5)]
    assert {priority for _, _, priority in calls} == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_the_growth_over_all_areas_is_limited(areas: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Areas that are used least are left out, even if each of them uses enough of its memory."""
    length, used = 100 * HUGE, [75, 99, 75, 98, 97, 50, 80]  # percent
    begins = [HUGE + 2 * i * length for i in range(len(used))]
    bounds = zip(begins, used, strict=True)
    write_areas(areas, [(begin, begin + length, length // 100 * part) for begin, part in bounds])
    collapsed: set[int] = set()

    def record(address: ctypes.c_void_p, _size: ctypes.c_size_t, _advice: int) -> int:
        collapsed.add((address.value or 0) // (2 * length))
        return 0

    monkeypatch.setattr(background_advice, "_madvise", record)
    page_collapse.collapse_pages()
    assert collapsed == {1, 3, 4, 6}
    assert sum(100 - used[i] for i in collapsed) <= 0.05 * sum(used)


@pytest.mark.parametrize("separator", ["\r", "\f", "\x1c", "\x85", "\u2028", "\udcff"])
def test_names_of_files_are_any_bytes(areas: Path, separator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system escapes only newlines in them, so they may look like areas, or be no UTF-8."""
    imitated = f"08:01 17 /{separator}{HUGE:x}-{2 * HUGE:x} rw-p 00000000 00:00 0 "
    text = describe(4 * HUGE, 5 * HUGE, HUGE) + describe(6 * HUGE, 7 * HUGE, HUGE, imitated)
    areas.write_bytes(text.encode(errors="surrogateescape"))
    collapsed: list[int | None] = []
    monkeypatch.setattr(background_advice, "_madvise", lambda address, *_: collapsed.append(address.value))
    page_collapse.collapse_pages()
    assert collapsed == [4 * HUGE]


@pytest.mark.parametrize("listed", [[], [(HUGE, HUGE, 0)], [(HUGE, 2 * HUGE, 0)], [(2 * HUGE, HUGE, 4096)]])
def test_nothing_is_collapsed_without_used_areas(
    areas: Path, listed: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    collapsed: list[object] = []
    monkeypatch.setattr(background_advice, "_madvise", lambda *call: collapsed.append(call))
    write_areas(areas, listed)
    page_collapse.collapse_pages()
    assert collapsed == []
