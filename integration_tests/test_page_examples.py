"""Examples of pages run as they are printed, each alone, against the model of `make run`."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import FENCE
from tests.support.processes import Service
from tests.support.real_models import SMOLLM2

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("quickstart", "client", "wire", "openai", "tgi", "lmi")),
]
# What an example needs besides the service of `make run`: its own service, adapters, certificates, packages.
NEEDS_MORE = re.compile(
    r"^make |^pip |MODEL_NAME=|text-generation-|podman|/adapters/|tuned/|\.pem|langchain", re.MULTILINE
)
# grpcurl may be missing, and the virtual environment is active.
SHELL = """
set -e -o pipefail
tgis() { "$PYTHON" -m tgis "$@"; }
source() { true; }
type grpcurl > /dev/null 2>&1 || grpcurl() { true; }
"""


def examples() -> Iterator[tuple[str, str, str]]:
    """Yield each example's place, language and text."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        for block in FENCE.finditer(text):
            language, body = block.groups()
            if language in ("shell", "python") and not NEEDS_MORE.search(body):
                yield f"{page}:{text.count(chr(10), 0, block.start()) + 1}", language, body


EXAMPLES = [*examples()]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log = str(tmp_path_factory.mktemp("service") / "termination-log")
    ports = ["--bind", "127.0.0.1", "--port", "0", "--grpc-port", "0", "--http-api", "openai,tgi,lmi"]
    service = Service(["launcher", "--model-name", str(SMOLLM2), "--termination-log", log, *ports])
    yield service.wait_until_serving()
    assert service.end() == 0, service.output


@pytest.mark.parametrize(
    ("language", "text"), [one[1:] for one in EXAMPLES], ids=[one[0] for one in EXAMPLES]
)
def test_an_example_runs_alone(language: str, text: str, service: Service, tmp_path: Path) -> None:
    grpc, http = f"127.0.0.1:{service.grpc_port}", f"127.0.0.1:{service.http_port}"
    text = text.replace("localhost:8033", grpc).replace("localhost:3000", http)
    text = re.sub(r"^tgis client \w+", rf"\g<0> --target {grpc}", text, flags=re.MULTILINE)
    command = ["bash", "-c", SHELL + text] if language == "shell" else [sys.executable, "-c", text]
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout != "") == (0, True), done.stdout + done.stderr
    assert '"error"' not in done.stdout


def test_every_page_has_examples() -> None:
    assert {place.partition(":")[0] for place, _, _ in EXAMPLES} == {*PAGES}
    assert len(EXAMPLES) > 25
