"""With --json-output, every line that an operator's collector sees is one JSON object, whatever printed
it."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Service, children_of
from tests.support.shard.checkpoints import write_llama
from tests.support.tokenizers.trained import write_byte_level

# Python runs this before anything else, in every process.
PRINTS = r"""
import os, sys

if "serve" in sys.orig_argv:
    os.write(1, b'  what():  std::bad_alloc\n[1, 2]\n{"a": NaN}\n{"a": \n\n\xff\xfe\r\n')
    os.write(2, b'{"event": "of a library", "level": "debug"}\n' + b"y" * (3 << 20) + b"\n")
    os.write(2, b"no end of this line")
"""
FATAL = "shard.before_loading[epoch=1]=kill"


def read(service: Service) -> list[dict[str, Any]]:
    lines = [json.loads(line, parse_constant=pytest.fail) for line in service.lines]
    assert all(isinstance(line, dict) for line in lines)
    return lines


@pytest.mark.slow
def test_every_line_is_an_object(tmp_path: Path) -> None:
    """This includes shards that print any text and are killed before they have loaded, their restart, and a
    shard that is killed later."""
    write_llama(tmp_path, vocab_size=400, eos_token_id=1)
    write_byte_level(tmp_path, 400)
    (tmp_path / "sitecustomize.py").write_text(PRINTS)
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', os.getcwd())}"}
    command = ["launcher", "--model-name", str(tmp_path), "--dtype", "float32"]
    command += ["--bind", "127.0.0.1", "--port", "0", "--grpc-port", "0", "--failpoints", FATAL]
    service = Service([*command, "--json-output", "--env"], env).wait_until_serving()
    os.kill(children_of(service.process.pid)["serve"][0], signal.SIGKILL)
    again = "shard 0 was killed by SIGKILL (out of memory?); restarting the shards"
    deadline = time.monotonic() + 60
    while service.output.count(again) < 2:
        assert time.monotonic() < deadline, service.output[-5000:]
        time.sleep(0.02)
    assert service.end() == 0
    lines = read(service)
    assert {line["process"] for line in lines} == {"launcher", "router", "shard"}
    shards = [line for line in lines if line["process"] == "shard"]
    assert {line["rank"] for line in shards} == {0}
    assert all("rank" not in line for line in lines if line["process"] != "shard")
    printed = [line["message"] for line in shards if line.get("logger") == "output"]
    assert {"  what():  std::bad_alloc", "[1, 2]", '{"a": NaN}', '{"a": ', "", "\ufffd\ufffd\r"} <= {*printed}
    assert any("no end of this line" in text for text in printed)
    assert sum(text.count("y") for text in printed) >= 3 << 20
    assert {"event": "of a library", "level": "debug", "process": "shard", "rank": 0} in lines
    messages = [line["message"] for line in lines if line["process"] == "launcher"]
    assert messages.count(again) == 2
    assert any(text.startswith("versions:\n") for text in messages)
