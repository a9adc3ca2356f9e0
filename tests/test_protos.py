"""The served wire against frozen copies of the contract and of its older shapes: buf finds no breaking
change, and the compiled messages have the contract's numbers, types and presence."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message_factory import GetMessageClass

from tests.support.wire_shapes import ROOT, SHAPES, WIRE, buf
from tgis.pb import generation_pb2 as pb

# WIRE_JSON looks at messages only.
RULES = {"FILE": "FILE", "WIRE": "WIRE_JSON, RPC_NO_DELETE, PACKAGE_SERVICE_NO_DELETE"}


def breaking(served: Path, shape: str, rules: str, home: Path) -> subprocess.CompletedProcess[str]:
    """buf's verdict on the protos in `served` against a frozen shape."""
    config = f"{{version: v2, breaking: {{use: [{RULES[rules]}]}}}}"
    against = str(WIRE / shape)
    return buf("breaking", ".", "--against", against, "--config", config, home=home, cwd=served)


def test_buf_lints_and_builds(tmp_path: Path) -> None:
    for command in ("lint", "build"):
        result = buf(command, home=tmp_path)
        assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_lint_reports_violations_of_our_rules(tmp_path: Path) -> None:
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shard = tmp_path / "protos" / "shard.proto"
    text = shard.read_text()
    assert "uint64 step_id" in text
    shard.write_text(text.replace("uint64 step_id", "uint64 stepId"))
    result = buf("lint", home=tmp_path, cwd=tmp_path)
    assert result.returncode
    assert "stepId" in result.stdout


@pytest.mark.parametrize(("shape", "rules"), [("served", "FILE"), *((shape, "WIRE") for shape in SHAPES)])
def test_nothing_breaks(tmp_path: Path, shape: str, rules: str) -> None:
    result = breaking(ROOT / "protos", shape, rules, tmp_path)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("uint32 max_new_tokens = 1;", "uint32 max_new_tokens = 7;"),  # a number moves
        ("uint64 seed = 10;", "string seed = 10;"),  # another type
        ("string stop_sequence = 11;", "string stop_string = 11;"),  # another name, which JSON shows
        ("TIME_LIMIT = 4;", "TIMED_OUT = 4;"),
        ("repeated TokenInfo tokens = 8;", "TokenInfo tokens = 8;"),
        ("rpc Tokenize(", "rpc CountTokens("),
        ("returns (stream GenerationResponse)", "returns (GenerationResponse)"),
    ],
)
def test_a_break_is_found(tmp_path: Path, shape: str, old: str, new: str) -> None:
    text = (ROOT / "protos" / "generation.proto").read_text()
    assert old in text
    (tmp_path / "generation.proto").write_text(text.replace(old, new))
    result = breaking(tmp_path, shape, "WIRE", tmp_path)
    assert result.returncode, f"{new!r} went unnoticed"


def shape_of(field: FieldDescriptor) -> tuple[object, ...]:
    """What a client's bytes and JSON depend on."""
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof
    return (
        field.number,
        field.type,
        field.is_repeated,
        field.json_name,
        kind.full_name if kind else None,
        oneof.name if oneof and not oneof.name.startswith("_") else None,
    )


def messages_of(file: FileDescriptor) -> dict[str, Descriptor]:
    """By full name, nested ones too."""
    descriptors = dict(file.message_types_by_name.items())
    for message in list(descriptors.values()):
        descriptors |= {f"{message.name}.{nested.name}": nested for nested in message.nested_types}
    return descriptors


def enums_of(file: FileDescriptor) -> dict[str, dict[str, int]]:
    enums = list(file.enum_types_by_name.values())
    for message in messages_of(file).values():
        enums += message.enum_types
    return {enum.full_name: {value.name: value.number for value in enum.values} for enum in enums}


def methods_of(file: FileDescriptor) -> set[tuple[str, str, str, bool, bool]]:
    service = file.services_by_name["GenerationService"]
    return {
        (m.full_name, m.input_type.full_name, m.output_type.full_name, m.client_streaming, m.server_streaming)
        for m in service.methods
    }


def test_compiled_messages_are_the_contracts(frozen: FileDescriptor) -> None:
    """Equal to the contract; an older shape is a part of it, with the same numbers and types."""
    ours, is_contract = messages_of(pb.DESCRIPTOR), frozen.name == "served.proto"
    theirs = messages_of(frozen)
    assert set(theirs) <= set(ours)
    for name, message in theirs.items():
        expected = {field.name: shape_of(field) for field in message.fields}
        served = {field.name: shape_of(field) for field in ours[name].fields}
        if not is_contract:
            served = {field: shape for field, shape in served.items() if field in expected}
        assert served == expected
        for field in message.fields:
            same = field.has_presence == ours[name].fields_by_name[field.name].has_presence
            assert same or (not is_contract and field.name == "temperature")
    enums = enums_of(frozen)
    assert enums == {name: values for name, values in enums_of(pb.DESCRIPTOR).items() if name in enums}
    assert methods_of(frozen) == methods_of(pb.DESCRIPTOR)
    if is_contract:
        assert (set(theirs), set(enums)) == (set(ours), set(enums_of(pb.DESCRIPTOR)))


def test_bytes_of_every_shape_are_read(frozen: FileDescriptor) -> None:
    """A message that an older client fills wholly arrives wholly, and goes back unchanged."""
    kind: Any = GetMessageClass(frozen.message_types_by_name["BatchedGenerationRequest"])
    theirs = kind()
    theirs.model_id, theirs.prefix_id = "m", ""
    theirs.requests.add().text = "naïve 🙂\0"
    params = theirs.params
    params.method = 1
    params.sampling.temperature, params.sampling.top_k, params.sampling.seed = 0.5, 2**32 - 1, 2**64 - 1
    params.stopping.stop_sequences.extend(["a", "é"])
    params.stopping.include_stop_sequence = False
    params.decoding.repetition_penalty = 1.5
    params.decoding.length_penalty.start_index = 3
    params.response.top_n_tokens = 5
    params.truncate_input_tokens = 9
    ours = pb.BatchedGenerationRequest.FromString(theirs.SerializeToString())
    assert ours.HasField("prefix_id")
    assert not ours.HasField("adapter_id")
    assert ours.requests[0].text == "naïve 🙂\0"
    assert ours.params.sampling == pb.SamplingParameters(temperature=0.5, top_k=2**32 - 1, seed=2**64 - 1)
    assert ours.params.stopping.HasField("include_stop_sequence")
    assert ours.params.decoding.length_penalty.start_index == 3
    assert (ours.params.response.top_n_tokens, ours.params.truncate_input_tokens) == (5, 9)
    assert kind.FromString(ours.SerializeToString()) == theirs
