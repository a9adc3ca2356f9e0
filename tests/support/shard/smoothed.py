"""Models with any factors that smooth activations, computed with or without a LoRA adapter. This module
imports little, so that other ranks import it quickly."""

from pathlib import Path

import torch
from torch import Tensor

from tests.support.shard.stepping import TABLES, make_layout, new_attention, read_config
from tgis.shard.adapters.lora_mapping import read_adapter
from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.lora import AdapterSet, TokenAdapters
from tgis.shard.models import registry
from tgis.shard.models.decoder import Decoder
from tgis.shard.models.interface import StepInputs
from tgis.shard.models.parts.states import open_state
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.quant.rounding import UNROUNDED, InputFigures, Rounding
from tgis.shard.quant.smoothing import Factors
from tgis.shard.startup.quantize.smoothing import list_readers

IDS = list(range(5, 20))
RANK = 3


def draw_factors(spec: DecoderSpec) -> Factors:
    generator = torch.Generator().manual_seed(0)
    factors = {}
    for norm, readers in list_readers(spec).items():
        exponents = torch.randint(-3, 4, (spec.hidden_size,), generator=generator)
        factors |= dict.fromkeys((norm, *readers), exponents.float().exp2())
    return factors


def draw_adapter(model: Decoder) -> TokenAdapters:
    """Return an adapter of all linear layers, for all tokens but the first."""
    generator = torch.Generator().manual_seed(1)
    heights: dict[str, int] = {}
    widths: dict[str, int] = {}
    for path, cut in model.parts.cuts.items():
        for rows in () if cut.is_table else model.parts.weights.trace(path, cut.shape):
            heights[rows.module] = heights.get(rows.module, 0) + rows.count
            widths[rows.module] = cut.shape[1]
    tensors = {}
    for module, height in heights.items():
        tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, widths[module], generator=generator)
        tensors[f"{module}.lora_B.weight"] = torch.randn(height, RANK, generator=generator)
    adapter = read_adapter(model.parts, tensors, dict.fromkeys(heights, 0.1))
    indices = torch.zeros(len(IDS), dtype=torch.int32)
    indices[0] = -1
    return TokenAdapters(AdapterSet([adapter]), indices)


def compute(group: ProcessGroup, directory: Path, has_factors: bool, has_adapter: bool) -> Tensor:
    config = read_config(directory)
    spec = registry.make_spec(config)
    assert isinstance(spec, DecoderSpec)
    rounding = Rounding(inputs=InputFigures(draw_factors(spec))) if has_factors else UNROUNDED
    model = registry.load(directory, config, group, torch.float32, rounding=rounding)
    assert isinstance(model, Decoder)
    attention = new_attention(model, group)
    layout = make_layout([(0, len(IDS))], [TABLES[0]])
    adapters = draw_adapter(model) if has_adapter else None
    plan = attention.plan(layout, "self")
    states = open_state(spec, group, len(IDS))
    inputs = StepInputs(torch.tensor(IDS), layout.positions, layout, plan, adapters=adapters, states=states)
    return model.logits(model.forward(inputs, attention), adapters)
