"""Manages the files that the processes of a run share until it ends: sockets, tokenizer, compiled kernels."""

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from tgis.hub.cache import is_utf8
from tgis.hub.gguf_files import TOKENIZER
from tgis.launcher.plan import LaunchError, Plan
from tgis.logs import Scalar
from tgis.net.framing import steps_path
from tgis.process.child import Child
from tgis.process.output_lines import LineForm
from tgis.process.run_directory import HTTP_URL, RunDirectory

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH = 107  # bytes, Linux's limit


class RunFiles:
    def __init__(self, plan: Plan, uds_path: str | None, line_fields: Mapping[str, Scalar] | None) -> None:
        """Create the run directory. The shards' sockets are there, or at `uds_path`. Raises
        RunDirectoryError."""
        self._plan = plan
        self._line_fields = line_fields
        self._directory = RunDirectory()
        self.path = self._directory.path
        self.uds_path = uds_path or str(self.path / "shard")

    @property
    def tokenizer_path(self) -> Path:
        return self._plan.tokenizer_path if self._plan.has_fast_tokenizer else self.path / "tokenizer"

    @property
    def engine_path(self) -> Path:
        """Socket of the engine process, if there are several router workers."""
        return self.path / "engine"

    @property
    def metrics_dir(self) -> Path:
        """Directory of the metric files of all router processes, if there are several."""
        return self.path / "metrics"

    @property
    def http_url_path(self) -> Path:
        """File to which the router writes the URL of its HTTP port."""
        return self.path / HTTP_URL

    def write(self, name: str, text: str) -> Path:
        """Write a file that only this user can read, and return its path."""
        path = self.path / name
        path.write_text(text + "\n", errors="surrogateescape")
        return path

    async def prepare(self) -> None:
        """Check the paths of the sockets, and convert the tokenizer if needed. Raises LaunchError."""
        self._check_sockets()
        if not self._plan.has_fast_tokenizer:
            await self._convert_tokenizer()

    def remove(self) -> None:
        """Remove the files of this run, including sockets outside the run directory."""
        for path in self._sockets:
            for socket in (path, Path(steps_path(str(path)))):
                with contextlib.suppress(OSError):
                    socket.unlink(missing_ok=True)
        shutil.rmtree(f"{self.uds_path}-contents", ignore_errors=True)
        self._directory.remove()

    @property
    def _sockets(self) -> list[Path]:
        return [Path(f"{self.uds_path}-{rank}") for rank in range(self._plan.num_shards)]

    def _check_sockets(self) -> None:
        """Check the sockets' paths before the shards spend minutes on loading. Raises LaunchError."""
        _check_socket(steps_path(str(self._sockets[-1])), "--shard-uds-path or ")
        if self._plan.router_workers > 1:
            _check_socket(str(self.engine_path))

    async def _convert_tokenizer(self) -> None:
        """Convert the tokenizer in a child process, because its libraries are large. Raises LaunchError."""
        logger.info("the model has no %s: converting its tokenizer", TOKENIZER)
        self.tokenizer_path.mkdir()
        arguments = [str(self._plan.tokenizer_path.absolute()), "--output-path", str(self.tokenizer_path)]
        command = ["convert-to-fast-tokenizer", *arguments]
        converter = Child("tokenizer", command, LineForm("Tokenizer: ", self._line_fields))
        try:
            await converter.start()
            end = await converter.wait()
        finally:
            await converter.kill()
        if not (self.tokenizer_path / TOKENIZER).is_file():
            raise LaunchError(end.text)


def _check_socket(path: str, option: str = "") -> None:
    if not is_utf8(path):
        raise LaunchError(f"{path}: a socket's path must be UTF-8: set {option}another TMPDIR")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise LaunchError(f"{path} is too long for a socket's path: set {option}a shorter TMPDIR")
