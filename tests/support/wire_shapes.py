"""Frozen shapes of the public contract, and buf, which compiles and compares them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WIRE = ROOT / "tests" / "wire"
SHAPES = ["served", "caikit", "original"]
BUF = Path(sys.executable).parent / "buf"
NOWHERE = "http://127.0.0.1:9"  # buf has nothing to download, and would fail if it tried


def buf(*arguments: str, home: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HOME": str(home), "HTTPS_PROXY": NOWHERE, "HTTP_PROXY": NOWHERE}
    return subprocess.run([BUF, *arguments], cwd=cwd, env=env, text=True, capture_output=True, check=False)
