"""Damaged and hostile files cause an error, never a call, a wrong number or excessive memory."""

import os
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.prompt_files import (
    HARM,
    REQUIRED,
    WIDTH,
    Payload,
    bounded_memory,
    claim_numbers,
    random_prompt,
    rewrite_pickle,
    save_prompt,
)
from tgis.prompts.errors import AdapterError, TooLargeError
from tgis.prompts.soft_prompt import read_prompt
from tgis.tensor_files.errors import TensorFileError
from tgis.tensor_files.safe_pickle import load_untrusted

NO_TENSOR = "Invalid prefix embedding tensor"
MIB = 1 << 20


def fail(directory: Path) -> AdapterError:
    with bounded_memory(64 * MIB), pytest.raises(AdapterError) as caught:
        read_prompt(directory, REQUIRED)
    return caught.value


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("name", ["decoder.pt", "adapter_model.bin"])
def test_a_payload_is_not_run(name: str, is_zip: bool, tmp_path: Path) -> None:
    harm = tmp_path / HARM
    content = {"prompt_embeddings": random_prompt(), "x": Payload(os.mkdir, str(harm))}
    save_prompt(tmp_path / "p", content, name, is_zip)
    error = fail(tmp_path / "p")
    assert str(error) == NO_TENSOR
    assert "calls posix.mkdir, which tensors do not need; it was not run" in str(error.__cause__)
    assert not harm.exists()
    torch.load(tmp_path / "p" / name, weights_only=False)
    assert harm.exists(), "the payload is harmless by itself"


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_call_that_torch_allows_takes_no_memory(is_zip: bool, tmp_path: Path) -> None:
    save_prompt(tmp_path, [random_prompt(), Payload(bytearray, 128 * MIB)], is_zip=is_zip)
    assert " calls " in str(fail(tmp_path).__cause__)
    with pytest.raises(AssertionError), bounded_memory(64 * MIB):
        torch.load(tmp_path / "decoder.pt", weights_only=True)


