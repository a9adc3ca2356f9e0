"""Memory that all ranks of a group map, if they run on one machine and see each other's processes."""

import ctypes
import json
import logging
import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

logger = logging.getLogger(__name__)

OFFER, ANSWER = "shared_memory/{}/offer", "shared_memory/{}/answer"  # keys of a rank in the store
_TOKEN_AT = 1024  # in rank 0's header, after the words that kernels use
_MAPPED = b"mapped"


class SharedRegion:
    """Mapped memory, and pipes that show which ranks have ended.

    Neither has a name in a file system, so nothing is left over when the processes end."""

    def __init__(self, memory: mmap.mmap, pipes: Sequence[int], held: ExitStack) -> None:
        self.pipes = pipes
        """File descriptors that hang up when their ranks end, of all ranks but this one."""
        self._memory = memory
        self._held = held

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def close(self) -> None:
        """Show the other ranks that this one has ended. The memory stays mapped."""
        self._held.close()


def open_region(
    store: Any, rank: int, size: int, area_bytes: int, can_use: bool = True
) -> SharedRegion | None:
    """Return memory with an area for each rank, or None on all ranks if one of them cannot use or map it, for
    example because it runs on another machine. Raises RuntimeError if a rank does not answer."""
    with ExitStack() as held, ExitStack() as offered:
        store.set(OFFER.format(rank), _offer(rank, size * area_bytes, held, offered) if can_use else "")
        offers = [store.get(OFFER.format(other)) for other in range(size)]
        memory, pipes = _open(offers, rank, area_bytes, held)
        store.set(ANSWER.format(rank), b"" if memory is None else _MAPPED)
        # Every rank keeps open what it offers until all have answered.
        answers = [store.get(ANSWER.format(other)) for other in range(size)]
        if memory is None or any(answer != _MAPPED for answer in answers):
            return None
        return SharedRegion(memory, pipes, held.pop_all())


def _offer(rank: int, num_bytes: int, held: ExitStack, offered: ExitStack) -> str:
    """Open this rank's pipe and, on rank 0, the memory. Return what other ranks need to open them, or nothing
    if that fails."""
    try:
        reader, writer = os.pipe()
        held.callback(os.close, writer)
        offered.callback(os.close, reader)
        if rank:
            return json.dumps([os.getpid(), reader])
        memory = os.memfd_create("tgis-collectives")
        offered.callback(os.close, memory)
        os.truncate(memory, num_bytes)
        token = secrets.token_bytes(16)
        os.pwrite(memory, token, _TOKEN_AT)
        return json.dumps([os.getpid(), reader, memory, token.hex()])
    except (OSError, AttributeError) as error:  # systems other than Linux have no memfd_create
        logger.info("rank %d offers no shared memory: %s", rank, error)
        return ""


def _open(
    offers: Sequence[bytes], rank: int, area_bytes: int, held: ExitStack
) -> tuple[mmap.mmap | None, Sequence[int]]:
    """Return the memory, or None if it cannot be mapped, and the other ranks' pipes."""
    if not all(offers):
        return None, ()
    parsed = [json.loads(offer) for offer in offers]
    first_pid, _, memory_fd, token = parsed[0]
    pipes = []
    try:
        memory = _map(_path(first_pid, memory_fd), token, rank * area_bytes, area_bytes)
        for other, (pid, reader, *_) in enumerate(parsed):
            if other != rank:
                pipes.append(os.open(_path(pid, reader), os.O_RDONLY | os.O_NONBLOCK))
                held.callback(os.close, pipes[-1])
    except (OSError, ValueError) as error:
        logger.info("rank %d maps no shared memory: %s", rank, error)
        return None, ()
    return memory, pipes


def _map(path: str, token: str, begin: int, area_bytes: int) -> mmap.mmap:
    """Map rank 0's memory, and allocate this rank's area, which places it on this rank's NUMA node. Raises
    OSError or ValueError."""
    fd = os.open(path, os.O_RDWR)
    try:
        if os.pread(fd, len(token) // 2, _TOKEN_AT).hex() != token:
            raise ValueError("rank 0 is on another machine")
        os.posix_fallocate(fd, begin, area_bytes)
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def _path(pid: int, fd: int) -> str:
    return f"/proc/{pid}/fd/{fd}"
