"""Makes the directory that a GGUF file is served from, in a child, because the libraries for it are large."""

import logging
from collections.abc import Sequence
from pathlib import Path

from tgis.config.processes import LauncherConfig
from tgis.hub.gguf_files import find_gguf
from tgis.launcher.child_configs import line_fields
from tgis.launcher.plan import LaunchError, hub_cache
from tgis.process.child import Child
from tgis.process.run_directory import RunDirectory

logger = logging.getLogger(__name__)


class GgufModel:
    """Private directory of a model in GGUF form, which links to its files."""

    def __init__(self, config: LauncherConfig, files: Sequence[Path]) -> None:
        """Make the directory, empty. Raises RunDirectoryError."""
        self._config, self._files = config, files
        self._directory = RunDirectory()
        self.path = self._directory.path / "model"
        self.path.mkdir()

    async def read(self) -> None:
        """Read the configuration and the tokenizer from the files. Raises LaunchError."""
        logger.info("reading %s", self._files[0])
        command = ["read-gguf", *(str(file.absolute()) for file in self._files), str(self.path)]
        child = Child("gguf", command, "GGUF: ", fields=line_fields(self._config, "gguf"))
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
    """Return the model if it is in GGUF form. Raises ModelNotFoundError, CacheConflictError and
    RunDirectoryError."""
    files = find_gguf(config.model_name, config.revision, hub_cache(config))
    return None if files is None else GgufModel(config, files)
