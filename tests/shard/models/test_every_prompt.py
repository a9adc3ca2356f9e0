"""Soft prompts on every family, on one rank and two, alone and with rows that have other prompts or none,
against peft. `make test` runs every family that is not in COVERED_BY at least once; `make test-all` runs
all combinations."""

import pytest

from tests.support.shard.prompt_cases import Case
from tests.support.shard.ranks import Ranks
from tests.support.shard.tuning_cells import Cases, check_case, check_plan, plan

# Families that process token embeddings differently from the first case.
PECULIAR = {"opt_350m", "granite_shared_kv_head", "bart_scaled"}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases[Case]:
    return Cases(Case, tmp_path_factory.mktemp("prompts"))


def test_every_family_has_a_case() -> None:
    check_plan(PECULIAR)


@pytest.mark.parametrize(("name", "size", "company"), plan(PECULIAR))
def test_equals_peft(name: str, size: int, company: str, ranks: Ranks, cases: Cases[Case]) -> None:
    check_case(cases.find(name), size, company, ranks)
