"""A cache of 8-bit floats on GPUs: its bytes are those of CPUs, every code is read exactly, with and without
the GPU's instruction, and attention applies the scales."""

import itertools
from dataclasses import replace

import pytest
import torch
import triton.language as tl
from torch import Tensor

from tests.support.cuda.attention import KERNELS, CudaScene
from tests.support.cuda.interpreter import interpret, interpreted, interpreted_modules
from tests.support.shard.attention_scene import FLOAT8_SHAPES, PLAIN, SCORINGS, Shape
from tests.support.shard.float8_numbers import E4M3, E5M2, hard_numbers
from tests.support.shard.stepping import make_layout
from tgis.shard.attention.interface import Heads
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.kernels.cuda.attention import CudaAttention
from tgis.shard.kernels.cuda.functions import float8
from tgis.shard.kernels.cuda.functions.float8 import Float8Form, read_float8
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.memory.kv_cache import UNSCALED, CacheScale, KVCache

DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2])
HOW = pytest.mark.parametrize("how", KERNELS)
SCALE = CacheScale(5.3, 2.0**-3)
WIDTH, BLOCK_SIZE = 4096, 4


def stored(cache: KVCache, has_rows_of_keys: bool) -> tuple[Tensor, Tensor]:
    """Return the bytes of keys and values, [num_tokens, WIDTH] each. GPUs store a row of channels for each
    key, CPUs a row of keys for each channel."""
    keys, values = (pages[0].view(torch.uint8) for pages in (cache.keys, cache.values))
    if not has_rows_of_keys:
        keys = keys.view(-1, WIDTH, BLOCK_SIZE).transpose(1, 2)
    return keys.reshape(-1, WIDTH), values.reshape(-1, WIDTH)