@pytest.mark.parametrize("name", ["decoder.pt", "old", "adapter_model.bin", "adapter_model.safetensors"])
def test_truncated_at_any_byte(name: str, tmp_path: Path) -> None:
    content = {"prompt_embeddings": random_prompt()}
    file = tmp_path / ("decoder.pt" if name == "old" else name)
    if name.endswith("safetensors"):
        save_file(content, file)
    else:
        save_prompt(tmp_path, random_prompt() if file.suffix == ".pt" else content, file.name, name != "old")
    whole = file.read_bytes()
    assert read_prompt(tmp_path, REQUIRED).decoder is not None
    for length in [*range(0, len(whole), 23), len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(AdapterError, match=NO_TENSOR):
            read_prompt(tmp_path, REQUIRED)


def test_flipped_bits_never_change_a_number(tmp_path: Path) -> None:
    tensor = random_prompt()
    file = save_prompt(tmp_path, tensor) / "decoder.pt"
    whole, num_refused = file.read_bytes(), 0
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            prompt = read_prompt(tmp_path, REQUIRED).decoder
        except AdapterError:
            num_refused += 1
        else:
            assert prompt is not None
            assert torch.equal(prompt, tensor)
    assert num_refused > tensor.nbytes // 7


def test_a_repacked_archive_is_refused(tmp_path: Path) -> None:
    """If mapped, its compressed bytes would be read as numbers."""
    file = save_prompt(tmp_path, random_prompt()) / "decoder.pt"
    rewrite_pickle(file, lambda content: content)
    assert read_prompt(tmp_path, REQUIRED).decoder is not None
    rewrite_pickle(file, lambda content: content, zipfile.ZIP_DEFLATED)
    assert str(fail(tmp_path)) == NO_TENSOR


@pytest.mark.parametrize("new", [10**6, 10**10, 10**15, 1 << 62])
@pytest.mark.parametrize("old", [4, WIDTH])
def test_numbers_that_are_not_there(old: int, new: int, tmp_path: Path) -> None:
    """`old` is a side of the matrix; the file also claims to have as many elements, or more."""
    for num_elements in (32, new, 1 << 62):
        file = save_prompt(tmp_path, random_prompt()) / "decoder.pt"
        rewrite_pickle(file, claim_numbers(32, num_elements))
        rewrite_pickle(file, claim_numbers(old, new))
        fail(tmp_path)


def test_an_old_file_claims_numbers(tmp_path: Path) -> None:
    file = save_prompt(tmp_path, random_prompt(), is_zip=False) / "decoder.pt"
    content = file.read_bytes()
    assert content.count(b"K\x20") == 1
    file.write_bytes(content.replace(b"K\x20", b"J" + (1 << 30).to_bytes(4, "little")))
    assert str(fail(tmp_path)) == NO_TENSOR


@pytest.mark.parametrize("name", ["decoder.pt", "adapter_model.bin", "adapter_model.safetensors"])
def test_a_sparse_file(name: str, tmp_path: Path) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(10 << 30)
    with bounded_memory(16 * MIB), pytest.raises(TooLargeError):
        read_prompt(tmp_path, REQUIRED)
    with (tmp_path / name).open("wb") as file:
        file.truncate(REQUIRED.max_prompt_bytes)
    assert str(fail(tmp_path)) == NO_TENSOR


@pytest.mark.parametrize("length", [0, 7, MIB, 100 * MIB, (1 << 63) + 5])
def test_a_huge_header(length: int, tmp_path: Path) -> None:
    header = struct.pack("<Q", length) + b'{"prompt_embeddings":'
    (tmp_path / "adapter_model.safetensors").write_bytes(header + b" " * MIB)
    assert str(fail(tmp_path)) == NO_TENSOR


def test_a_long_header(tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    for num_bytes in (MIB - 1000, MIB):
        save_file({"prompt_embeddings": random_prompt()}, file, metadata={"x": "y" * num_bytes})
        if num_bytes < MIB:
            assert read_prompt(tmp_path, REQUIRED).decoder is not None
    assert str(fail(tmp_path)) == NO_TENSOR


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_of_many_objects(is_zip: bool, tmp_path: Path) -> None:
    file = save_prompt(tmp_path, random_prompt(), is_zip=is_zip) / "decoder.pt"
    if is_zip:
        rewrite_pickle(file, lambda _: b"\x80\x02](" + b"]" * (5 * MIB) + b"e.")
    else:
        file.write_bytes(
            b"\x80\x02X" + struct.pack("<I", 5 * MIB) + b"x" * (5 * MIB) + b"." + file.read_bytes()
        )
    with bounded_memory(64 * MIB), pytest.raises(TensorFileError, match="truncated or damaged"):
        load_untrusted(file)


@pytest.mark.parametrize(("name", "num_records"), [("archive/data/0", 100), ("empty", 100_000)])
def test_an_archive_that_lists_a_record_many_times(name: str, num_records: int, tmp_path: Path) -> None:
    file = save_prompt(tmp_path, random_prompt()) / "decoder.pt"
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("empty", b"")
        names = [record.filename.split("/", 1)[-1] for record in archive.filelist]
        archive.filelist.extend([archive.filelist[names.index(name.split("/", 1)[-1])]] * num_records)
    with bounded_memory(16 * MIB), pytest.raises(TensorFileError, match="truncated or damaged"):
        load_untrusted(file)


@pytest.mark.parametrize("change", ["small", "comment", "locator"])
def test_an_archive_that_lies_about_its_directory(change: str, tmp_path: Path) -> None:
    """The file has a hundred thousand records, but a quick check sees few."""
    file = save_prompt(tmp_path, random_prompt()) / "decoder.pt"
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("empty", b"")
        archive.filelist.extend([archive.filelist[-1]] * 100_000)
    content, few = bytearray(file.read_bytes()), struct.pack("<I", 100)
    if change == "comment":
        content[-2:] = struct.pack("<H", 98)
        content += b"PK\x06\x06" + bytes(72) + b"PK\x05\x06" + bytes(8) + few + bytes(6)
    else:
        content[-10:-6] = few
    if change == "locator":
        content[-42:-22] = b"PK\x06\x07" + struct.pack("<IQI", 0, len(content) - 120, 1)
        content[-98:-42] = bytes(56)
    file.write_bytes(content)
    with bounded_memory(16 * MIB), pytest.raises(TensorFileError, match="truncated or damaged"):
        load_untrusted(file)


def test_calls_without_a_name(tmp_path: Path) -> None:
    file = save_prompt(tmp_path, random_prompt()) / "decoder.pt"
    rewrite_pickle(file, lambda _: b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c\x01x\x85R.")
    assert "calls an unnamed function" in str(fail(tmp_path).__cause__)


def test_paths_that_are_not_regular_files(tmp_path: Path) -> None:
    for content in (b"", b"\x7fELF", b"hello", b"PK\x03\x04" + bytes(100), b"\x80\x04N."):
        (tmp_path / "decoder.pt").write_bytes(content)
        assert str(fail(tmp_path)) == NO_TENSOR
