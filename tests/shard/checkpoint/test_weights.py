"""Check that checkpoints are read from one file or several, in slices, and that every fault gives one clear
line."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.shard.stored_tensors import SOURCES, check_slices, fail, save_single, tensors
from tgis.shard.checkpoint import files
from tgis.shard.checkpoint.opening import count_elements
from tgis.shard.checkpoint.tensors import WeightsError, read_pieces
from tgis.shard.checkpoint.weights import Source, Weights, by_group, expert, grouped, stack, transposed
from tgis.shard.memory.host_limits import HostMemory


def save_sharded(directory: Path, content: dict[str, Tensor]) -> None:
    names = sorted(content)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: content[name] for name in part}, directory / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("save", [save_single, save_sharded])
def test_reads_slices_of_packed_tensors(save: object, tmp_path: Path) -> None:
    content = tensors()
    save(tmp_path, content)  # type: ignore[operator]
    weights = Weights(tmp_path, SOURCES)
    for layer in (1, 11):
        packed = torch.cat([content[f"model.layers.{layer}.{x}.weight"] for x in "qk"])
        stored = weights.find(f"blocks.{layer}.qkv.weight", (8, 4))
        for rows in (slice(0, 8), slice(2, 5), slice(4, 7), slice(6, 8), slice(7, 8)):
            assert torch.equal(stored.read(rows, slice(1, 3)), packed[rows, 1:3])
        bias = torch.cat([content[f"model.layers.{layer}.{x}.bias"] for x in "qk"])
        assert torch.equal(weights.find(f"blocks.{layer}.qkv.bias", (8,)).read(slice(5, 7)), bias[5:7])
    assert torch.equal(weights.find("blocks.0.out.weight", (4, 6)).read(), content["model.layers.0.o.weight"])
    assert torch.equal(
        weights.find("embed.weight", (10, 4)).read(slice(3, 9)), content["model.embed_tokens.weight"][3:9]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_returns_the_stored_values(dtype: torch.dtype, tmp_path: Path) -> None:
    save_single(tmp_path, {"model.embed_tokens.weight": torch.randn(10, 4).to(dtype)})
    assert Weights(tmp_path, SOURCES).find("embed.weight", (10, 4)).read().dtype == dtype


def test_reads_only_the_requested_tensors(tmp_path: Path) -> None:
    """Check that rows of `q` can be read although the file of `k` is broken, and that those of `k` cannot."""
    content = tensors()
    save_sharded(tmp_path, content)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    broken = tmp_path / index["model.layers.0.o.weight"]
    assert index["model.embed_tokens.weight"] != broken.name
    broken.write_bytes(b"")
    weights = Weights(tmp_path, SOURCES)
    assert weights.find("embed.weight", (10, 4)).read().shape == (10, 4)
    with pytest.raises(WeightsError, match=rf"^{broken} cannot be read: it is truncated or damaged: "):
        weights.find("blocks.0.out.weight", (4, 6))


def test_names_missing_and_invalid_tensors(tmp_path: Path) -> None:
    content = tensors()
    del content["model.layers.3.k.weight"]
    content["model.layers.4.k.weight"] = torch.zeros(2, 5)
    content["model.layers.5.o.weight"] = torch.zeros(4, 6, dtype=torch.int8)
    save_single(tmp_path, content)
    file = tmp_path / "model.safetensors"
    missing = fail(tmp_path, "blocks.3.qkv.weight", (8, 4))
    assert missing == f"{tmp_path}: tensor model.layers.3.k.weight is missing"
    assert fail(tmp_path, shape=(11, 4)) == (
        f"{file}: tensor model.embed_tokens.weight has shape [10, 4], expected [11, 4]"
    )
    assert fail(tmp_path, "blocks.0.qkv.weight", (9, 4)) == (
        f"{file}: tensor model.layers.0.q.weight + model.layers.0.k.weight has shape [8, 4], expected [9, 4]"
    )
    assert fail(tmp_path, "blocks.4.qkv.weight", (8, 4)) == (
        f"{file}: tensor model.layers.4.q.weight + model.layers.4.k.weight "
        "have different widths: [6, 4], [2, 5]"
    )
    assert fail(tmp_path, "blocks.5.out.weight", (4, 6)) == (
        f"{file}: tensor model.layers.5.o.weight is stored as int8, "
        "expected one of float32, float16, bfloat16"
    )


@pytest.mark.parametrize("keep", [0, 4, 100, -8])
def test_names_a_truncated_file(keep: int, tmp_path: Path) -> None:
    save_single(tmp_path, tensors())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert fail(tmp_path).startswith(f"{file} cannot be read: it is truncated or damaged: ")


def test_names_a_corrupt_file(tmp_path: Path) -> None:
    save_single(tmp_path, tensors())
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])
    assert fail(tmp_path).startswith(f"{file} cannot be read: it is truncated or damaged: ")


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ("{", "cannot be read: it is truncated or damaged: "),
        ("[" * 100_000, "cannot be read: it is truncated or damaged: "),
        ("{}", "is not a weight index: 'weight_map'"),
        ('{"weight_map": ["a"]}', "is not a weight index: "),
        ('{"weight_map": {"model.embed_tokens.weight": 3}}', "is not a weight index: "),
        (
            '{"weight_map": {"model.embed_tokens.weight": "../a.safetensors"}}',
            "names a file outside its directory",
        ),
        (
            '{"weight_map": {"model.embed_tokens.weight": "/etc/passwd"}}',
            "names a file outside its directory",
        ),
    ],
)
def test_names_a_bad_index(index: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(index)
    assert fail(tmp_path).startswith(f"{file} {text}")


def test_names_a_missing_file(tmp_path: Path) -> None:
    save_sharded(tmp_path, tensors())
    (tmp_path / "b.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    text = "names b.safetensors, which does not exist: the checkpoint is truncated or damaged"
    assert fail(tmp_path) == f"{index} {text}"


def test_an_empty_directory_is_reported(tmp_path: Path) -> None:
    assert fail(tmp_path) == (
        f"{tmp_path} has no weights: there is no model.safetensors or model.safetensors.index.json or "
        "pytorch_model.bin or pytorch_model.bin.index.json; download all files of the model"
    )


def header(**offsets: list[int]) -> bytes:
    """Return the header of a file that gives these offsets for the table's sixteen bytes."""
    entries = {name: {"dtype": "F32", "shape": [2, 2], "data_offsets": at} for name, at in offsets.items()}
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        header(a=[0, 16]) + bytes(8),
        header(a=[0, 16], b=[8, 24]) + bytes(24),
        header(a=[0, 16], b=[32, 48]) + bytes(48),
        header(a=[0, 17]) + bytes(17),
        header(a=[16, 0]) + bytes(16),
        header(a=[0, 16]) + bytes(20),
        (1 << 62).to_bytes(8, "little") + bytes(100),
        (4).to_bytes(8, "little") + b"nope",
    ],
)
def test_names_a_file_with_an_inconsistent_header(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert fail(tmp_path).startswith(f"{file} cannot be read: it is truncated or damaged: ")


def test_names_a_tensor_that_the_index_puts_elsewhere(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    label = f"{tmp_path}/a.safetensors: tensor model.embed_tokens.weight"
    text = "is in the index, but not in the file: the checkpoint is truncated or damaged"
    assert fail(tmp_path) == f"{label} {text}"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_warns_of_numbers_that_are_not_finite(
    value: float, dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    matrix = torch.full((10, 4), torch.finfo(dtype).max, dtype=dtype)
    matrix[7, 2] = value
    save_single(tmp_path, {"model.embed_tokens.weight": matrix})
    stored = Weights(tmp_path, SOURCES).find("embed.weight", (10, 4))
    stored.read(slice(0, 7))
    assert not caplog.messages
    stored.read(slice(0, 8))
    label = f"{tmp_path}/model.safetensors: tensor model.embed_tokens.weight"
    assert caplog.messages == [f"{label} holds numbers that are not finite"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_names_a_tensor_of_another_type(dtype: torch.dtype, tmp_path: Path) -> None:
    save_single(tmp_path, {"model.embed_tokens.weight": torch.zeros(10, 4).to(dtype)})
    name = str(dtype).removeprefix("torch.")
    assert f"embed_tokens.weight is stored as {name}, expected one of float32, float16" in fail(tmp_path)


def test_a_single_number_is_no_tensor(tmp_path: Path) -> None:
    content = {"model.layers.0.q.weight": torch.zeros(()), "model.layers.0.k.weight": torch.zeros(())}
    save_single(tmp_path, content)
    assert "q.weight is a scalar" in fail(tmp_path, "blocks.0.qkv.weight", (8, 4))


def written(directory: Path, sources: dict[str, Source], prefix: str = "", **content: Tensor) -> Weights:
    save_single(directory, {name.replace("__", "."): tensor for name, tensor in content.items()})
    return Weights(directory, sources, prefix)


def test_a_transposed_matrix(tmp_path: Path) -> None:
    matrix, bias = torch.randn(6, 10), torch.randn(10)
    weights = written(tmp_path, {"up": transposed("c_fc")}, c_fc__weight=matrix, c_fc__bias=bias)
    check_slices(weights, "up.weight", matrix.T)
    check_slices(weights, "up.bias", bias)


@pytest.mark.parametrize(("groups", "queries", "head_dim"), [(1, 1, 1), (4, 1, 3), (2, 3, 4), (1, 5, 2)])
def test_grouped_heads(groups: int, queries: int, head_dim: int, tmp_path: Path) -> None:
    """Check the row order of Falcon, BLOOM and GPT-NeoX against indexing as their own code does it."""
    rows = groups * (queries + 2) * head_dim
    matrix, bias = torch.randn(rows, 5), torch.randn(rows)

    def sort(packed: Tensor) -> Tensor:
        heads = packed.view(groups, queries + 2, head_dim, -1)
        parts = (heads[:, :-2], heads[:, -2], heads[:, -1])
        return torch.cat([part.reshape(-1, *packed.shape[1:]) for part in parts])

    sources: dict[str, Source] = {"qkv": grouped("query_key_value", groups, head_dim)}
    content = {"query_key_value.weight": matrix, "query_key_value.bias": bias}
    weights = written(tmp_path, sources, **content)
    check_slices(weights, "qkv.weight", sort(matrix))
    check_slices(weights, "qkv.bias", sort(bias))


def test_experts_of_one_tensor_and_of_several(tmp_path: Path) -> None:
    fused, separate = torch.randn(3, 8, 5), torch.randn(2, 3, 2, 4, 5)
    content = {"layers.1.input_linear.weight": fused}
    for i, e, name in product(range(2), range(3), "ab"):
        content[f"layers.{i}.experts.{e}.{name}.weight"] = separate[i, e, "ab".index(name)].clone()
    gate_up = stack(*(f"layers.{{i}}.experts.{{e}}.{name}" for name in "ab"))
    sources: dict[str, Source] = {
        "blocks.{i}.experts.{e}.up": gate_up,
        "blocks.{i}.experts.{e}.fused": expert("layers.{i}.input_linear"),
        "blocks.{i}.experts.{e}.both": stack(expert("layers.{i}.input_linear"), gate_up),
        "blocks.{i}.experts.{e}.turned": transposed(expert("layers.{i}.input_linear")),
    }
    weights = written(tmp_path, sources, **content)
    for e in range(3):
        for i in range(2):
            check_slices(weights, f"blocks.{i}.experts.{e}.up.weight", separate[i, e].flatten(0, 1))
        check_slices(weights, f"blocks.1.experts.{e}.fused.weight", fused[e])
        check_slices(weights, f"blocks.1.experts.{e}.turned.weight", fused[e].T)
        both = torch.cat((fused[e], *separate[1, e]))
        check_slices(weights, f"blocks.1.experts.{e}.both.weight", both)
    with pytest.raises(WeightsError, match=r"input_linear\.weight has shape \[3, 8, 5\], no entry 3$"):
        weights.find("blocks.1.experts.3.fused.weight", (8, 5))


def test_a_stack_of_transposed_matrices(tmp_path: Path) -> None:
    a, b = torch.randn(4, 3), torch.randn(4, 7)
    weights = written(tmp_path, {"qkv": stack(transposed("a"), transposed("b"))}, a__weight=a, b__weight=b)
    check_slices(weights, "qkv.weight", torch.cat((a.T, b.T)))


@pytest.mark.parametrize(("stored", "asked"), [*product(("model.norm", "norm"), repeat=2)])
def test_names_may_lack_the_prefix(stored: str, asked: str, tmp_path: Path) -> None:
    weights = written(tmp_path, {"norm": asked}, "model.", **{f"{stored}.weight": torch.ones(3)})
    assert weights.has("norm.weight")
    assert not weights.has("norm.bias")
    assert weights.find("norm.weight", (3,)).read().tolist() == [1, 1, 1]
    with pytest.raises(WeightsError, match=rf"tensor {asked}\.bias is missing$"):
        weights.find("norm.bias", (3,))


def test_an_exact_name_goes_before_another(tmp_path: Path) -> None:
    both = {"model.norm.weight": torch.ones(1), "norm.weight": torch.zeros(1)}
    weights = written(tmp_path, {"long": "model.norm", "short": "norm"}, "model.", **both)
    assert (weights.find("long.weight", (1,)).read(), weights.find("short.weight", (1,)).read()) == (1, 0)


@pytest.mark.parametrize("rows", [10, 6, 9])
def test_rows_that_are_no_groups(rows: int, tmp_path: Path) -> None:
    weights = written(tmp_path, {"qkv": grouped("qkv", 3, 2)}, qkv__weight=torch.zeros(rows, 4))
    with pytest.raises(WeightsError, match=rf"has shape \[{rows}, 4\], not rows of 3 groups of queries"):
        weights.find("qkv.weight", (rows, 4))


def test_parts_of_groups_are_joined_in_any_order(tmp_path: Path) -> None:
    stored = torch.arange(12.0).view(6, 2)  # two groups, whose parts have one row and two
    sources = {"all": by_group("one", 2, [1, 2], [1, 0]), "last": by_group("one", 2, [1, 2], [1])}
    weights = written(tmp_path, sources, one__weight=stored)
    assert weights.find("all.weight", (6, 2)).read().equal(stored[[1, 2, 4, 5, 0, 3]])
    assert weights.find("last.weight", (4, 2)).read().equal(stored[[1, 2, 4, 5]])


def test_rows_that_are_no_groups_of_parts(tmp_path: Path) -> None:
    weights = written(tmp_path, {"all": by_group("one", 2, [1, 2], [1, 0])}, one__weight=torch.zeros(7, 2))
    with pytest.raises(WeightsError, match=r"has shape \[7, 2\], not rows of 2 groups of 3$"):
        weights.find("all.weight", (7, 2))


@pytest.mark.parametrize("is_pickle", [False, True])
def test_pages_that_were_read_do_not_pile_up(
    is_pickle: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {f"layers.{i}.weight": torch.full((512, 256), float(i)) for i in range(64)}  # 32 MiB
    if is_pickle:
        torch.save(content, tmp_path / "pytorch_model.bin")
    else:
        save_single(tmp_path, content)
    monkeypatch.setattr(files, "MAX_REOPEN_BYTES", 2 << 20)
    weights, before = Weights(tmp_path, {"blocks.{i}.up": "layers.{i}"}), HostMemory().begin_peak()
    for i in range(64):
        assert weights.find(f"blocks.{i}.up.weight", (512, 256)).read().mean() == i
    assert HostMemory().peak() - before < 12 << 20


def test_pages_of_a_large_matrix_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_single(tmp_path, {"layers.0.weight": torch.ones(32 << 10, 256)})  # 32 MiB
    monkeypatch.setattr(files, "MAX_REOPEN_BYTES", 2 << 20)
    HostMemory().release_memory()  # otherwise memory that the loop frees could hide what it allocates
    weights, before = Weights(tmp_path, {"blocks.{i}.up": "layers.{i}"}), HostMemory().begin_peak()
    stored, num_rows = weights.find("blocks.0.up.weight", (32 << 10, 256)), 0
    for rows, piece in read_pieces(stored, 100_000, 7):
        assert (rows.start, rows.start % 7, piece.mean()) == (num_rows, 0, 1)
        num_rows += len(piece)
    assert num_rows == 32 << 10
    assert HostMemory().peak() - before < 20 << 20


def test_elements_are_counted_unread(tmp_path: Path) -> None:
    assert count_elements(tmp_path) == 0
    torch.save({"a": torch.zeros(7, 3), "b": torch.zeros(9)}, tmp_path / "pytorch_model.bin")
    assert count_elements(tmp_path) == 21
    save_sharded(tmp_path, {"a": torch.zeros(5, 3), "b": torch.zeros(2, 2, 2), "c": torch.zeros(4)})
    assert count_elements(tmp_path) == 23, "safetensors go first"
    (tmp_path / "a.safetensors").write_bytes(b"")
    with pytest.raises(
        WeightsError, match=rf"^{tmp_path}/a\.safetensors cannot be read: it is truncated or damaged: "
    ):
        count_elements(tmp_path)


def test_elements_of_an_old_file_are_not_counted(tmp_path: Path) -> None:
    content = {"a": torch.zeros(7, 3)}
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert count_elements(tmp_path) == 0
