"""Creates the directory from which a GGUF model is served, in a child process because its libraries are
large."""

import logging
from collections.abc import Sequence
from pathlib import Path

from tgis.config.processes import LauncherConfig
from tgis.hub.gguf_files import find_gguf
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
        self._config = config
        self._files = files
        self._directory = RunDirectory()
        self.path = self._directory.path / "model"
        self.path.mkdir()

    async def read(self) -> None:
        """Write the configuration and tokenizer of the files to the directory. Raises LaunchError."""
        logger.info("reading %s", self._files[0])
        command = ["read-gguf", *(str(file.absolute()) for file in self._files), str(self.path)]
        child = Child("gguf", command, LineForm("GGUF: ", line_fields(self._config, "gguf")))
        try:
            await child.start()
            end = await child.wait()
        finally:
            await child.kill()
        if not end.is_success:
            raise LaunchError(end.text)

    def remove(self) -> None:
        self._directory.remove()


def find_gguf_model(config: LauncherConfig) -> GgufModel | None:
    """Return the model if it has the GGUF format, else None.

    Raises ModelNotFoundError, CacheConflictError and RunDirectoryError."""
    files = find_gguf(config.model_name, config.revision, hub_cache(config))
    return None if files is None else GgufModel(config, files)
