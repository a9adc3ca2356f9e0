"""Headers of GGUF files: files written by the published package are read; invalid ones are refused in one
line that names the file, before memory is allocated."""

import random
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.gguf_bytes import ARRAY, BOOL, F32, TEXT, U32, U64, array, file, key, place, text
from tgis.tensor_files.errors import TensorFileError
from tgis.tensor_files.gguf_header import MAX_ELEMENTS, read_gguf_header
from tgis.tensor_files.gguf_types import TYPES

NOT_FOR_WEIGHTS = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}
MANY = 1 << 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def write_by_library(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_rope_freq_base(1e5)
    writer.add_bool("b", True)
    writer.add_string("name", "naïve 東京")
    writer.add_array("scores", [0.5, -1.25])
    writer.add_token_list(["<s>", "é", ""])
    writer.add_token_types([3, 1, 1])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    codes = gguf.quants.quantize(np.ones((4, 64), np.float32), GGMLQuantizationType.Q4_0)
    writer.add_tensor("codes", codes, raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_files_written_by_the_library(path: Path) -> None:
    write_by_library(path)
    header, oracle = read_gguf_header(path), gguf.GGUFReader(path)
    actual = {
        name: list(value) if hasattr(value, "typecode") else value for name, value in header.metadata.items()
    }
    known = {name: field.contents() for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
    assert actual == known
    assert actual["name"] == "naïve 東京"
    for tensor in oracle.tensors:
        place = header.tensors[tensor.name]
        assert place.shape == tuple(reversed(tensor.shape.tolist()))
        assert (place.start, place.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert place.type.name == tensor.tensor_type.name
    assert len(header.tensors) == len(oracle.tensors) == 2


def test_types_have_the_library_s_sizes() -> None:
    for number, type in TYPES.items():
        theirs = GGMLQuantizationType(number)
        assert (type.name, type.block_elements, type.block_bytes) == (theirs.name, *GGML_QUANT_SIZES[theirs])


BAD = {
    "empty": (b"", "is not a GGUF file"),
    "other": (b"PK\x03\x04" + bytes(99), "is not a GGUF file"),
    "cut": (file()[:10], "truncated or damaged: number of tensors"),
    "version 1": (file(version=1), "of version 1; only versions 2 and 3 are supported"),
    "big-endian": (file(version=3 << 24), "with big-endian numbers"),
    "many tensors": (file(counts=(MANY, 0)), f"number of tensors is {MANY}"),
    "many keys": (file(counts=(0, MANY)), f"number of keys is {MANY}"),
    "missing keys": (file(counts=(0, 5)), "truncated or damaged"),
    "missing tensors": (file(counts=(5, 0)), "truncated or damaged"),
    "long name": (file([(1 << 40).to_bytes(8, "little")]), "length of a key is 1099511627776"),
    "long text": (
        file([text("k") + (TEXT).to_bytes(4, "little") + MANY.to_bytes(8, "little")]),
        "length of k",
    ),
    "text beyond the file": (
        file([text("k") + (TEXT).to_bytes(4, "little") + (9999).to_bytes(8, "little")]),
        "truncated or damaged: k ends after the file",
    ),
    "not UTF-8": (file([key("k", TEXT, "ab").replace(b"ab", b"\xff\xfe")]), "k is not UTF-8"),
    "unknown type of a key": (file([text("k") + (77).to_bytes(4, "little")]), "k has the unknown type 77"),
    "name of two lines": (file([key("a\nb", U32, 1)]), "a key is not printable"),
    "key twice": (file([key("k", U32, 1)] * 2), "key k occurs twice"),
    "long array": (file([array("k", U64, [], MANY)]), f"number of elements of k is {MANY}"),
    "array beyond the file": (
        file([array("k", U64, [1], 99)]),
        "truncated or damaged: k ends after the file",
    ),
    "texts beyond the file": (
        file([array("k", TEXT, ["a"], 99)]),
        "truncated or damaged: k ends after the file",
    ),
    "texts not UTF-8": (
        file([array("k", TEXT, ["ab"]).replace(b"ab", b"\xff\xfe")]),
        "k is not UTF-8",
    ),
    "array of arrays": (file([array("k", ARRAY, [], 1)]), "k is an array of the unknown type 9"),
    "unknown type": (file([], [place("t", kind=5)], bytes(128)), "tensor t has the unknown type 5"),
    "no dimensions": (file([], [place("t", ())], bytes(128)), "tensor t has 0 dimensions"),
    "many dimensions": (file([], [place("t", (1,) * 9)], bytes(128)), "tensor t has 9 dimensions"),
    "no elements": (file([], [place("t", (32, 0))], bytes(128)), "tensor t has the impossible shape"),
    "large tensor": (file([], [place("t", (MANY, MANY))], bytes(128)), "tensor t has the impossible shape"),
    "part of a block": (file([], [place("t", (33,), 8)], bytes(128)), "not whole blocks of Q8_0"),
    "tensor beyond the file": (
        file([], [place("t")], bytes(127)),
        "truncated or damaged: tensor t ends after",
    ),
    "tensor twice": (file([], [place("t"), place("t", start=128)], bytes(256)), "tensor t occurs twice"),
    "misaligned": (file([], [place("t", start=16)], bytes(256)), "tensor t is not aligned to 32 bytes"),
    "overlap": (file([], [place("t"), place("u", start=96)], bytes(256)), "tensors t and u overlap"),
    "alignment of 0": (file([key("general.alignment", U32, 0)]), "general.alignment 0 is not a valid align"),
    "alignment of 48": (
        file([key("general.alignment", U32, 48)]),
        "general.alignment 48 is not a valid align",
    ),
    "alignment as text": (
        file([key("general.alignment", TEXT, "x")]),
        "general.alignment x is not a valid align",
    ),
    "alignment as truth": (file([key("general.alignment", BOOL, True)]), "general.alignment True is not"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_in_one_line(case: str, path: Path) -> None:
    content, expected = BAD[case]
    path.write_bytes(content)
    with pytest.raises(TensorFileError) as caught:
        read_gguf_header(path)
    assert str(caught.value).startswith(str(path))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_elements_of_all_arrays_are_limited_together(path: Path) -> None:
    size = MAX_ELEMENTS // 2 + 1
    path.write_bytes(file([array(name, 0, [], size) + bytes(size) for name in ("a", "b")]))
    with pytest.raises(TensorFileError, match=f": b: there are more than {MAX_ELEMENTS} elements of arrays"):
        read_gguf_header(path)


def test_another_alignment(path: Path) -> None:
    path.write_bytes(file([key("general.alignment", U32, 64)], [place("t", start=64)], bytes(512)))
    assert read_gguf_header(path).tensors["t"].start % 64 == 0


MEASURE = """
import resource, sys
from pathlib import Path
from tgis.tensor_files.errors import TensorFileError
from tgis.tensor_files.gguf_header import read_gguf_header
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        read_gguf_header(Path(path))
    except TensorFileError:
        continue
    raise SystemExit(path)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_bad_files_take_little_memory(tmp_path: Path) -> None:
    for number, (content, _) in enumerate(BAD.values()):
        (tmp_path / f"{number}.gguf").write_bytes(content)
    short = text("ab") * (MAX_ELEMENTS // 8)
    texts = array("k", TEXT, [], MAX_ELEMENTS // 8) + short
    (tmp_path / "texts.gguf").write_bytes(file([texts], counts=(0, 9)))
    (tmp_path / "zeros.gguf").write_bytes(file() + bytes(1 << 24))
    with (tmp_path / "zeros.gguf").open("r+b") as content:
        content.seek(16)
        content.write((1 << 16).to_bytes(8, "little"))
    command = [sys.executable, "-c", MEASURE, *map(str, sorted(tmp_path.glob("*.gguf")))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < 64 * 1024  # KiB


WHOLE = file(
    [
        key("general.architecture", TEXT, "llama"),
        key("llama.block_count", U32, 2),
        key("llama.rope.freq_base", F32, 1e4),
        array("tokenizer.ggml.tokens", TEXT, ["<s>", "</s>", "é"]),
        array("tokenizer.ggml.scores", F32, [0.0, 0.5, 1.0]),
    ],
    [place("token_embd.weight", (32, 3), 8), place("output_norm.weight", (32,), 0, 128)],
    bytes(256),
)


def read_or_refuse(path: Path, content: bytes) -> None:
    """Read a file that may be damaged: it is read, or refused in one line with its path."""
    path.write_bytes(content)
    problem, tensors = "", {}
    try:
        tensors = dict(read_gguf_header(path).tensors)
    except TensorFileError as error:
        problem = str(error)
    assert problem == "" or (problem.startswith(str(path)) and "\n" not in problem)
    for tensor in tensors.values():
        assert 0 < tensor.start <= tensor.start + tensor.num_bytes <= len(content)


def flip(rng: random.Random, count: int, path: Path) -> None:
    for _ in range(count):
        content = bytearray(WHOLE)
        for _ in range(rng.randrange(1, 5)):
            content[rng.randrange(4, len(content) - 256)] = rng.choice(
                (0, 1, 127, 128, 255, rng.randrange(256))
            )
        read_or_refuse(path, bytes(content[: rng.choice((len(content), rng.randrange(len(content)) + 1))]))


def test_flipped_bytes(path: Path) -> None:
    flip(random.Random(1), 300, path)


@pytest.mark.slow
def test_many_flipped_bytes(path: Path) -> None:
    flip(random.Random(2), 20_000, path)


@given(st.binary(max_size=200), st.integers(0, len(WHOLE)))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes(path: Path, content: bytes, start: int) -> None:
    read_or_refuse(path, WHOLE[:start] + content)
    read_or_refuse(path, WHOLE[:start] + content + WHOLE[start:])
