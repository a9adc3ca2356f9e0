"""Reads the options set by LMI's names in serving.properties and in the environment."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tgis.config.checks import SettingsError
from tgis.router.api.lmi.options.java_properties import PropertiesError, parse_properties
from tgis.router.api.lmi.options.names import ARGUMENTS, MODEL_DIR, PREFIX, SIMPLE_NAMES

FILE, VARIABLES, SIMPLE = range(3)  # ranks: a lower rank overrides a higher one
FILE_NAME = "serving.properties"
MODEL_FOLDER = Path("/opt/ml/model")
ENVIRONMENT = "environment"
_SPECIAL = {"OPTION_ENTRYPOINT": "option.entryPoint", "OPTION_ENGINE": "engine"}
_PREFIXES = {"OPTION_": PREFIX, "SERVING_": "", "ARGS_": ARGUMENTS}
# Kubernetes sets such variables for a Service whose name begins with one of the prefixes.
_OF_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")


@dataclass(frozen=True)
class GivenProperty:
    key: str
    text: str
    name: str
    """Key or variable as the operator wrote it."""
    origin: str
    rank: int

    @property
    def where(self) -> str:
        return self.name if self.origin == ENVIRONMENT else f"{self.name} in {self.origin}"


def find_file(given: str | None) -> Path | None:
    """Return the path of the properties file, or None if the file does not exist."""
    if given:
        return Path(given)
    path = Path(os.environ.get(_variable_of(MODEL_DIR)) or MODEL_FOLDER) / FILE_NAME
    return path if path.is_file() else None


def read_sources(path: Path | None) -> list[GivenProperty]:
    """Return the properties that the operator set, by descending priority. Raises SettingsError and
    PropertiesError."""
    return [*(_of_file(path) if path else ()), *_of_variables(), *_of_simple_names()]


def _of_file(path: Path) -> Iterator[GivenProperty]:
    try:
        entries = parse_properties(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path}: the properties file cannot be read: {error.strerror}") from error
    except PropertiesError as error:
        raise PropertiesError(f"{path}: {error}") from error
    for one in entries:
        if text := one.value.strip():
            yield GivenProperty(one.key, text, one.key, f"{path.name}:{one.line}", FILE)


def _of_variables() -> Iterator[GivenProperty]:
    for name, value in sorted(os.environ.items()):
        prefix = next((one for one in _PREFIXES if name.startswith(one)), None)
        if prefix and (text := value.strip()) and not _OF_KUBERNETES.search(name):
            rest = name.removeprefix(prefix)
            key = _SPECIAL.get(name) or _PREFIXES[prefix] + (rest.lower() if rest.isupper() else rest)
            yield GivenProperty(key, text, name, ENVIRONMENT, VARIABLES)


def _of_simple_names() -> Iterator[GivenProperty]:
    for name, key in SIMPLE_NAMES.items():
        if text := os.environ.get(name, "").strip():
            yield GivenProperty(key, text, name, ENVIRONMENT, SIMPLE)


def _variable_of(key: str) -> str:
    return "OPTION_" + key.removeprefix(PREFIX).upper()
