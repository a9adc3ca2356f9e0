"""Creates the directory from which a GGUF model is served, in a child process because its libraries are
large."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from tgis.config.processes import LauncherConfig
from tgis.hub.gguf_files import POLL_S, UNFINISHED_TOKENIZER, find_gguf
from tgis.launcher.child_configs import line_fields
from tgis.launcher.plan import LaunchError, hub_cache
from tgis.process.child import Child
from tgis.process.output_lines import LineForm
from tgis.process.run_directory import RunDirectory

logger = logging.getLogger(__name__)


class GgufModel:
    """Private directory of a GGUF model, which links to the model's files."""

    def __init__(self, config: LauncherConfig, files: Sequence[Path]) -> None:
        """Create the empty directory. Raises RunDirectoryError."""
        self._files = files
        self._directory = RunDirectory()
        self.path = self._directory.path / "model"
        self.path.mkdir()
        command = ["read-gguf", *(str(file.absolute()) for file in files), str(self.path)]
        self._child = Child("gguf", command, LineForm("GGUF: ", line_fields(config, "gguf")))

    async def begin(self) -> None:
        """Start to read the files, and return when only the tokenizer is missing. Raises LaunchError."""
        logger.info("reading %s", self._files[0])
        await self._child.start()
        ended = asyncio.create_task(self.finish())
        try:
            while not (ended.done() or (self.path / UNFINISHED_TOKENIZER).exists()):
                await asyncio.wait((ended,), timeout=POLL_S)
            if ended.done():
                ended.result()
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    async def finish(self) -> None:
        """Wait until the tokenizer is written. Raises LaunchError."""
        end = await self._child.wait()
        if not end.is_success:
            raise LaunchError(end.text)

    async def close(self) -> None:
        """Kill the process and remove the directory."""
        await self._child.kill()
        self._directory.remove()


def find_gguf_model(config: LauncherConfig) -> GgufModel | None:
    """Return the model if it has the GGUF format, else None.

    Raises ModelNotFoundError, CacheConflictError and RunDirectoryError."""
    files = find_gguf(config.model_name, config.revision, hub_cache(config))
    return None if files is None else GgufModel(config, files)
