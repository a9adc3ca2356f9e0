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

from tgis.process.memory import page_collapse

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
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


def test_a_process_that_cannot_read_its_areas_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never")
    (tmp_path / "hpage_pmd_size").write_text("2097152")
    monkeypatch.setattr(page_collapse, "_SETTINGS", tmp_path)
    monkeypatch.setattr(page_collapse, "_AREAS", tmp_path / "smaps")
    with caplog.at_level(logging.INFO):
        page_collapse.collapse_soon()
        for thread in threading.enumerate():
            if thread.name == "huge pages":
                thread.join()
    assert [message.partition(":")[0] for message in caplog.messages] == ["memory stays in small pages"]


def test_calls_are_short_and_have_the_priority_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process waits for the end of a call, which a busy system hardly runs at a lower priority."""
    calls: list[tuple[int, int, int]] = []

    def record(address: ctypes.c_void_p, size: ctypes.c_size_t, _advice: int) -> int:
        priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        calls.append((address.value or 0, size.value, priority))
        return 0

    huge = 2 << 20
    begin, end = 33 * huge, 70 * huge + 4096
    (tmp_path / "enabled").write_text("always [madvise] never")
    (tmp_path / "hpage_pmd_size").write_text(f"{huge}")
    kib = (end - begin) >> 10
    area = f"{begin - 8192:x}-{end:x} rw-p 00000000 00:00 0 \nSize: {kib + 8} kB\nRss: {kib} kB\n"
    (tmp_path / "smaps").write_text(area)
    monkeypatch.setattr(page_collapse, "_SETTINGS", tmp_path)
    monkeypatch.setattr(page_collapse, "_AREAS", tmp_path / "smaps")
    monkeypatch.setattr(page_collapse, "_madvise", record)
    page_collapse.collapse_soon()
    for thread in threading.enumerate():
        if thread.name == "huge pages":
            thread.join()
    sizes = [size // huge for _, size, _ in calls]
    assert sizes == [8, 8, 8, 8, 5]
    assert [address for address, _, _ in calls] == [(33 + 8 * i) * huge for i in range(5)]
    assert {priority for _, _, priority in calls} == {os.getpriority(os.PRIO_PROCESS, 0)}
