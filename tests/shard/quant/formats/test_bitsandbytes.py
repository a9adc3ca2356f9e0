"""bitsandbytes' checkpoints against the library's weights, and inconsistent files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.shard.quantized_files import eight_bits, four_bits
from tests.support.shard.stored_tensors import check_parts, refuse
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.files import Checkpoint
from tgis.shard.checkpoint.opening import count_elements
from tgis.shard.checkpoint.tensors import StoredTensor, WeightsError
from tgis.shard.quant.code_tables import TABLES
from tgis.shard.quant.formats.bitsandbytes import BitsAndBytes
from tgis.shard.quant.formats.settings import QuantizationSettings


def open_module(directory: Path, tensors: dict[str, Tensor]) -> StoredTensor | None:
    content = {f"up.{end}": each.contiguous() for end, each in tensors.items()}
    save_file(content, directory / "model.safetensors")
    return make_format({}).open(Checkpoint(directory), "up")


def make_format(settings: dict[str, Any]) -> BitsAndBytes:
    return BitsAndBytes(QuantizationSettings(settings, "config.json", "bitsandbytes"))


SHAPES = {  # whether blocks fit rows; if not, they extend into the next row, and the last may be short or odd
    (20, 128): True,
    (20, 96): False,
    (30, 20): False,
    (7, 30): False,
    (7, 33): False,
    (300, 64): True,
}


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_four_bits_equal_the_library(
    shape: tuple[int, int], kind: str, is_nested: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    quantized = four_bits(torch.randn(shape), kind, nested=is_nested)
    stored = open_module(tmp_path, quantized.tensors)
    assert stored is not None
    assert stored.shape == shape
    assert torch.equal(stored.read(), quantized.weight)
    check_parts(stored, quantized.weight)
    if not SHAPES[shape]:
        assert stored.layout() is None
        return
    assert stored.layout() == CodeLayout(torch.uint8, 4, 64, table=TABLES[kind])
    assert torch.equal(stored.codes(slice(3, 9)).dequantize(), quantized.weight[3:9])
    with pytest.raises(WeightsError, match=r": columns 0 to 32 cannot be cut out of groups of 64$"):
        stored.codes(slice(3, 9), slice(0, 32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_are_rounded_to_the_type_of_the_library(dtype: torch.dtype, tmp_path: Path) -> None:
    quantized = four_bits(torch.randn(20, 128).to(dtype), "nf4")
    stored = open_module(tmp_path, quantized.tensors)
    assert stored is not None
    assert quantized.weight.dtype == dtype
    assert torch.equal(stored.read().to(dtype), quantized.weight)


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.float64])
@pytest.mark.parametrize("block", [32, 256])
def test_bytes_may_be_stored_as_other_numbers(storage: torch.dtype, block: int, tmp_path: Path) -> None:
    quantized = four_bits(torch.randn(16, 64), "nf4", block, storage=storage)
    assert quantized.tensors["weight"].dtype == storage
    stored = open_module(tmp_path, quantized.tensors)
    assert stored is not None
    check_parts(stored, quantized.weight)
    name = str(storage).removeprefix("torch.")
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": name}
    assert count_elements(tmp_path, make_format(settings)) == 16 * 64


def test_eight_bits_equal_the_library(tmp_path: Path) -> None:
    quantized = eight_bits(torch.randn(33, 50))
    stored = open_module(tmp_path, quantized.tensors)
    assert stored is not None
    assert torch.equal(stored.read(), quantized.weight)
    check_parts(stored, quantized.weight)
    assert stored.layout() == CodeLayout(torch.int8, 8, None)
    part = stored.codes(slice(3, 20), slice(5, 17))
    assert torch.equal(part.values, quantized.tensors["weight"][3:20, 5:17])
    torch.testing.assert_close(part.dequantize(), quantized.weight[3:20, 5:17], rtol=1e-6, atol=0)
    assert count_elements(tmp_path, make_format({"load_in_8bit": True})) == 33 * 50


def test_other_tensors_are_ignored(tmp_path: Path) -> None:
    assert open_module(tmp_path, {"weight": torch.randn(4, 4)}) is None
    assert open_module(tmp_path, {"bias": torch.randn(4)}) is None


STATE = "weight.quant_state.bitsandbytes__nf4"
NO_STATE = (
    "up.weight.quant_state.bitsandbytes__nf4 is not the JSON of a matrix's shape and blocksize, and of "
    "nested_blocksize and nested_offset where scales are codes"
)


def in_bytes(text: str | bytes) -> Tensor:
    return torch.tensor(list(text if isinstance(text, bytes) else text.encode()), dtype=torch.uint8)


def with_state(**changes: Any) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        state = {**json.loads(bytes(tensors[STATE].tolist())), **changes}
        return {STATE: in_bytes(json.dumps(state))}

    return change


def with_text(text: str | bytes) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {STATE: in_bytes(text)}


LIES: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "no JSON": (NO_STATE, with_text("{")),
    "no text": (NO_STATE, with_text(b"\xff\xfe\x00")),
    "no object": (NO_STATE, with_text("[1, 2]")),
    "deep JSON": (NO_STATE, with_text("[" * 4000)),
    "a long number": (NO_STATE, with_text('{"shape": [' + "9" * 4000 + ", 1]}")),
    "no shape": (NO_STATE, with_state(shape=None)),
    "three sizes": (NO_STATE, with_state(shape=[16, 64, 1])),
    "a negative size": (NO_STATE, with_state(shape=[-16, -64])),
    "a size that is no integer": (NO_STATE, with_state(shape=[16.0, 64])),
    "no blocks": (NO_STATE, with_state(blocksize=0)),
    "odd blocks": (NO_STATE, with_state(blocksize=63)),
    "an offset without blocks": (NO_STATE, with_state(nested_offset=1.0)),
    "an offset that is no number": (NO_STATE, with_state(nested_offset="x", nested_blocksize=256)),
    "an offset beyond floats": (NO_STATE, with_state(nested_offset=10**400, nested_blocksize=256)),
    "a large state": (
        "up.weight.quant_state.bitsandbytes__nf4 has 5000 bytes, more than 4096",
        with_text("{}" + " " * 4998),
    ),
    "a state of floats": (
        "up.weight.quant_state.bitsandbytes__nf4 is stored as float32, expected uint8",
        lambda _: {STATE: torch.zeros(3)},
    ),
    "another shape": (
        "up.weight has 512 bytes, which do not hold [17, 64] weights of 4 bits",
        with_state(shape=[17, 64]),
    ),
    "a shape beyond memory": (
        f"up.weight has 512 bytes, which do not hold [{10**18}, {10**18}] weights of 4 bits",
        with_state(shape=[10**18, 10**18]),
    ),
    "larger blocks": ("up.weight.absmax has shape [16], expected [8]", with_state(blocksize=128)),
    "smaller blocks": ("up.weight.absmax has shape [16], expected [32]", with_state(blocksize=32)),
    "scales said to be codes": (
        "up.weight.absmax is stored as float32, expected uint8",
        with_state(nested_offset=1.0, nested_blocksize=256),
    ),
    "codes said to be scales": (
        "up.weight.absmax is stored as uint8, expected float32",
        lambda _: {"weight.absmax": torch.zeros(16, dtype=torch.uint8)},
    ),
    "another table": (
        "up.weight.quant_map is not the table of nf4",
        lambda _: {"weight.quant_map": torch.linspace(-1, 1, 16)},
    ),
    "a short table": (
        "up.weight.quant_map has shape [15], expected [16]",
        lambda _: {"weight.quant_map": torch.zeros(15)},
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_inconsistent_files(lie: str, tmp_path: Path) -> None:
    tensors = four_bits(torch.randn(16, 64), "nf4").tensors
    problem, change = LIES[lie]
    text = refuse(lambda: open_module(tmp_path, {**tensors, **change(tensors)}))
    assert text == f"{tmp_path}/model.safetensors: tensor {problem}"


def test_inconsistent_nested_scales(tmp_path: Path) -> None:
    tensors = four_bits(torch.randn(16, 64), "nf4", nested=True).tensors
    for end, size in (("nested_quant_map", 255), ("nested_absmax", 2), ("absmax", 15)):
        name = f"weight.{end}"
        changed = {**tensors, name: torch.zeros(size, dtype=tensors[name].dtype)}
        text = refuse(lambda: open_module(tmp_path, changed))  # noqa: B023
        assert f"tensor up.{name} has shape [{size}], expected" in text


@pytest.mark.parametrize("end", ["absmax", "quant_map", "nested_absmax", "nested_quant_map"])
def test_a_missing_tensor_is_named(end: str, tmp_path: Path) -> None:
    tensors = four_bits(torch.randn(16, 64), "nf4", nested=True).tensors
    del tensors[f"weight.{end}"]
    text = refuse(lambda: open_module(tmp_path, tensors))
    assert text == f"{tmp_path}: tensor up.weight.{end} is missing"


def test_codes_without_a_state_are_refused(tmp_path: Path) -> None:
    tensors = four_bits(torch.randn(16, 64), "nf4").tensors
    for each in (torch.uint8, torch.int8):
        text = refuse(lambda: open_module(tmp_path, {"weight": tensors["weight"].view(each)}))  # noqa: B023
        assert "tensor up.weight is quantized, but the checkpoint has none of " in text
        assert text.endswith(f"up.{STATE}, up.weight.quant_state.bitsandbytes__fp4, up.SCB")


@pytest.mark.parametrize(
    ("problem", "changed"),
    [
        ("up.weight is stored as uint8, expected int8", {"weight": torch.zeros(8, 4, dtype=torch.uint8)}),
        ("up.SCB has shape [7], expected [8]", {"SCB": torch.ones(7)}),
        ("up.SCB is stored as float16, expected float32", {"SCB": torch.ones(8, dtype=torch.float16)}),
        (
            "up.weight_format is not 0: only row-major order is supported, not tiles",
            {"weight_format": torch.tensor(1, dtype=torch.uint8)},
        ),
    ],
)
def test_inconsistent_eight_bit_tensors(problem: str, changed: dict[str, Tensor], tmp_path: Path) -> None:
    tensors = {**eight_bits(torch.randn(8, 4)).tensors, **changed}
    text = refuse(lambda: open_module(tmp_path, tensors))
    assert text == f"{tmp_path}/model.safetensors: tensor {problem}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bnb_4bit_quant_storage", "save"),
        ("bnb_4bit_quant_storage", 8),
        ("bnb_4bit_quant_type", "nf5"),
        ("bnb_4bit_quant_type", ["nf4"]),
        ("load_in_4bit", "yes"),
    ],
)
def test_inconsistent_settings(key: str, value: object) -> None:
    with pytest.raises(WeightsError, match=rf"^config\.json: {key} .+ is "):
        make_format({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", key: value})
