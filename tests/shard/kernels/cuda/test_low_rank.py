"""Updates of LoRA adapters by the kernel in the interpreter and by its twin, against float64 and the CPU's
kernel."""

from collections.abc import Callable

import pytest
import torch

from tests.support.cuda.interpreter import interpreted
from tests.support.cuda.program_order import reversed_programs
from tests.support.cuda.slot_scene import SlotScene
from tgis.shard.kernels.cuda.implementations import Implementations

COMPUTE: dict[str, Callable[[], Implementations]] = {"kernel": interpreted, "twin": Implementations.plain}
each_way = pytest.mark.parametrize("kernels", COMPUTE.values(), ids=COMPUTE)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


SIZES = [(*size, dtype) for size in ((5, 48, 40), (70, 600, 300)) for dtype in FLOATS]
LARGE = (pytest.param(*size, marks=[pytest.mark.slow] if size[0] > 5 else []) for size in SIZES[:-1])


@each_way
@pytest.mark.parametrize(("num_tokens", "in_features", "out_features", "dtype"), [*LARGE, SIZES[-1]])
def test_all_tokens_get_their_updates(
    num_tokens: int,
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    kernels: Callable[[], Implementations],
) -> None:
    """Adapters of any ranks and parts, in one, several or no tokens."""
    scene = SlotScene(in_features, out_features, num_slots=6, num_adapters=4)
    x, y = torch.randn(num_tokens, in_features).to(dtype), torch.randn(num_tokens, out_features).to(dtype)
    slots = torch.randint(-1, 6, (num_tokens,), dtype=torch.int32)
    actual = y.clone()
    scene.add(kernels(), actual, x, slots)
    scene.check(actual, y, x, slots)
    assert actual[slots < 0].equal(y[slots < 0])


@each_way
def test_embeddings(kernels: Callable[[], Implementations]) -> None:
    scene = SlotScene(90, 200, num_slots=4, num_adapters=3, is_table=True)
    ids, y = torch.randint(0, 90, (40,)), torch.randn(40, 200)
    slots = torch.randint(-1, 4, (40,), dtype=torch.int32)
    actual = y.clone()
    scene.add(kernels(), actual, ids, slots)
    scene.check(actual, y, ids, slots)


def test_bits_do_not_depend_on_other_tokens() -> None:
    scene, count = SlotScene(1100, 90, num_slots=3, num_adapters=3), 40
    x, y = torch.randn(count, 1100).bfloat16(), torch.randn(count, 90).bfloat16()
    slots = torch.randint(-1, 3, (count,), dtype=torch.int32)
    together = y.clone()
    with reversed_programs():
        scene.add(interpreted(), together, x, slots)
    for part in (torch.randperm(count)[:7], torch.arange(3), torch.tensor([count - 1])):
        alone = y[part].clone()
        scene.add(interpreted(), alone, x[part], slots[part])
        assert alone.equal(together[part])


def test_slots_change_without_another_launch() -> None:
    """The kernel reads the adapters of the table, as a replayed step does."""
    scene = SlotScene(64, 64, num_slots=2, num_adapters=2)
    x, slots = torch.randn(3, 64), torch.tensor([0, 1, 1], dtype=torch.int32)
    before, after, unchanged = (torch.zeros(3, 64) for _ in range(3))
    scene.add(interpreted(), before, x, slots)
    scene.swap(0, 1)
    scene.add(interpreted(), after, x, 1 - slots)
    scene.add(interpreted(), unchanged, x, slots)
    assert after.equal(before)
    assert not unchanged.equal(before)
