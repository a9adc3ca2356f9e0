"""Kernels of collectives in memory that all ranks of a machine map.

Each rank has an area: a header, and two slots for parts. In a round, a rank copies its part to a slot and
then increments the number in its header; it reads the others' parts after their numbers have reached the
round's. It writes to a slot again two rounds later. By then it has seen the numbers of the round between,
which the others write after they have read."""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import (
    Kernel,
    atomic_add,
    llvm_function,
    load_acquire,
    next_unit,
    operands,
    ordered,
    pointer,
    store_release,
)
from tgis.shard.kernels.cpu.jit.llvm import I1
from tgis.shard.kernels.cpu.jit.waiting import (
    call_with_five,
    call_with_four,
    call_with_two,
    full_fence,
    pause,
)

HEADER_BYTES = 4096  # a page, so that the areas of ranks are on their own NUMA nodes
# Words of a header.
_ROUND = 0
_PART_BYTES = 1  # of the parts in the two slots
_NUM_SLEEPING = 3  # ranks that wait for this one
# Words of a rank's own state.
STATE_ROUND, STATE_OUTCOME, STATE_RANK = 0, 1, 2
_NAP, _CLOCK, _BEGIN = 3, 5, 7
STATE_FDS = 8  # the first of `struct pollfd`, which has the size of a word
# Outcomes. After any but DONE, further collectives do nothing.
DONE, LOST, LATE, MISMATCH = range(4)

# A waiting rank polls for some 15 microseconds, as long as it takes to sleep and wake up, and then sleeps,
# because the awaited rank may need its processor.
_NUM_POLLS = 1000
_NAP_NS = 1_000_000  # after which a waiting rank looks whether others have ended
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_ALL = 1 << 30
_MONOTONIC = 1  # clock
_I64, _F32 = np.int64(0), np.float32(0)


class _RankLink(NamedTuple):
    """Arguments that are the same for all kernels of a rank."""

    memory: int  # address of rank 0's area
    slot_bytes: int
    rank: int
    num_ranks: int
    state: int  # address of the rank's own state
    timeout_ns: int
    futex: int  # number of the system call
    syscall: int  # addresses of C functions
    ppoll: int
    clock_gettime: int


NUM_LINK_ARGS = len(_RankLink._fields)


_enter = atomic_add(1, "seq_cst")
_leave = atomic_add(-1, "seq_cst")


@llvm_function()
def _copy(b: Any, target: Any, source: Any, num_bytes: Any) -> None:
    places = (llvm.pointer_to(b, llvm.I8, address) for address in (target, source))
    llvm.call(b, "llvm.memcpy.p0.p0.i64", ir.VoidType(), *places, num_bytes, I1(0))


@ordered
def _header(link: _RankLink, rank: int) -> int:
    """Return the address of a rank's header."""
    return link.memory + rank * (HEADER_BYTES + 2 * link.slot_bytes)


@ordered
def _slot(link: _RankLink, rank: int, number: int) -> int:
    """Return the address of the slot that a rank uses in a round."""
    return _header(link, rank) + HEADER_BYTES + (number & 1) * link.slot_bytes


@ordered
def _share(link: _RankLink, source: int, num_bytes: int) -> int:
    """Give this rank's part to the others and wait for theirs. Return the round's number, or 0 if a rank is
    lost."""
    state = carray(pointer(link.state, _I64), STATE_FDS)
    if state[STATE_OUTCOME] != DONE:
        return 0
    number = state[STATE_ROUND] + 1
    state[STATE_ROUND] = number
    _copy(_slot(link, link.rank, number), source, num_bytes)
    header = pointer(_header(link, link.rank), _I64)
    carray(header, _PART_BYTES + 2)[_PART_BYTES + (number & 1)] = num_bytes
    store_release(header, number)
    full_fence()
    if carray(header, _NUM_SLEEPING + 1)[_NUM_SLEEPING] > 0:
        call_with_five(link.syscall, link.futex, _header(link, link.rank), _FUTEX_WAKE, _ALL, 0)
    state[STATE_OUTCOME] = _await_others(link, number, num_bytes)
    return number if state[STATE_OUTCOME] == DONE else 0


