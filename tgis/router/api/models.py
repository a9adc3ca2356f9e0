"""Resolves the names that requests give as `model`: the served model's, and those of LoRA adapters."""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from tgis.router.engine.handle import GivenNames
from tgis.router.errors import StartupError

_NAME = re.compile("[A-Za-z0-9_.:/@+-]{1,256}")


class ModelChoice(NamedTuple):
    name: str
    """Name that answers repeat."""
    adapter_id: str | None = None


def is_model_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def served_names(option: str | None, model: str) -> tuple[str, ...]:
    """Return the names in `--served-model-name`, by default the model directory's. Raises StartupError."""
    given = option if option and option.strip(", ") else Path(model).name or "model"
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    for name in names:
        if not is_model_name(name):
            raise StartupError(
                "served_model_name: a name has 1 to 256 letters, digits and characters of _.:/@+-"
            )
    return names


class Models:
    """Models that requests can name."""

    def __init__(
        self,
        names: tuple[str, ...],
        adapter_ids: Callable[[], tuple[str, ...]] = tuple,
        given: GivenNames | None = None,
        placeholders: Collection[str] = (),
    ) -> None:
        """Take the served names; the first is the default. `adapter_ids` returns the ids of adapters that
        stay loaded. `given` holds the names that clients gave to adapters, or is None if they may not.
        Clients send `placeholders` if their user sets no model; an adapter with such a name has
        precedence."""
        self.names = names
        self.given = given
        self._placeholders = placeholders
        self._adapter_ids = adapter_ids

    @property
    def preloaded_ids(self) -> tuple[str, ...]:
        return self._adapter_ids()

    async def given_names(self) -> Mapping[str, str]:
        """Return the ids of the adapters that clients named, by name."""
        return {} if self.given is None else await self.given.adapter_names()

    async def adapters(self) -> Mapping[str, str]:
        """Return the ids of all adapters that requests can name, by name."""
        return {name: name for name in self.preloaded_ids} | dict(await self.given_names())

    async def choose(self, name: str | None) -> ModelChoice:
        """Return the model that a request names: the served model, or the adapter with this name or id."""
        if name in self.names:
            return ModelChoice(name)
        if not name:
            return ModelChoice(self.names[0])
        given = await self.given_names()
        is_adapter = name in given or name in self.preloaded_ids
        if name in self._placeholders and not is_adapter:
            return ModelChoice(self.names[0])
        return ModelChoice(name, given.get(name, name))
