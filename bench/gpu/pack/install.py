"""Installs a pack on the machine: `python -m bench.gpu.pack.install DIRECTORY`.

Wheels go to DIRECTORY/site, which PYTHONPATH must include, generated code into the checkout, and compiled
kernels to the Python's cache. It imports nothing from the pack. Parts that cannot be installed are reported,
and the run shows the consequences."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GENERATED = {"pb": "tgis/pb", "client-pb": "client/tgis_client/pb"}
"""Folders of generated code, by their names in the pack."""


def main() -> None:
    pack = Path(sys.argv[1])
    if not pack.is_dir():
        sys.exit(f"there is no pack in {pack}: make gpu-pack makes one")
    if not install_wheels(pack, sorted((pack / "wheels").glob("*.whl"))):
        for wheel in sorted((pack / "wheels").glob("*.whl")):
            if not install_wheels(pack, [wheel]):
                print(f"{wheel.name} is not installed", file=sys.stderr)
    copies = {name: ROOT / path for name, path in GENERATED.items()} | {"triton": Path(sys.prefix) / "triton"}
    for name, target in copies.items():
        try:
            shutil.copytree(pack / name, target, dirs_exist_ok=True)
        except OSError as error:
            print(f"{name} is not installed: {error}", file=sys.stderr)


def install_wheels(pack: Path, wheels: list[Path]) -> bool:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    command += ["--no-cache-dir", "--upgrade", "--target", str(pack / "site"), *map(str, wheels)]
    return subprocess.run(command).returncode == 0


if __name__ == "__main__":
    main()