def write(x: Tensor, dtype: torch.dtype, scale: CacheScale, kernels: Implementations | None) -> KVCache:
    """Write x, [num_tokens, WIDTH], as keys and as values, with the kernels of GPUs, or those of CPUs."""
    num_blocks = -(-len(x) // BLOCK_SIZE)
    cache = KVCache(1, num_blocks + 1, BLOCK_SIZE, 1, WIDTH, dtype, scales=[scale])
    if kernels is None:
        attention = CpuAttention(cache)
        plan = attention.plan(make_layout([(0, len(x))], [list(range(num_blocks))]), "self")
        attention.keep(0, x[:, None], x[:, None], plan)
    else:
        pages = CudaAttention(cache, kernels, 1).pages(0)
        kernels.turn_and_keep(x.repeat(1, 3), Heads(1, 1), None, *pages, torch.arange(len(x)), scale)
    return cache


def list_writes() -> list[object]:
    quick = ("kernel", E4M3, SCALE), ("kernel", E5M2, UNSCALED), ("twin", E4M3, SCALE)
    cases = itertools.product(KERNELS, (E4M3, E5M2), (UNSCALED, SCALE))
    return [pytest.param(*case, marks=[] if case in quick else [pytest.mark.slow]) for case in cases]


@pytest.mark.parametrize(("how", "dtype", "scale"), list_writes())
def test_bytes_are_those_of_cpus(how: str, dtype: torch.dtype, scale: CacheScale) -> None:
    """Without NaN, with which CPUs also mark the first channel of the key."""
    x = hard_numbers(dtype).nan_to_num(3.0, 3e38, -3e38)
    x = torch.cat([x, torch.tensor([torch.inf, -torch.inf]), torch.zeros(-(len(x) + 2) % WIDTH)])
    x = x.view(-1, WIDTH)
    mine = stored(write(x, dtype, scale, KERNELS[how]()), has_rows_of_keys=True)
    for actual, expected in zip(mine, stored(write(x, dtype, scale, None), False), strict=True):
        assert torch.equal(actual[: len(x)], expected[: len(x)])
        assert len(actual.unique()) > 250 - 10 * (dtype == E5M2)


@HOW
@DTYPES
def test_nan_is_written_as_on_cpus(how: str, dtype: torch.dtype) -> None:
    x = torch.full((1, WIDTH), torch.nan)
    x[0, ::2] *= -1
    for part in stored(write(x, dtype, UNSCALED, KERNELS[how]()), has_rows_of_keys=True):
        assert (part[0] == 0x7F).all()


def read_codes(codes, out, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 256)
    tl.store(out + at, read_float8(tl.load(codes + at), FORM, out.dtype.element_ty))


@DTYPES
@pytest.mark.parametrize("is_converted", [True, False])
def test_every_code_is_read_exactly(dtype: torch.dtype, is_converted: bool) -> None:
    """NaN stays NaN. Only e4m3 has an instruction."""
    codes = torch.arange(256, dtype=torch.uint8)
    form = Float8Form.of(codes.view(dtype))
    assert form is not None
    if dtype == E5M2 and is_converted:
        return
    for result_type in (torch.float32, torch.float16, torch.bfloat16):
        out = torch.empty(256, dtype=result_type)
        interpret(read_codes)[(1,)](codes, out, form._replace(is_converted=is_converted))
        expected = codes.view(dtype).to(result_type)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_old_gpus_have_no_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, is_converted in ((80, False), (86, False), (89, True), (90, True), (120, True)):
        monkeypatch.setattr(float8, "find_capability", lambda _, value=capability: value)
        form = Float8Form.of(torch.empty(1, dtype=E4M3))
        assert form is not None
        assert form.is_converted == is_converted
    assert Float8Form.of(torch.empty(1, dtype=torch.bfloat16)) is None


@HOW
@pytest.mark.parametrize("shape", [FLOAT8_SHAPES["e4m3"], FLOAT8_SHAPES["e5m2_odd_sizes"]], ids=str)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_attention_applies_scales(how: str, shape: Shape, name: str) -> None:
    """In float32, whose errors are far smaller than those of the cache."""
    scoring = replace(PLAIN, scale=0.02)
    if name == "all":
        some = {
            key: value[: shape.num_heads] for key, value in SCORINGS["all"].items() if torch.is_tensor(value)
        }
        scoring = replace(scoring, **(SCORINGS["all"] | some))
    scene = CudaScene(shape, [70, 33], KERNELS[how](), torch.float32, SCALE)
    scene.check_last([(1, 33), (0, 70)], scoring)
    scene.check_spans([(0, 0, 70), (1, 30, 33)], scoring)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_bits_depend_on_their_sequence_only(dtype: torch.dtype) -> None:
    scene = CudaScene(Shape(dtype=dtype), [200, 33, 129], interpreted())
    work = list(enumerate(scene.lengths))
    alone = [scene.attend_last([item], PLAIN)[0] for item in work]
    together = scene.attend_last(work[::-1], PLAIN).flip(0)
    assert torch.equal(together, torch.stack(alone))


@HOW
def test_what_is_read_back_is_scaled(how: str) -> None:
    x = torch.randn(6, WIDTH)
    cache = write(x, E4M3, SCALE, KERNELS[how]())
    read = CudaAttention(cache, Implementations.plain(), 1).read(0, torch.arange(2), 6)
    for actual, scale in zip(read, SCALE, strict=True):
        expected = (x * (1 / scale)).to(E4M3).float() * scale
        torch.testing.assert_close(actual[0], expected, rtol=1e-6, atol=0)


def test_old_gpus_read_by_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole kernels, without the instruction."""
    scene = CudaScene(Shape(dtype=E4M3), [70], interpreted())
    whole = scene.attend_last([(0, 70)], PLAIN), scene.attend_spans([(0, 30, 70)], PLAIN)[0]
    for name in ("attend_segments", "attend_tiles"):
        module = interpreted_modules()[name].Float8Form
        form = module.of(scene.where[0])._replace(is_converted=False)
        monkeypatch.setattr(module, "of", lambda _, form=form: form)
    again = scene.attend_last([(0, 70)], PLAIN), scene.attend_spans([(0, 30, 70)], PLAIN)[0]
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))
