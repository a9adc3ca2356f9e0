"""Installs a pack on the machine: `python -m bench.gpu.pack.install DIRECTORY`. Wheels go to DIRECTORY/site,
which PYTHONPATH must name, `tgis/pb` into the checkout, and compiled kernels beside the Python. It imports
nothing that a pack may bring."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def main() -> None:
    pack = Path(sys.argv[1])
    if not pack.is_dir():
        sys.exit(f"there is no pack in {pack}: make gpu-pack makes one")
    site = pack / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    wheels = map(str, sorted((pack / "wheels").glob("*.whl")))
    subprocess.run([*command, "--no-cache-dir", "--upgrade", "--target", str(site), *wheels], check=True)
    shutil.copytree(pack / "pb", ROOT / "tgis" / "pb", dirs_exist_ok=True)
    shutil.copytree(pack / "triton", Path(sys.prefix) / "triton", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
