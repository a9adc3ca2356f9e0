"""Soft prompts and LoRA adapters on quantized checkpoints, against peft on the dequantized weights."""

from pathlib import Path

import pytest
from transformers import PretrainedConfig

from tests.support.shard.adapter_cases import AdapterCase
from tests.support.shard.checkpoints import write_model
from tests.support.shard.packed_kinds import PACKED_KINDS
from tests.support.shard.prompt_cases import Case
from tests.support.shard.quantized_files import KINDS, write_quantized
from tests.support.shard.ranks import Ranks
from tests.support.shard.tuning_cells import check_case

QUICK = {("gptq, desc_act", "llama_grouped_queries"), ("nf4", "t5")}
ASKED = ("gptq, desc_act", "awq gemm", "pack-quantized", "fp8, a scale for each row", "nf4")
FAMILIES = ("llama_grouped_queries", "gpt2", "granitemoe", "falcon_40b", "t5")


def plan() -> list[object]:
    cells = [(kind, name) for kind in ASKED for name in FAMILIES]
    return [
        pytest.param(*cell, id=", ".join(cell), marks=[] if cell in QUICK else [pytest.mark.slow])
        for cell in cells
    ]


@pytest.mark.parametrize("of", [Case, AdapterCase])
@pytest.mark.parametrize(("kind", "name"), plan())
def test_equals_peft(
    of: type[Case] | type[AdapterCase], kind: str, name: str, ranks: Ranks, tmp_path: Path
) -> None:
    quantized = tmp_path / "quantized"

    def write(directory: Path, config: PretrainedConfig) -> None:
        write_model(directory, config)
        write_quantized(directory, quantized, (KINDS | PACKED_KINDS)[kind])

    case = of(name, tmp_path, write)
    case.directory = quantized
    check_case(case, 2, "mixed", ranks)
