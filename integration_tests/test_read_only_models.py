"""Read-only directories of models, like volumes of clusters, beside a steady client."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.support.steady_client import API, steady_client, wait_for_answers
from tests.support.processes import Service, children_of
from tests.support.shard.checkpoints import write_llama
from tests.support.shard.gguf_writer import write_gguf
from tests.support.tokenizers.older_kinds import write_gpt2
from tests.support.tokenizers.trained import write_byte_level

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'


def python_that_cannot_write_to(directory: Path) -> list[str]:
    return ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(directory), sys.executable]


def write_usual(directory: Path) -> Path:
    write_llama(directory, vocab_size=400, eos_token_id=1)
    write_byte_level(directory, 400)
    return directory


def write_older(directory: Path) -> Path:
    """Create a model without tokenizer.json, which is created at start-up."""
    write_gpt2(directory)  # with a configuration, which write_llama replaces
    write_llama(directory, vocab_size=400, eos_token_id=0)
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    return directory


def write_file(directory: Path) -> Path:
    write_llama(directory.with_name("written"))
    write_gguf(directory.with_name("written"), directory / "small.gguf", "llama")
    return directory / "small.gguf"


@pytest.mark.parametrize("write", [write_usual, write_older, write_file])
def test_it_is_served_and_comes_back(write: Callable[[Path], Path], tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    name, python = write(directory), python_that_cannot_write_to(directory)
    if subprocess.run([*python, "-c", ""], capture_output=True, timeout=30).returncode:
        pytest.skip("nothing can be mounted here: that needs root, and unshare")
    probe = f"open({str(directory / 'probe')!r}, 'w')"
    assert subprocess.run([*python, "-c", probe], capture_output=True, timeout=30).returncode
    command = ["launcher", "--model-name", str(name), "--bind", "127.0.0.1", "--port", "0"]
    service = Service([*command, "--grpc-port", "0", *API], python=python).wait_until_serving()
    try:
        with steady_client(service.http) as seconds:
            wait_for_answers(seconds)
            os.kill(children_of(service.process.pid)["serve"][0], signal.SIGKILL)
            service.wait_for_line("the shards are back")
            wait_for_answers(seconds)
    finally:
        code = service.end()
    assert code == 0, service.output
    assert "Traceback" not in service.output
