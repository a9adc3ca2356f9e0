"""A pickle that does harm when a careless reader loads it."""

import os
from pathlib import Path


class Payload:
    """Makes a file when it is unpickled by a careless reader."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._target),)
