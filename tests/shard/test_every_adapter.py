"""LoRA adapters on every family, on one rank and two, alone and beside rows with other adapters or none,
against peft. `make test` runs every family at least once; `make test-all` runs the product."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.shard.checkpoints import write_model
from tests.shard.driver import Request
from tests.shard.family_cases.all import CASES
from tests.shard.family_oracle import NEW_TOKENS, Answer, draw_inputs
from tests.shard.ranks import Ranks
from tests.shard.relay import Copies, serve
from tests.shard.test_every_family import check, family_of
from tests.shard.tuned import Tuned, list_targets
from tgis.prompts.adapter_format import read_adapter_files

COMPANY = ("alone", "mixed")
ALL_LINEAR = {"r": 4, "target_modules": "all-linear"}
# Parameters that "all-linear" leaves out, though they are linear layers.
EXPERTS = ["experts.gate_up_proj", "experts.down_proj", "router.weight"]
# Whose layers have other names on disk than in memory, or which have no room of their own for the head.
PECULIAR = {"gemma3_multimodal", "granitemoe", "mixtral", "gpt_neox", "llama_tied", "opt_350m", "falcon_40b"}


def list_cells() -> Iterator[tuple[str, int, str, bool]]:
    """Case, ranks, company, and whether `make test` runs it."""
    cells = list(itertools.product((1, 2), COMPANY))
    for turn, (_, group) in enumerate(itertools.groupby(CASES, family_of)):
        cases = list(group)
        peculiar = [case for case in cases if case in PECULIAR] or [cases[turn % len(cases)]]
        quick = {(case, *cells[(turn + i) % len(cells)]) for i, case in enumerate(peculiar)}
        for cell in itertools.product(cases, (1, 2), COMPANY):
            yield *cell, cell in quick


def plan() -> Iterator[object]:
    for case, size, company, is_quick in list_cells():
        marks = [] if is_quick else [pytest.mark.slow]
        yield pytest.param(case, size, company, id=f"{case}, {size} ranks, {company}", marks=marks)


@dataclass(frozen=True)
class Asked:
    """A request without a row, and what it must be answered."""

    token_ids: list[int]
    digest: str  # of the adapter; empty: none
    answer: Answer


class Case:
    """A checkpoint with two adapters, and what it answers to a few inputs under each of them and under
    none."""

    def __init__(self, name: str, root: Path) -> None:
        self.directory, self.copies = root / name, Copies(str(root / f"{name}-shard"))
        write_model(self.directory, CASES[name]())
        base = Tuned(self.directory, root)
        self.is_encoder_decoder, self.start_token_id = base.is_encoder_decoder, base.start_token_id
        _, middle, long = draw_inputs()
        self.asked = [Asked(middle, "", base.answer(middle))]
        both = {"linear": ALL_LINEAR, "whole": choose_whole(base.model)}
        for seed, (kind, options) in enumerate(both.items()):
            files = root / f"{name}-{kind}"
            tuned = Tuned(self.directory, files, seed, **options)
            tensors, scales = read_adapter_files(files, 1 << 20)
            self.copies = self.copies.put("adapter", tensors, {"scales": scales})
            digest = self.copies.digests[-1]
            self.asked += [Asked(ids, digest, tuned.answer(ids)) for ids in (middle, long)]

    def request(self, asked: Asked) -> Request:
        prompt, encoder = asked.token_ids, list[int]()
        if self.is_encoder_decoder:
            prompt, encoder = [self.start_token_id], asked.token_ids
        options = {"details": {"logprobs": True}, "adapter_digest": asked.digest}
        return Request(prompt, NEW_TOKENS, encoder_token_ids=encoder, **options)


def choose_whole(model: Any) -> dict[str, Any]:
    """Every linear layer that is a module and both ends, where a family has them of its own; with ranks and
    scales that differ."""
    names = list_targets(model)
    if model.config.is_encoder_decoder:
        names = [name for name in names if name not in ("shared", "embed_tokens")]
    if model.config.model_type == "granitemoe":
        return {"r": 3, "target_modules": names, "target_parameters": EXPERTS, "lora_alpha": 5}
    patterns = {"rank_pattern": {names[0]: 6, rf".*\.1\..*{names[-1]}": 2}, "alpha_pattern": {names[-1]: 20}}
    return {"r": 3, "target_modules": names, "use_rslora": True, **patterns}


class Cases:
    """Written, and asked of the oracle, when a test first needs one; only the last is kept."""

    def __init__(self, root: Path) -> None:
        self._root, self._name = root, ""

    def find(self, name: str) -> Case:
        if name != self._name:
            self._case, self._name = Case(name, self._root), name
        return self._case


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("adapters"))


def test_every_family_is_met() -> None:
    """In `make test` already, with any number of ranks and company by turns."""
    quick = [cell for cell in list_cells() if cell[3]]
    assert {family_of(case) for case, *_ in quick} == {family_of(case) for case in CASES}
    assert {(size, company) for _, size, company, _ in quick} == set(itertools.product((1, 2), COMPANY))


@pytest.mark.parametrize(("name", "size", "company"), list(plan()))
def test_equals_peft(name: str, size: int, company: str, ranks: Ranks, cases: Cases) -> None:
    case = cases.find(name)
    requests = [case.request(asked) for asked in case.asked]
    crowds = [[request] for request in requests] if company == "alone" else [requests]
    block_size = 4 if company == "alone" else 16
    [(served, digests), *others] = ranks.run(size, serve, case.directory, 1, crowds, block_size, case.copies)
    assert all(theirs == digests for _, theirs in others)
    for request, asked in zip(itertools.chain(*served), case.asked, strict=True):
        check(request, asked.answer)
    first = case.asked[0].token_ids
    answers = [asked.answer.logprobs for asked in case.asked if asked.token_ids == first]
    for one, other in itertools.combinations(answers, 2):
        assert other != pytest.approx(one, abs=1e-3), "an adapter changes nothing"
