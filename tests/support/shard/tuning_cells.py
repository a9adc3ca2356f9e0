"""Code shared by the tests of soft prompts and of adapters on every family: the cells in which they run, and
how the requests of a cell are served."""

import itertools
from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import pytest
from transformers import PretrainedConfig

from tests.support.shard.driver import Request
from tests.support.shard.family_cases.all import CASES, COVERED_BY, family_of
from tests.support.shard.family_oracle import Answer, check
from tests.support.shard.ranks import Ranks
from tests.support.shard.relay import Copies, serve

COMPANY = ("alone", "mixed")
CELLS = list(itertools.product((1, 2), COMPANY))  # numbers of ranks, company
# Cells of `make test` in turn. The quick ones are more frequent: one rank takes less than half as long as
# two, and one batch less than its requests alone.
TURNS = [(1, "alone"), (2, "mixed"), (2, "alone"), (2, "mixed"), (1, "mixed"), (1, "mixed")]
# Latent attention, gated DeltaNet, and Mamba with experts: `make test` runs them on two ranks.
ON_TWO_RANKS = {"deepseek_v3", "qwen3_next", "nemotron_h"}


def list_cells(peculiar: Collection[str]) -> Iterator[tuple[str, int, str, bool]]:
    """Yield the case, ranks, company, and whether `make test` runs it: of each family that is not in
    COVERED_BY its peculiar cases, or else one, with the ranks and company in turn."""
    turn = 0
    for family, group in itertools.groupby(CASES, family_of):
        cases, quick = list(group), set[tuple[str, int, str]]()
        if family not in COVERED_BY:
            chosen = [case for case in cases if case in peculiar] or [cases[turn % len(cases)]]
            quick = {(case, *TURNS[(turn + i) % len(TURNS)]) for i, case in enumerate(chosen)}
            turn += 1
        for case, cell in itertools.product(cases, CELLS):
            yield case, *cell, (case, *cell) in quick


def plan(peculiar: Collection[str]) -> list[object]:
    """Return every cell as a test's parameters. Cells that `make test` omits are marked slow."""
    return [
        pytest.param(
            case,
            size,
            company,
            id=f"{case}, {size} ranks, {company}",
            marks=[] if is_quick else [pytest.mark.slow],
        )
        for case, size, company, is_quick in list_cells(peculiar)
    ]


# Difference of float32 from float64: T5 does not scale its attention scores.
TOLERANCE = 3e-4


def check_plan(peculiar: Set[str]) -> None:
    """Check that `make test` covers every family, or the one that COVERED_BY names for it, and all cells."""
    quick = [cell for cell in list_cells(peculiar) if cell[3]]
    covered = {family_of(case) for case, *_ in quick}
    assert covered | COVERED_BY.keys() == {family_of(case) for case in CASES}
    assert covered >= {*COVERED_BY.values()}
    assert peculiar <= {case for case, *_ in quick}
    assert {family_of(case) for case, size, *_ in quick if size == 2} >= ON_TWO_RANKS
    assert {(size, company) for _, size, company, _ in quick} == set(CELLS)


@dataclass(frozen=True)
class Asked:
    """Request without a row, and its expected answer."""

    token_ids: list[int]
    content: str  # name of the soft prompt or adapter in the case; empty: none
    answer: Answer


class Case(Protocol):
    """Checkpoint with soft prompts or adapters, and its answers with each of them and without one."""

    directory: Path
    copies: Copies
    asked: list[Asked]

    def request(self, asked: Asked) -> Request: ...


C = TypeVar("C", bound=Case)
Write = Callable[[Path, PretrainedConfig], object]
"""Function that writes a random model to a directory."""


class Cases(Generic[C]):
    """Cases that are written and answered by the oracle when a test first needs them. Only the last is
    kept."""

    def __init__(self, kind: Callable[[str, Path], C], root: Path) -> None:
        self._kind, self._root, self._name = kind, root, ""

    def find(self, name: str) -> C:
        if name != self._name:
            self._case, self._name = self._kind(name, self._root), name
        return self._case


def check_case(case: Case, size: int, company: str, ranks: Ranks) -> None:
    """Check that a case's requests get the expected answers, one at a time or in one batch, and that their
    adapters make a difference."""
    requests = [case.request(asked) for asked in case.asked]
    crowds = [[request] for request in requests] if company == "alone" else [requests]
    block_size = 4 if company == "alone" else 16
    [(served, digests), *others] = ranks.run(size, serve, case.directory, 1, crowds, block_size, case.copies)
    assert all(theirs == digests for _, theirs in others)
    for request, asked in zip(itertools.chain(*served), case.asked, strict=True):
        check(request, asked.answer, TOLERANCE)
    inputs = [asked.token_ids for asked in case.asked]
    usual = max(inputs, key=inputs.count)
    alike = [asked.answer.logprobs for asked in case.asked if asked.token_ids == usual]
    assert len(alike) > 2
    for one, other in itertools.combinations(alike, 2):
        assert other != pytest.approx(one, abs=1e-3), "it changes nothing"
