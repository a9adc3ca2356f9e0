"""Runs vLLM's own server on the CPU; a worker process in an environment that has it, which replies with the
server's address. Arguments: the model's directory and the type of weights and arithmetic."""

import contextlib
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from bench import worker
from bench.service import free_ports

MAX_LENGTH = 2048
READY_TIMEOUT_S, STOP_TIMEOUT_S = 280.0, 20.0


@contextmanager
def running(directory: str, dtype: str) -> Iterator[str]:
    """Yield the server's address once it is ready."""
    [port] = free_ports(1)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", directory]
    command += ["--dtype", dtype, "--max-model-len", str(MAX_LENGTH), "--enforce-eager"]
    command += ["--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}/health")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        process.kill()


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), opener.open(url, timeout=5):
            return
        time.sleep(0.2)
    raise SystemExit("vLLM's server does not become ready")


def main() -> None:
    directory, dtype = sys.argv[1:]
    with running(directory, dtype) as target:
        worker.serve(lambda _: {"target": target})


if __name__ == "__main__":
    main()
