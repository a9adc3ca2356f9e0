"""Check that each adapter of open rows has a slot of its own, with its matrices, as long as a row has it."""

import random

import numpy as np
import torch
from torch import Tensor

from tgis.shard.adapters.row_adapters import RowAdapters
from tgis.shard.kernels.cuda.grouped import slots as slots_module
from tgis.shard.kernels.cuda.grouped.slots import AdapterSlots, TermBounds
from tgis.shard.layers.lora import Adapter, LowRank
from tgis.shard.runner.device.adapters.slot_assignments import SlotAssignments

CPU, NUM_ROWS = torch.device("cpu"), 6
LAYERS = {"one": TermBounds(1, 4), "two": TermBounds(3, 4)}


def draw_adapter(rank: int, **counts: int) -> Adapter:
    """Return an adapter with that many updates of each layer."""

    def draw(nth: int) -> LowRank:
        return LowRank(torch.randn(8, rank), torch.randn(rank, 4), 4 * nth)

    return Adapter({path: tuple(map(draw, range(count))) for path, count in counts.items()})


def read_entries(memory: Tensor, slot: int) -> list[tuple[int, ...]]:
    return [tuple(each[:-1]) for each in memory[slot].view(-1, slots_module.ENTRY).tolist()]


def test_random_rows() -> None:
    rng, rows = random.Random(3), dict[int, Adapter]()
    adapters = [draw_adapter(1 + n, one=n % 2, two=1 + n % 3) for n in range(9)]
    table, row_adapters = AdapterSlots.allocate(LAYERS, NUM_ROWS, CPU), RowAdapters(NUM_ROWS, CPU)
    assignments = SlotAssignments(table, row_adapters)
    for _ in range(300):
        row = rng.randrange(NUM_ROWS)
        if rng.random() < 0.5:
            rows[row] = rng.choice(adapters)
            row_adapters.open(row, None, rows[row])
        else:
            rows.pop(row, None)
            row_adapters.close([row])
        if rng.random() < 0.3:
            continue
        for change in assignments.update():
            if change.released is None:
                table.memory[change.slot].view(torch.int32).copy_(torch.from_numpy(change.words))
            else:
                assert change.released not in rows.values()
        slots = assignments.find(np.arange(NUM_ROWS))
        assert slots is not None
        for number, slot in enumerate(slots.tolist()):
            assert (slot >= 0) is (number in rows)
            if number in rows:
                one, two = (list(rows[number].deltas.get(path, ())) for path in LAYERS)
                empty = (0,) * 5
                expected = [each.row for each in one] or [empty]
                expected += [*(each.row for each in two), *[empty] * (3 - len(two))]
                entries = read_entries(table.memory, slot)
                assert [each if each[2] else empty for each in entries] == expected
        assert set(table.held) - {None} == set(rows.values())
        assert table.max_rank == max((each.deltas["two"][0].b.shape[0] for each in rows.values()), default=1)


def test_adapters_that_fit_no_slot() -> None:
    table, row_adapters = AdapterSlots.allocate(LAYERS, NUM_ROWS, CPU), RowAdapters(NUM_ROWS, CPU)
    assignments = SlotAssignments(table, row_adapters)
    others = {
        "rank": draw_adapter(slots_module.MAX_RANK + 1, one=1),
        "updates": draw_adapter(2, one=2),
        "layer": draw_adapter(2, three=1),
    }
    row_adapters.open(0, None, draw_adapter(slots_module.MAX_RANK, one=1))
    for row, adapter in enumerate(others.values(), start=1):
        row_adapters.open(row, None, adapter)
    assert len(assignments.update()) == 1
    for row in range(len(others) + 1):
        assert (assignments.find(np.array([row, 5])) is None) is (row > 0)
    assert row_adapters.has_any(np.array([0]))
    assert not row_adapters.has_any(np.array([5]))
