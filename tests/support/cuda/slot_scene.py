"""One layer with LoRA adapters in slots, as the kernels of GPUs read them, and their effect in float64."""

import torch
from torch import Tensor

from tests.support.shard.lora_scene import draw_scene
from tgis.shard.collectives import CPU
from tgis.shard.kernels.cuda.grouped.slots import MAX_RANK, AdapterSlots, SlotTokens, TermBounds
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.layers.lora import Adapter, LowRank

PATH = "layer"
ROUNDINGS = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
OTHER = TermBounds(2, 16)


class SlotScene:
    """Layer whose adapters change up to three ranges of columns, with ranks up to MAX_RANK. Slots beyond
    `num_adapters` are empty."""

    def __init__(
        self, in_features: int, out_features: int, num_slots: int, num_adapters: int, is_table: bool = False
    ):
        layers = {"before": OTHER, PATH: TermBounds(1 if is_table else 4, 1), "after": OTHER}
        self.slots = AdapterSlots.allocate(layers, num_slots, CPU)
        self._is_table = is_table
        place = CudaKernels(CPU, Implementations.plain()).place_low_rank
        for slot in range(num_adapters):
            [parts] = draw_scene(1, in_features, out_features, 1).deltas.parts[:1]
            parts = tuple(_limit(one) for one in parts)
            if is_table:
                rank = 3 + 2 * slot
                parts = (LowRank(torch.randn(in_features, rank), torch.randn(rank, out_features), 0),)
            self.put(slot, Adapter({PATH: tuple(place(one, is_table) for one in parts)}))

    def put(self, slot: int, adapter: Adapter) -> None:
        self.slots.held[slot] = adapter
        assert self.slots.accepts(adapter)
        self.slots.memory[slot].view(torch.int32).copy_(torch.from_numpy(self.slots.describe(adapter)))

    def swap(self, one: int, other: int) -> None:
        adapters = [self.slots.held[slot] for slot in (one, other)]
        for slot, adapter in zip((other, one), adapters, strict=True):
            assert adapter is not None
            self.put(slot, adapter)

    def add(self, kernels: Implementations, y: Tensor, x: Tensor, slots: Tensor) -> None:
        tokens = SlotTokens(self.slots, slots, max(self.slots.max_rank, 1), kernels.group_rows)
        deltas = self.slots.at(PATH)
        assert deltas is not None
        kernels.add_low_rank(y, x, deltas, tokens.row_tiles, slots, tokens.max_rank)

    def expected(self, y: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        result = y.double()
        for t, slot in enumerate(slots.tolist()):
            adapter = self.slots.held[slot] if slot >= 0 else None
            for one in () if adapter is None else adapter.deltas[PATH]:
                factors = one.a[x[t]].double() if self._is_table else x[t].double() @ one.a.double()
                result[t, one.first : one.first + one.b.shape[1]] += factors @ one.b.double()
        return result

    def check(self, actual: Tensor, y: Tensor, x: Tensor, slots: Tensor) -> None:
        expected, bound = self.expected(y, x, slots), ROUNDINGS[y.dtype]
        torch.testing.assert_close(
            actual.double(), expected, rtol=bound, atol=bound * float(expected.abs().max())
        )


def _limit(one: LowRank) -> LowRank:
    rank = min(one.b.shape[0], MAX_RANK)
    return LowRank(one.a[:, :rank].contiguous(), one.b[:rank].contiguous(), one.first)
