"""Check which tokens of a step get which embeddings and adapters, against a plain model of the rows.

Another test bounds the cost when no row has an adapter."""

import random
import time
import weakref
from dataclasses import dataclass

import numpy as np
import torch

from tgis.shard.adapters.registry import LoadedPrompt
from tgis.shard.adapters.row_adapters import RowAdapters
from tgis.shard.layers.lora import Adapter, AdapterSet
from tgis.shard.models.interface import VirtualTokens

CPU, NUM_ROWS, WIDTH = torch.device("cpu"), 12, 3


@dataclass
class Row:
    prompt: LoadedPrompt | None
    adapter: Adapter | None


def draw_prompt(rng: random.Random) -> LoadedPrompt:
    lengths = rng.choice([(5, 0), (3, 4), (0, 6)])
    return LoadedPrompt(*(torch.rand(length, WIDTH, dtype=torch.bfloat16) for length in lengths))


def pack(work: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, starts, begins and sequences of the (row, start, end) triples."""
    counts = [end - start for _, start, end in work]
    rows, starts = (np.array([one[i] for one in work]) for i in (0, 1))
    return rows, starts, np.cumsum([0, *counts]), np.repeat(np.arange(len(work)), counts)


def unpack(virtual: VirtualTokens | None, num_tokens: int) -> list[list[float] | None]:
    """Return the embedding of every token, or None where it has none."""
    results: list[list[float] | None] = [None] * num_tokens
    if virtual is not None:
        assert virtual.embeddings.dtype == torch.float32
        assert len(virtual.places) == len(virtual.embeddings) > 0
        for place, embedding in zip(virtual.places.tolist(), virtual.embeddings.tolist(), strict=True):
            assert results[place] is None
            results[place] = embedding
    return results


def expect(rows: dict[int, Row], work: list[tuple[int, int, int]], part: str) -> list[list[float] | None]:
    results: list[list[float] | None] = []
    for number, start, end in work:
        row = rows.get(number)
        embeddings = getattr(row.prompt, part).tolist() if row and row.prompt else []
        results += [embeddings[p] if p < len(embeddings) else None for p in range(start, end)]
    return results


def test_random_rows() -> None:
    rng = random.Random(3)
    torch.manual_seed(0)
    prompts, adapters = [draw_prompt(rng) for _ in range(4)], [Adapter({}) for _ in range(4)]
    row_adapters, rows = RowAdapters(NUM_ROWS, CPU), dict[int, Row]()
    num_virtual = num_adapted = 0
    for _ in range(500):
        number = rng.randrange(NUM_ROWS)
        if rng.random() < 0.3:
            some = rng.sample(range(NUM_ROWS), 3)
            row_adapters.close(some)
            for closed in some:
                rows.pop(closed, None)
        elif rng.random() < 0.02:
            row_adapters.reset()
            rows.clear()
        else:
            row = Row(rng.choice([None, *prompts]), rng.choice([None, *adapters]))
            row_adapters.open(number, row.prompt, row.adapter)
            rows[number] = row
        chosen = [n for n in range(NUM_ROWS) if rng.random() < 0.4] or [number]
        starts = [rng.choice([0, 0, 2, 4, 9]) for _ in chosen]
        work = [(n, start, start + rng.randint(1, 7)) for n, start in zip(chosen, starts, strict=True)]
        packed, starts_of, begins, sequence = pack(work)
        for part in ("decoder", "encoder"):
            placed = unpack(row_adapters.virtual_tokens(part, packed, starts_of, begins), len(sequence))
            assert placed == expect(rows, work, part)
            num_virtual += sum(one is not None for one in placed)
        actual = row_adapters.token_adapters(packed, sequence)
        expected = [
            rows[n].adapter if n in rows else None for n, start, end in work for _ in range(start, end)
        ]
        if actual is None:
            assert not any(expected)
        else:
            indices = actual.indices.tolist()
            assert [actual.adapters.adapters[i] if i >= 0 else None for i in indices] == expected
            assert set(actual.adapters.adapters) == {row.adapter for row in rows.values()} - {None}
            num_adapted += 1
    assert num_virtual > 1000
    assert num_adapted > 300


def adapters_of(row_adapters: RowAdapters, *rows: int) -> AdapterSet | None:
    result = row_adapters.token_adapters(np.array(rows), np.arange(len(rows)))
    return None if result is None else result.adapters


def test_a_set_lasts_while_its_adapters_do() -> None:
    """Check that the set is reused, because lookups are cached in it."""
    one, two = Adapter({}), Adapter({})
    row_adapters = RowAdapters(NUM_ROWS, CPU)
    row_adapters.open(0, None, one)
    row_adapters.open(1, None, two)
    both = adapters_of(row_adapters, 0, 1, 2)
    assert both is not None
    row_adapters.open(2, None, one)
    row_adapters.close([0])
    row_adapters.open(3, None, None)
    assert adapters_of(row_adapters, 1, 2, 3) is both
    row_adapters.close([1])
    assert adapters_of(row_adapters, 2) is not both


def test_nothing_outlives_its_rows() -> None:
    row_adapters = RowAdapters(NUM_ROWS, CPU)
    prompt, adapter = draw_prompt(random.Random(0)), Adapter({})
    watched = [weakref.ref(prompt), weakref.ref(adapter)]
    row_adapters.open(5, prompt, adapter)
    assert adapters_of(row_adapters, 5) is not None
    del prompt, adapter
    assert all(one() is not None for one in watched)
    row_adapters.close([5])
    assert all(one() is None for one in watched), "at once: shards rarely collect garbage"


def test_it_costs_little_without_adapters() -> None:
    """Check that the cost is small without adapters, and also when all rows are past their prompts."""
    row_adapters = RowAdapters(256, CPU)
    rows, starts, begins, sequence = pack([(row, 900, 901) for row in range(256)])

    def measure() -> float:
        times = []
        for _ in range(50):
            began = time.perf_counter()
            row_adapters.close([])
            row_adapters.virtual_tokens("decoder", rows, starts, begins)
            row_adapters.token_adapters(rows, sequence)
            times.append(time.perf_counter() - began)
        return min(times)

    assert measure() < 5e-6
    prompt = draw_prompt(random.Random(0))
    for row in range(256):
        row_adapters.open(row, prompt, None)
    assert measure() < 100e-6
