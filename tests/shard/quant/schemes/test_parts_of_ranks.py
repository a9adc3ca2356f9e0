"""Weights rounded while loading: the parts of two ranks are those of one rank, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.shard import stepping
from tests.support.shard.checkpoints import SMALL, write_model
from tests.support.shard.stepping import ALONE
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu.ops import CpuKernels
from tgis.shard.layers.ops import Product
from tgis.shard.models import registry
from tgis.shard.quant.interface import MatrixRole
from tgis.shard.quant.registry import find_scheme
from tgis.shard.quant.rounding import Rounding

# Two ranks split 192 columns after 96, inside a group of 64 or 128, and 256 columns between groups.
SIZES = {"hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 99}


class RecordingKernels(CpuKernels):
    """CPU kernels that also record the packed weights, dequantized, by label."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, Tensor] = {}
        self.num_codes = 0

    def pack(self, weight: Stored, dtype: torch.dtype, role: MatrixRole = "linear") -> Product:
        self._record(weight)
        return super().pack(weight, dtype, role)

    def find_code_packer(
        self, layout: CodeLayout, role: MatrixRole = "linear", dtype: torch.dtype = torch.bfloat16
    ) -> Callable[[Stored], Product] | None:
        pack = super().find_code_packer(layout, role, dtype)

        def record_and_pack(weight: Stored) -> Product:
            assert pack is not None
            self._record(weight)
            self.num_codes += 1
            return pack(weight)

        return record_and_pack if pack else None

    def _record(self, weight: Stored) -> None:
        parts = [self.weights[weight.label]] if weight.label in self.weights else []
        self.weights[weight.label] = torch.cat([*parts, weight.read().float()])


def load(directory: Path, group: ProcessGroup, name: str) -> tuple[RecordingKernels, registry.Decoder]:
    kernels = RecordingKernels()
    config = stepping.read_config(directory)
    model = registry.load(directory, config, group, torch.float32, kernels, Rounding(find_scheme(name)))
    assert isinstance(model, registry.Decoder)
    return kernels, model


@pytest.mark.parametrize("name", ["int4", "bitsandbytes", "bitsandbytes-nf4"])
def test_ranks_hold_parts_of_the_same_weights(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, transformers.LlamaConfig(**{**SMALL, **SIZES, "num_hidden_layers": 4}))
    whole, _ = load(tmp_path, ALONE, name)
    assert whole.num_codes > 0
    for rank in range(2):
        part, model = load(tmp_path, ProcessGroup(rank, 2), name)
        assert part.num_codes > 0
        assert part.weights.keys() == whole.weights.keys()
        cuts = {path: cut for path, cut in model.parts.cuts.items() if path.startswith("blocks.")}
        weights = {label: weight for label, weight in part.weights.items() if ".layers." in label}
        for (path, cut), (label, weight) in zip(cuts.items(), weights.items(), strict=True):
            expected = torch.cat([whole.weights[label][rows] for rows in cut.rows])
            expected = expected if cut.columns is None else expected[:, cut.columns]
            assert torch.equal(weight, expected), path
