"""Check that damaged weight files are refused with one line that names the file."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.shard.checkpoints import SMALL, write_model
from tests.support.shard.driver import configure
from tests.support.shard.stepping import ALONE, read_config
from tgis.errors import OperatorError
from tgis.shard.models import registry
from tgis.shard.models.hf_transformers import load as hf_transformers
from tgis.shard.models.skeleton import build_skeleton
from tgis.shard.startup import load as startup

Damage = Callable[[bytes], bytes]

DAMAGED = "cannot be read: it is truncated or damaged"
NATIVE = {"deployment_framework": "tgis_native"}


def point_beyond(content: bytes) -> bytes:
    """Return a header whose last tensor ends beyond the end of the file."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    last = max(
        (one for name, one in header.items() if name != "__metadata__"), key=lambda x: x["data_offsets"]
    )
    last["data_offsets"][1] += 4096
    last["shape"][0] += 4096 // (4 * (last["shape"][1] if len(last["shape"]) > 1 else 1))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


SAFETENSORS: dict[str, Damage] = {
    "empty": lambda content: b"",
    "cut in its header": lambda content: content[:100],
    "cut in its data": lambda content: content[:-8],
    "damaged in its header": lambda content: content[:20] + b"\xff" * 10 + content[30:],
    "damaged everywhere": lambda content: bytes(len(content)),
    "beyond the file": point_beyond,
}
ZIP: dict[str, Damage] = {
    "empty": lambda content: b"",
    "cut at its begin": lambda content: content[:3],
    "cut in its data": lambda content: content[: len(content) // 2],
    "cut at its end": lambda content: content[:-8],
    "damaged at its end": lambda content: content[:-300] + bytes(300),
    "damaged in its index": lambda content: content.replace(b"ctorch._utils", b"\xff" * 13),
}
# The format before torch 1.6, cut inside a name, after a name, and inside the data.
OLD: dict[str, Damage] = {
    "cut in a name": lambda content: content[: content.index(b"_rebuild_tensor_v2") + 8],
    "cut in a module's name": lambda content: content[: content.index(b"torch._utils") + 6],
    "cut behind a module's name": lambda content: content[: content.index(b"torch._utils\n") + 13],
    "cut in its index": lambda content: content[: content.index(b"embed_tokens")],
    "cut in its data": lambda content: content[:-8],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, transformers.LlamaConfig(**SMALL))
    return directory


def copy(model: Path, directory: Path, kind: str, is_split: bool) -> Path:
    """Write the model into one or two files of that kind and return the last one."""
    shutil.copy(model / "config.json", directory)
    tensors = load_file(model / "model.safetensors")
    single = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    stem, _, end = single.rpartition(".")
    names = sorted(tensors, reverse=True)  # so that both files have the tensors that get damaged
    parts = (
        {f"{stem}-{i + 1:05}-of-00002.{end}": names[i::2] for i in range(2)} if is_split else {single: names}
    )
    for file, of_file in parts.items():
        content = {name: tensors[name] for name in of_file}
        if kind == "safetensors":
            save_file(content, directory / file, {"format": "pt"})
        else:
            torch.save(content, directory / file, _use_new_zipfile_serialization=kind == "zip")
    if is_split:
        index = {"metadata": {}, "weight_map": {name: file for file, of in parts.items() for name in of}}
        (directory / f"{single}.index.json").write_text(json.dumps(index))
    return directory / max(parts)


def start(directory: Path) -> object:
    return startup.load(configure(directory, **NATIVE))


def load_natively(directory: Path) -> object:
    return registry.load(directory, read_config(directory), ALONE, torch.float32)


def load_through_transformers(directory: Path) -> object:
    spec = hf_transformers.make_spec(directory, read_config(directory), False)
    return hf_transformers.load(directory, spec, ALONE, torch.float32, False)


def look_at_shapes(directory: Path) -> object:
    return build_skeleton(directory, read_config(directory), torch.float32)


READERS = (start, load_natively, load_through_transformers, look_at_shapes)


def refusal(read: Callable[[Path], object], directory: Path) -> str:
    with pytest.raises(OperatorError) as caught:
        read(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def cases() -> list[tuple[str, str]]:
    kinds = {"safetensors": SAFETENSORS, "zip": ZIP, "old": OLD}
    return [(kind, name) for kind, damages in kinds.items() for name in damages]


@pytest.mark.parametrize("read", READERS[:3])  # the last reader opens files as the second does
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(("kind", "name"), cases())
def test_a_damaged_file_is_named(
    kind: str, name: str, is_split: bool, read: Callable[[Path], object], model: Path, tmp_path: Path
) -> None:
    file = copy(model, tmp_path, kind, is_split)
    whole = file.read_bytes()
    damaged = {"safetensors": SAFETENSORS, "zip": ZIP, "old": OLD}[kind][name](whole)
    assert damaged != whole
    file.write_bytes(damaged)
    assert re.match(rf"{re.escape(str(file))} {DAMAGED}", refusal(read, tmp_path))


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", ["safetensors", "zip"])
def test_a_file_that_only_the_index_knows(
    kind: str, read: Callable[[Path], object], model: Path, tmp_path: Path
) -> None:
    file = copy(model, tmp_path, kind, is_split=True)
    [index] = tmp_path.glob("*.index.json")
    file.unlink()
    text = f"{index} names {file.name}, which does not exist: the checkpoint is truncated or damaged"
    assert refusal(read, tmp_path) == text


@pytest.mark.parametrize("read", [start, load_natively, look_at_shapes])
@pytest.mark.parametrize("kind", ["safetensors", "zip"])
def test_a_tensor_that_only_the_index_knows(
    kind: str, read: Callable[[Path], object], model: Path, tmp_path: Path
) -> None:
    file = copy(model, tmp_path, kind, is_split=True)
    [index] = tmp_path.glob("*.index.json")
    content = json.loads(index.read_text())
    name = next(name for name, where in content["weight_map"].items() if where != file.name)
    content["weight_map"][name] = file.name
    index.write_text(json.dumps(content))
    assert refusal(read, tmp_path) == (
        f"{file}: tensor {name} is in the index, but not in the file: the checkpoint is truncated or damaged"
    )


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", ["safetensors", "zip"])
def test_a_damaged_index_is_named(
    kind: str, read: Callable[[Path], object], model: Path, tmp_path: Path
) -> None:
    copy(model, tmp_path, kind, is_split=True)
    [index] = tmp_path.glob("*.index.json")
    index.write_bytes(index.read_bytes()[:-50])
    assert refusal(read, tmp_path).startswith(f"{index} {DAMAGED}: ")


def test_a_file_that_may_not_be_opened_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"model.embed_tokens.weight": "a.safetensors"}}'
    )
    (tmp_path / "config.json").write_text(json.dumps(transformers.LlamaConfig(**SMALL).to_dict()))
    (tmp_path / "a.safetensors").symlink_to("/proc/self/mem")  # it can be opened but not mapped
    text = refusal(load_natively, tmp_path)
    assert "damaged" not in text
    assert "a.safetensors" in text
