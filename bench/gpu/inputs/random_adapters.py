"""Creates LoRA adapters with random weights for all linear layers of a model, except its head."""

import torch

from tgis.shard.adapters.lora_mapping import list_widths
from tgis.shard.layers.lora import Adapter, LowRank
from tgis.shard.layers.ops import Parts

RANK, STD = 16, 0.01


def draw_adapter(parts: Parts) -> Adapter:
    deltas = {}
    for path, cut in parts.cuts.items():
        if path in ("embed", "head"):
            continue
        terms, first = [], 0
        for width in list_widths(parts, path):
            a, b = torch.randn(cut.shape[1], RANK) * STD, torch.randn(RANK, width) * STD
            terms.append(parts.kernels.place_low_rank(LowRank(a, b, first), is_table=False))
            first += width
        deltas[path] = tuple(terms)
    return Adapter(deltas)
