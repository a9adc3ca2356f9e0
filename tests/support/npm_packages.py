"""npm packages for tests, as pinned by a lock file, stored below .cache."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache"


class InstallError(Exception):
    """Error when npm fails. The text is npm's output."""


def has_npm() -> bool:
    return bool(shutil.which("node") and shutil.which("npm"))


def install(sources: Path, name: str) -> Path:
    """Return the directory that contains node_modules, created once per lock file. Raises InstallError."""
    digest = hashlib.sha256((sources / "package-lock.json").read_bytes()).hexdigest()
    installed = CACHE / f"{name}-{digest[:16]}"
    if not installed.is_dir():
        CACHE.mkdir(exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=CACHE))
        for file in ("package.json", "package-lock.json", ".npmrc"):
            shutil.copy(sources / file, fresh)
        env = os.environ | {"npm_config_cache": str(CACHE / "npm"), "npm_config_update_notifier": "false"}
        command = ["npm", "ci", "--prefer-offline"]
        result = subprocess.run(command, cwd=fresh, env=env, text=True, capture_output=True, check=False)
        if result.returncode:
            shutil.rmtree(fresh)
            raise InstallError(f"npm ci: {result.stderr}")
        fresh.rename(installed)
    return installed
