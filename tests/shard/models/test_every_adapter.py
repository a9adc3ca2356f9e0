"""LoRA adapters on every family, on one rank and two, alone and with rows that have other adapters or none,
against peft. `make test` runs every family that is not in COVERED_BY at least once; `make test-all` runs
all combinations."""

import pytest

from tests.support.shard.adapter_cases import AdapterCase
from tests.support.shard.ranks import Ranks
from tests.support.shard.tuning_cells import Cases, check_case, check_plan, plan

# Families whose layers have other names on disk than in memory, whose head is tied, or which have all their
# kinds of layers in one case only.
PECULIAR = {
    "granitemoehybrid_experts_rope_biases",
    "gemma3_multimodal",
    "gemma4_text_experts",
    "mistral3",
    "llama4_multimodal",
    "granitemoe",
    "nemotron_h_latent_experts_biases",
    "mixtral",
    "gpt_neox",
    "llama_tied",
    "opt_350m",
    "falcon_40b",
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases[AdapterCase]:
    return Cases(AdapterCase, tmp_path_factory.mktemp("adapters"))


def test_every_family_has_a_case() -> None:
    check_plan(PECULIAR)


@pytest.mark.parametrize(("name", "size", "company"), plan(PECULIAR))
def test_equals_peft(name: str, size: int, company: str, ranks: Ranks, cases: Cases[AdapterCase]) -> None:
    check_case(cases.find(name), size, company, ranks)
