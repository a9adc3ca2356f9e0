"""Descriptions of ONNX files are read like ONNX Runtime reads them. Models that cannot be served are refused
with one line."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

from tests.support.shard.stepping import ALONE, read_config
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.onnx_runtime import load as onnx_runtime
from tgis.shard.models.onnx_runtime.graph import read_graph

DATA = Path(__file__).parents[3] / "data" / "onnx"
FILES = sorted(DATA.glob("*/*.onnx"))
TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(int64)": torch.int64,
    "tensor(bool)": torch.bool,
}
FLOAT, INT64, DOUBLE, HALF = 1, 7, 11, 10
Shape = list[int | str]


def load(directory: Path) -> None:
    onnx_runtime.load(onnx_runtime.make_spec(directory, read_config(directory)), ALONE, num_threads=1)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Return a copy of the model that a test may modify."""
    return Path(shutil.copytree(DATA / "llama", tmp_path / "llama"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_graphs_are_read_as_onnx_runtime_reads_them(file: Path) -> None:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    graph = read_graph(file)
    for actual, expected in ((graph.inputs, session.get_inputs()), (graph.outputs, session.get_outputs())):
        assert list(actual) == [value.name for value in expected]
        for value in expected:
            shape = tuple(n if isinstance(n, int) else None for n in value.shape)
            assert (actual[value.name].dtype, actual[value.name].shape) == (TYPES[value.type], shape)


def test_shapes_are_read_from_the_graph() -> None:
    actual = {
        name: onnx_runtime.make_spec(DATA / name, read_config(DATA / name))
        for name in ("gpt2", "half", "merged")
    }
    shapes = {name: (spec.num_layers, spec.num_kv_heads, spec.head_dim) for name, spec in actual.items()}
    assert shapes == {"gpt2": (2, 4, 4), "half": (1, 2, 4), "merged": (1, 4, 4)}
    assert [spec.dtype for spec in actual.values()] == [torch.float32, torch.float16, torch.float32]
    assert [spec.max_positions for spec in actual.values()] == [256, 256, 0]
    assert {spec.vocab_size for spec in actual.values()} == {99}


def test_the_folder_of_the_hub_and_weights_beside_the_graph(llama: Path) -> None:
    (llama / "onnx").mkdir()
    moved = (llama / "model.onnx").rename(llama / "onnx" / "model.onnx")
    (llama / "onnx" / "model.onnx_data").write_bytes(bytes(1000))
    spec = onnx_runtime.make_spec(llama, read_config(llama))
    assert spec.file == moved
    assert spec.weight_bytes == moved.stat().st_size + 1000
    load(llama)


def replace(directory: Path, old: bytes, new: bytes) -> None:
    assert len(old) == len(new)
    file = directory / "model.onnx"
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new))


def swap_layers(directory: Path) -> None:
    for old, new in (
        (b"present.0", b"present.x"),
        (b"present.1", b"present.0"),
        (b"present.x", b"present.1"),
    ):
        replace(directory, old, new)


def leave(directory: Path, *names: str) -> None:
    (directory / "model.onnx").unlink()
    for name in names:
        (directory / name).write_bytes(b"")


def configure(directory: Path, **settings: Any) -> None:
    (directory / "config.json").write_text(json.dumps({**read_config(directory), **settings}))


