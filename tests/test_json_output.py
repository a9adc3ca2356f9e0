"""With --json-output every line that an operator's collector sees is one JSON object, whoever printed it."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Service, children_of
from tests.shard.checkpoints import write_llama
from tests.tokenizers_for_tests import write_byte_level

# Python runs this before anything else, in every process.
PRINTS = r"""
import os, sys

if "serve" in sys.orig_argv:
    os.write(1, b'  what():  std::bad_alloc\n[1, 2]\n{"a": NaN}\n{"a": \n\n\xff\xfe\r\n')
    os.write(2, b'{"event": "of a library", "level": "debug"}\n' + b"y" * (3 << 20) + b"\n")
    os.write(2, b"no end of this line")
"""
FATAL = "shard.before_loading[rank=1;epoch=1]=kill"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_llama(directory, vocab_size=400, eos_token_id=1)
    write_byte_level(directory, 400)
    return directory


def launch(directory: Path, *flags: str, env: dict[str, str] | None = None) -> Service:
    ports = ["--bind", "127.0.0.1", "--port", "0", "--grpc-port", "0"]
    log = ["--termination-log", str(directory / "termination-log")]
    return Service(["launcher", "--model-name", str(directory), *ports, *log, *flags], env)


def read(service: Service) -> list[dict[str, Any]]:
    lines = [json.loads(line, parse_constant=pytest.fail) for line in service.lines]
    assert all(isinstance(line, dict) for line in lines)
    return lines


def test_every_line_is_an_object(model: Path, tmp_path: Path) -> None:
    """Also of shards that print what they like and are killed before they have loaded, which are started
    again, and of one that is killed later."""
    (tmp_path / "sitecustomize.py").write_text(PRINTS)
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', os.getcwd())}"}
    flags = ["--json-output", "--env", "--num-shard", "2", "--dtype", "float32", "--failpoints"]
    service = launch(model, *flags, FATAL, env=env).wait_until_serving()
    os.kill(children_of(service.process.pid)["serve"][0], signal.SIGKILL)
    service.wait_for_line("1 was killed by SIGKILL; was it out of memory?; starting the shards again")
    assert service.end() == 0
    lines = read(service)
    assert {line["process"] for line in lines} == {"launcher", "router", "shard"}
    shards = [line for line in lines if line["process"] == "shard"]
    assert {line["rank"] for line in shards} == {0, 1}
    assert all("rank" not in line for line in lines if line["process"] != "shard")
    printed = [line["message"] for line in shards if line.get("logger") == "output"]
    assert {"  what():  std::bad_alloc", "[1, 2]", '{"a": NaN}', '{"a": ', "", "\ufffd\ufffd\r"} <= {*printed}
    assert any("no end of this line" in text for text in printed)
    assert sum(text.count("y") for text in printed) >= 3 << 20
    assert {"event": "of a library", "level": "debug", "process": "shard", "rank": 1} in lines
    told = [line["message"] for line in lines if line["process"] == "launcher"]
    assert "shard 1 was killed by SIGKILL; was it out of memory?; starting the shards again" in told
    assert any(text.startswith("versions:\n") for text in told)


@pytest.mark.parametrize(
    ("flags", "env", "code", "text"),
    [
        (["--json-output", "--tls-cert-path", "/x"], {}, 1, "error: tls: must provide both cert and key"),
        (["--json-output", "--port", "many"], {}, 2, "error: Invalid value for '--port'"),
        (["--nonsense"], {"JSON_OUTPUT": "true"}, 2, "error: No such option"),
        (
            ["--json-output", "--dtype", "float16", "--dtype-str", "float32"],
            {},
            1,
            "error: dtype and dtype_str",
        ),
    ],
)
def test_so_is_the_line_of_a_refused_start(
    model: Path, flags: list[str], env: dict[str, str], code: int, text: str
) -> None:
    service = launch(model, *flags, env=env)
    assert service.process.wait(30) == code
    service.end()
    last = read(service)[-1]
    assert (last["process"], last["level"]) == ("launcher", "CRITICAL")
    assert last["message"].startswith(text)


def test_so_is_the_line_of_a_shard_that_refuses_to_serve(model: Path) -> None:
    service = launch(model, "--json-output", "--kv-cache-tokens", "16")
    assert service.process.wait(60) == 1
    service.end()
    lines = read(service)
    assert lines[-1]["message"].startswith("error: shard 0: the cache is too small for one request")
    log = model / "termination-log"
    assert log.read_text() == lines[-1]["message"].removeprefix("error: ") + "\n"
    assert not any("again" in line["message"] for line in lines), "it would refuse again"
