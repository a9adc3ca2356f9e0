"""The distribution alone: its wheel in an environment that has nothing else."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.canned_service import CannedService, serve
from tests.support.wire_shapes import ROOT

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
import tgis_client
from tgis_client import Client, Parameters
with Client(sys.argv[1]) as client:
    print(client.generate("a", Parameters(max_new_tokens=3, tokens=True)).text)
    print("".join(part.text for part in client.stream("a")))
assert "site-packages" in tgis_client.__file__, tgis_client.__file__
assert not {"click", "torch", "tgis", "opentelemetry"} & {name.split(".")[0] for name in sys.modules}
"""
LOWEST = "grpcio==1.66.*", "protobuf==5.26.*"


def install(directory: Path, *requirements: str) -> Path:
    """Return the Python of a new environment."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    command = [python, "-m", "pip", "install", "-q", "--no-compile", *requirements]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the source distribution, so that both are whole."""
    directory = tmp_path_factory.mktemp("wheel")
    python = install(directory / "builder", "build")
    command = [python, "-m", "build", "--outdir", directory / "dist", ROOT / "client"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    [wheel] = (directory / "dist").glob("*.whl")
    return wheel


@pytest.mark.parametrize("lowest", [(), LOWEST], ids=["newest", "oldest"])
def test_the_wheel_works_alone(wheel: Path, tmp_path: Path, lowest: tuple[str, ...]) -> None:
    python = install(tmp_path / "bare", str(wheel), *lowest)
    with serve(CannedService()) as target:
        result = subprocess.run(
            [python, "-I", "-W", "error", "-c", PROGRAM, target],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == ["a: one two three", "one two three"]
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    )
    names = {line.partition("==")[0] for line in listed.stdout.splitlines()}
    assert names - {"pip", "setuptools"} <= {"grpcio", "protobuf", "tgis-next-client", "typing_extensions"}


@pytest.mark.parametrize("implementation", ["upb", "python"])
def test_each_implementation_of_protobuf(implementation: str) -> None:
    """The other stubs of the same messages are in the same process."""
    code = "import tgis.pb.generation_pb2 as a, tgis_client.pb.generation_pb2 as b; "
    code += "assert a.Parameters.FromString(b.Parameters(truncate_input_tokens=7).SerializeToString())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