@ordered
def _await_others(link: _RankLink, number: int, num_bytes: int) -> int:
    """Wait until all ranks have given their parts of a round. Return the outcome."""
    polls = 0
    outcome = DONE
    state = carray(pointer(link.state, _I64), STATE_FDS)
    state[_BEGIN] = 0
    for rank in range(link.num_ranks):
        header = pointer(_header(link, rank), _I64)
        state[STATE_RANK] = rank
        while load_acquire(header) < number:
            if outcome != DONE:
                return outcome
            polls += 1
            if polls < _NUM_POLLS:
                pause()
            elif _sleep(link, rank, number) < 0:
                # A rank may be lost after it has given its part, so the numbers are read once more.
                outcome = _look_for_loss(link)
        if carray(header, _PART_BYTES + 2)[_PART_BYTES + (number & 1)] != num_bytes:
            return MISMATCH
    return DONE


@ordered
def _sleep(link: _RankLink, rank: int, number: int) -> int:
    """Sleep until a rank has given its part of a round. Return a negative number if it has before, or has not
    in time."""
    state = carray(pointer(link.state, _I64), STATE_FDS)
    state[_NAP], state[_NAP + 1] = 0, _NAP_NS
    header = _header(link, rank)
    nap = link.state + 8 * _NAP
    num_sleeping = pointer(header + 8 * _NUM_SLEEPING, _I64)
    _enter(num_sleeping)
    full_fence()
    # Linux compares the lower half of the number, and sleeps only if it is still that of the round before.
    result: int = call_with_five(
        link.syscall, link.futex, header, _FUTEX_WAIT, (number - 1) & 0xFFFFFFFF, nap
    )
    _leave(num_sleeping)
    return result


@ordered
def _look_for_loss(link: _RankLink) -> int:
    """Return DONE unless a rank has ended or it is too late."""
    state = carray(pointer(link.state, _I64), STATE_FDS)
    fds, nap, clock = link.state + 8 * STATE_FDS, link.state + 8 * _NAP, link.state + 8 * _CLOCK
    call_with_two(link.clock_gettime, _MONOTONIC, clock)
    now = state[_CLOCK] * 1_000_000_000 + state[_CLOCK + 1]
    if state[_BEGIN] == 0:
        state[_BEGIN] = now
    if now - state[_BEGIN] > link.timeout_ns:
        return LATE
    state[_NAP], state[_NAP + 1] = 0, 0
    return LOST if call_with_four(link.ppoll, fds, link.num_ranks - 1, nap, 0) > 0 else DONE


@ordered
def _add(target: int, first: int, second: int, count: int) -> None:
    x, y = carray(pointer(first, _F32), count), carray(pointer(second, _F32), count)
    out = carray(pointer(target, _F32), count)
    for i in range(count):
        out[i] = x[i] + y[i]


@ordered
def _accumulate(target: int, more: int, count: int) -> None:
    x, out = carray(pointer(more, _F32), count), carray(pointer(target, _F32), count)
    for i in range(count):
        out[i] += x[i]


def _all_reduce(args: Any) -> None:
    """Replace float32 numbers by their sums over all ranks, which are added in the order of ranks."""
    if next_unit(args) != 0:
        return
    link = _RankLink(*operands(args, 1, NUM_LINK_ARGS))
    address, count = operands(args, 1 + NUM_LINK_ARGS, 2)
    num_in_slot = link.slot_bytes // 4
    for begin in range(0, count, num_in_slot):
        size = min(num_in_slot, count - begin)
        place = address + 4 * begin
        number = _share(link, place, 4 * size)
        if number == 0:
            return
        _add(place, _slot(link, 0, number), _slot(link, 1, number), size)
        for rank in range(2, link.num_ranks):
            _accumulate(place, _slot(link, rank, number), size)


def _all_gather(args: Any) -> None:
    """Concatenate the ranks' rows. A row of a rank fits into a slot."""
    if next_unit(args) != 0:
        return
    link = _RankLink(*operands(args, 1, NUM_LINK_ARGS))
    source, target, num_rows, row_bytes = operands(args, 1 + NUM_LINK_ARGS, 4)
    rows_in_slot = link.slot_bytes // row_bytes
    for begin in range(0, num_rows, rows_in_slot):
        rows = min(rows_in_slot, num_rows - begin)
        number = _share(link, source + begin * row_bytes, rows * row_bytes)
        if number == 0:
            return
        for row in range(rows):
            for rank in range(link.num_ranks):
                place = target + ((begin + row) * link.num_ranks + rank) * row_bytes
                _copy(place, _slot(link, rank, number) + row * row_bytes, row_bytes)


all_reduce = Kernel(_all_reduce)
all_gather = Kernel(_all_gather)
