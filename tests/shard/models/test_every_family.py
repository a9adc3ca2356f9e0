"""Every variant of each family's checkpoints, on one, two and four ranks, alone and in a batch, against
transformers. `make test` runs every case once, such that each family runs alone and in a batch, and with each
number of ranks if it is not in COVERED_BY; `make test-all` runs all combinations."""

import itertools
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest

from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request
from tests.support.shard.family_cases.all import CASES, COVERED_BY, family_of
from tests.support.shard.family_oracle import NEW_TOKENS, Answer, Oracle, check, draw_inputs
from tests.support.shard.messages import GREEDY, SAMPLE
from tests.support.shard.ranks import Ranks
from tests.support.shard.relay import serve
from tgis.shard.models.registry import FAMILIES

FOUR_RANKS = ("granite", "falcon", "t5")  # families that also run on four ranks
COMPANY = ("alone", "crowded")
DETAILS = {"logprobs": True, "ranks": True}


def list_cells() -> Iterator[tuple[str, int, str, bool]]:
    """Return cells: case, ranks, batch, and whether `make test` runs it. Families with one case have several
    such cells."""
    for family, group in itertools.groupby(CASES, family_of):
        cases, sizes = list(group), (1, 2, 4) if family in FOUR_RANKS else (1, 2)
        cells = list(itertools.product((1,) if family in COVERED_BY else sizes, COMPANY))
        diagonal = sorted(cells, key=lambda cell: (sizes.index(cell[0]) + COMPANY.index(cell[1])) % 2)
        turns = range(max(len(cases), len(COMPANY), 0 if family in COVERED_BY else len(sizes)))
        quick = {(cases[turn % len(cases)], *diagonal[turn % len(diagonal)]) for turn in turns}
        for cell in itertools.product(cases, sizes, COMPANY):
            yield *cell, cell in quick


def plan() -> Iterator[object]:
    """Return all cells. Those that `make test` skips are marked slow."""
    for case, size, company, is_quick in list_cells():
        marks = [] if is_quick else [pytest.mark.slow]
        yield pytest.param(case, size, company, id=f"{case}, {size} ranks, {company}", marks=marks)


class Checkpoints:
    """Checkpoints and oracle answers, made when a test first needs them. Only the last one is kept."""

    def __init__(self, root: Path) -> None:
        self._root, self._case = root, ""

    def find(self, case: str) -> tuple[Path, Oracle, list[Answer]]:
        if case != self._case:
            directory, config = self._root / case.replace(" ", "-"), CASES[case]()
            write_model(directory, config)
            oracle = Oracle(directory, config)
            self._found = directory, oracle, [oracle.answer(ids) for ids in draw_inputs()]
            self._case = case
        return self._found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("families"))


def ask(oracle: Oracle, input_ids: list[int], sampling: dict[str, object] = GREEDY) -> Request:
    if oracle.is_encoder_decoder:
        prompt, encoder = [oracle.start_token_id], input_ids
    else:
        prompt, encoder = input_ids, []
    return Request(prompt, NEW_TOKENS, sampling=sampling, details=DETAILS, encoder_token_ids=encoder)


def test_every_model_type_has_a_case() -> None:
    """Except for older names of other types, which have their own tests."""
    cases = {CASES[case]().model_type for case in CASES}
    assert FAMILIES.keys() - cases == {"RefinedWeb", "RefinedWebModel", "mimo"}
    assert cases <= FAMILIES.keys()


def test_every_family_runs_with_every_number_of_ranks_and_batch() -> None:
    """Also in `make test`, where every case runs, but families in COVERED_BY only on one rank."""
    quick = [cell for cell in list_cells() if cell[3]]
    assert {case for case, *_ in quick} == CASES.keys()
    for family in {family_of(case) for case in CASES}:
        sizes = {1} if family in COVERED_BY else {1, 2, 4} if family in FOUR_RANKS else {1, 2}
        met = [cell for cell in quick if family_of(cell[0]) == family]
        assert {size for _, size, *_ in met} == sizes
        assert {company for *_, company, _ in met} == set(COMPANY)


@pytest.mark.parametrize(("case", "size", "company"), list(plan()))
def test_equals_transformers(
    case: str, size: int, company: str, ranks: Ranks, checkpoints: Checkpoints
) -> None:
    directory, oracle, answers = checkpoints.find(case)
    greedy = [ask(oracle, answer.input_ids) for answer in answers]
    sampled = ask(oracle, answers[1].input_ids, {**SAMPLE, "seed": 7})
    if company == "alone":
        crowds = [[request] for request in greedy] + [[sampled]]
    else:
        crowds = [[greedy[0], sampled, *greedy[1:], *deepcopy(greedy)]]
    block_size = 4 if company == "alone" else 16
    [(served, digests), *others] = ranks.run(size, serve, directory, 1, crowds, block_size)
    assert all(theirs == digests for _, theirs in others)
    by_prompt = {tuple(answer.input_ids): answer for answer in answers}
    for request in itertools.chain(*served):
        if request.sampling["greedy"]:
            check(request, by_prompt[tuple(request.encoder_token_ids or request.prompt)])
    if size > 1:
        alone = ask(oracle, answers[1].input_ids, {**SAMPLE, "seed": 7})
        [([[alone]], _)] = ranks.run(1, serve, directory, 1, [[alone]], block_size)
        [again] = [r for r in itertools.chain(*served) if not r.sampling["greedy"]]
        assert again.generated == alone.generated
        assert again.logprobs == pytest.approx(alone.logprobs, rel=1e-4, abs=1e-4)
