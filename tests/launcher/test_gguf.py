"""A GGUF file served by the launcher without writing beside it, or refused in one line."""

import socket
from itertools import chain
from pathlib import Path

import pytest

from tests.support.processes import Service
from tests.support.shard.checkpoints import write_llama
from tests.support.shard.gguf_writer import write_gguf
from tgis.net.ports import IN_USE
from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_llama(tmp_path / "written")
    (tmp_path / "models").mkdir()
    write_gguf(tmp_path / "written", tmp_path / "models" / "small-q8.gguf", "llama")
    return tmp_path / "models" / "small-q8.gguf"


def launch(name: Path, tmp_path: Path) -> Service:
    ports = ["--bind", "127.0.0.1", "--port", "0", "--grpc-port", "0"]
    log = ["--termination-log", str(tmp_path / "termination-log")]
    return Service(["launcher", "--model-name", str(name), *ports, *log])


@pytest.mark.slow
def test_it_is_served(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    service = launch(file.parent, tmp_path).wait_until_serving()
    try:
        with service.channel() as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            asked = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="abba")])
            [answer] = stub.Generate(asked).responses
    finally:
        code = service.end()
    assert code == 0, service.output
    assert (answer.input_token_count, answer.generated_token_count) == (3, 20)
    assert any(line.endswith(f": loading {file.parent} on 1 shard") for line in service.lines), service.output
    assert any("router disconnected: it closed the connection" in line for line in service.lines)
    assert service.lines[-1].endswith("tgis.launcher.main: the service has stopped as requested")
    assert any(line.split(" on ")[0].endswith(f": rank 0 of 1 is ready: {file}") for line in service.lines)
    assert any("architecture llama, with tensors: " in line and "5 of F32" in line for line in service.lines)
    assert sorted(file.parent.iterdir()) == [file]
    assert file.read_bytes() == content


def test_a_port_in_use_ends_the_start_before_the_file_is_read(file: Path, tmp_path: Path) -> None:
    log = ["--termination-log", str(tmp_path / "termination-log"), "--model-name", str(file)]
    for name in ("--port", "--grpc-port", "--http-api-port"):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            flags = {"--port": "0", "--grpc-port": "0", "--http-api": "openai", name: str(port)}
            command = ["launcher", *log, "--bind", "127.0.0.1", *chain.from_iterable(flags.items())]
            service = Service(command)
            assert service.process.wait(60) == 1
        assert service.end() == 1
        text = f"error: port {port} on 127.0.0.1 cannot be opened: Address already in use{IN_USE}"
        assert service.lines[-1] == text
        assert "reading" not in service.output


def test_a_damaged_file_ends_the_start(file: Path, tmp_path: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])
    service = launch(file, tmp_path)
    assert service.process.wait(60) == 1
    assert service.end() == 1
    assert service.lines[-1].startswith(
        f"error: gguf: {file} cannot be read: it is truncated or damaged: tensor "
    )
    log = (tmp_path / "termination-log").read_text()
    assert log == service.lines[-1].removeprefix("error: ") + "\n"


def test_a_tokenizer_that_cannot_be_written_ends_the_start(file: Path, tmp_path: Path) -> None:
    """It is written while the shard loads the model."""
    content = file.read_bytes()
    merge = b"\x03\0\0\0\0\0\0\0a b"
    assert content.count(merge) == 1
    file.write_bytes(content.replace(merge, merge.replace(b"a b", b"a_b")))
    service = launch(file, tmp_path)
    assert service.process.wait(60) == 1
    assert service.end() == 1
    assert service.lines[-1] == (
        f"error: gguf: {file}: tokenizer.ggml.merges contains 'a_b', which is not a pair of tokens"
    )
    assert any(line.endswith(f": loading {file} on 1 shard") for line in service.lines), service.output