TO_EXPORT = (
    ".*: export it where optimum-onnx is installed, with `optimum-cli export onnx --model MODEL --task"
)
REFUSED = {
    "nothing": (leave, f"has no model in ONNX form, model.onnx or decoder_model_merged.onnx{TO_EXPORT}"),
    "two graphs": (
        lambda path: leave(path, "decoder_model.onnx", "decoder_with_past_model.onnx"),
        f"as two graphs, and only a single graph can be served{TO_EXPORT}",
    ),
    "an encoder": (
        lambda path: leave(path, "encoder_model.onnx", "decoder_model_merged.onnx"),
        "encoder-decoder models are not served in ONNX form",
    ),
    "an encoder-decoder": (
        lambda path: configure(path, is_encoder_decoder=True),
        "encoder-decoder models are not served in ONNX form",
    ),
    "no past": (
        lambda path: replace(path, b"past_key_values", b"last_key_values"),
        "it has no inputs for the keys and values of earlier tokens",
    ),
    "another input": (
        lambda path: replace(path, b"position_ids", b"position_idx"),
        "its input position_idx has an unknown name or type",
    ),
    "no scores": (lambda path: replace(path, b"logits", b"logitz"), "it has no logits"),
    "an output missing": (
        lambda path: replace(path, b"present.1.value", b"present.7.value"),
        "it has no present.1.value",
    ),
    "layers that are mixed up": (swap_layers, "its scores change if a prompt comes in chunks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spoil, text = REFUSED[case]
    spoil(llama)
    with pytest.raises(UnsupportedModelError, match=text) as caught:
        load(llama)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, content: bytes | int) -> bytes:
    """Return a field in protobuf's encoding."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def encode(name: str, element: int, shape: Shape) -> bytes:
    sizes = [field(1, n) if isinstance(n, int) else field(2, n.encode()) for n in shape]
    tensor = field(1, element) + field(2, b"".join(field(1, size) for size in sizes))
    return field(1, name.encode()) + field(2, field(1, tensor))


KEYS = "past_key_values.0.key"
HEADER: dict[str, tuple[int, Shape]] = {
    "input_ids": (INT64, ["b", "n"]),
    KEYS: (FLOAT, ["b", 2, "p", 4]),
    "past_key_values.0.value": (FLOAT, ["b", 2, "p", 4]),
    "logits": (FLOAT, ["b", "n", 77]),
    "present.0.key": (FLOAT, []),
    "present.0.value": (FLOAT, []),
}


def write_header(directory: Path, **changed: tuple[int, Shape]) -> None:
    """Write a model whose graph has no nodes."""
    values = {**HEADER, **changed}
    ends = [field(12 if name in list(HEADER)[3:] else 11, encode(name, *values[name])) for name in values]
    (directory / "model.onnx").write_bytes(field(1, 8) + field(7, b"".join(ends)))


def test_a_header_alone_describes_a_model_and_does_not_load(tmp_path: Path) -> None:
    write_header(tmp_path)
    spec = onnx_runtime.make_spec(tmp_path, {"n_positions": 12})
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (1, 2, 4, 77)
    assert spec.max_positions == 12
    write_header(tmp_path, logits=(FLOAT, ["b", "n", "tokens"]))
    assert onnx_runtime.make_spec(tmp_path, {"vocab_size": 55}).vocab_size == 55
    with pytest.raises(WeightsError, match=r"model\.onnx cannot be loaded: "):
        onnx_runtime.load(spec, ALONE, num_threads=1)


HEADERS = {
    "floats of 64 bits": (
        {KEYS: (DOUBLE, ["b", 2, "p", 4])},
        f"its input {KEYS} has an unknown name or type",
    ),
    "integers": (
        {KEYS: (INT64, ["b", 2, "p", 4])},
        "keys and values are neither all float32 nor all float16",
    ),
    "two types": (
        {KEYS: (HALF, ["b", 2, "p", 4])},
        "keys and values are neither all float32 nor all float16",
    ),
    "no batch": ({KEYS: (FLOAT, ["b", 4, "p"])}, "keys and values do not have one shape"),
    "two shapes": ({KEYS: (FLOAT, ["b", 2, "p", 8])}, "keys and values do not have one shape"),
    "no vocabulary": (
        {"logits": (FLOAT, ["b", "n", "v"])},
        r"neither it nor config\.json gives the size of the vocabulary",
    ),
    "no scores": ({"logits": (FLOAT, [])}, r"neither it nor config\.json gives the size of the vocabulary"),
    "open sizes": (
        dict.fromkeys((KEYS, "past_key_values.0.value"), (FLOAT, ["b", "h", "p", 4])),
        "it does not give the number and size of the key/value heads",
    ),
    "sizes below zero": (
        dict.fromkeys((KEYS, "past_key_values.0.value"), (FLOAT, ["b", (1 << 64) - 1, "p", 4])),
        "it does not give the number and size of the key/value heads",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_are_refused(case: str, tmp_path: Path) -> None:
    changed, text = HEADERS[case]
    write_header(tmp_path, **changed)
    with pytest.raises(UnsupportedModelError, match=text):
        onnx_runtime.make_spec(tmp_path, {})


@pytest.mark.parametrize("cause", ["empty", "text", "other", "cut", "begun"])
def test_damaged_files_are_named(cause: str, llama: Path) -> None:
    file = llama / "model.onnx"
    content = file.read_bytes()
    damaged = {
        "empty": b"",
        "text": b"version https://git-lfs.github.com/spec/v1\n",
        "other": (llama / "model.safetensors").read_bytes(),
        "cut": content[: len(content) // 2],
        "begun": content[:-1] + b"\xff",
    }
    file.write_bytes(damaged[cause])
    with pytest.raises(WeightsError, match=rf"^{re.escape(str(file))} cannot be (read as ONNX|loaded): .+$"):
        load(llama)


def test_scores_of_another_shape(capfd: pytest.CaptureFixture[str]) -> None:
    spec = onnx_runtime.make_spec(DATA / "llama", read_config(DATA / "llama"))
    with pytest.raises(UnsupportedModelError, match=r"it gives scores of shape \[9, 99\] for 9 tokens$"):
        onnx_runtime.load(dataclasses.replace(spec, vocab_size=98), ALONE, num_threads=1)
    with pytest.raises(UnsupportedModelError, match=r"ONNX Runtime failed with .*out of data bounds"):
        onnx_runtime.load(dataclasses.replace(spec, vocab_size=500), ALONE, num_threads=1)
    assert capfd.readouterr().err == ""


def test_onnx_runtime_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_runtime, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"^models in ONNX form need ONNX Runtime: pip install "):
        onnx_runtime.make_spec(DATA / "llama", {})
