"""Names that requests may give as `model`, and the routes that list them: those of the served model, and LoRA
adapters' ids."""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tgis.router.api.openai.dates import unix_time
from tgis.router.api.openai.errors import missing_model
from tgis.router.engine.handle import GivenNames
from tgis.router.errors import StartupError

OWNER = "tgis"
_NAME = re.compile("[A-Za-z0-9_.:/@+-]{1,256}")


class ModelCard(msgspec.Struct):
    id: str
    created: int
    object: str = "model"
    owned_by: str = OWNER
    root: str = ""
    """Name of the model; an adapter's own id."""
    parent: str | None = None
    """Name of the model that an adapter changes."""
    max_model_len: int | None = None
    default_sampling: dict[str, float] | UnsetType = UNSET
    """Values of sampling fields that a request does not set."""


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class ModelChoice(NamedTuple):
    name: str
    """Name that answers repeat."""
    adapter_id: str | None = None


def is_model_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def served_names(option: str | None, model: str) -> tuple[str, ...]:
    """Return the names of `--served-model-name`; without it the name of the model's directory. Raises
    StartupError."""
    given = option if option and option.strip(", ") else Path(model).name or "model"
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    for name in names:
        if not is_model_name(name):
            raise StartupError(
                "served_model_name: a name has 1 to 256 letters, digits and characters of _.:/@+-"
            )
    return names


class Models:
    """Served names, and the routes that tell them."""

    def __init__(
        self,
        names: tuple[str, ...],
        max_model_len: int | None = None,
        created: int | None = None,
        adapter_ids: Callable[[], tuple[str, ...]] = tuple,
        given: GivenNames | None = None,
        placeholders: Collection[str] = (),
        default_sampling: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Take the served names; answers to requests that name no model have the first. `adapter_ids` returns
        the ids of adapters that are kept loaded; `given` has further names, if clients may give any.
        `placeholders` are names that clients send where none is given; an adapter may have one of them.
        `default_sampling` has the values of fields that a request does not set."""
        self.names = names
        self._placeholders = placeholders
        self.default_sampling = default_sampling
        self._max_model_len, self._adapter_ids = max_model_len, adapter_ids
        self.given = given
        self._created = unix_time() if created is None else created

    @property
    def preloaded_ids(self) -> tuple[str, ...]:
        return self._adapter_ids()

    async def given_names(self) -> Mapping[str, str]:
        """Return the ids of the adapters that clients have given names, by name."""
        return {} if self.given is None else await self.given.adapter_names()

    async def choose(self, name: str | None) -> ModelChoice:
        """Return what a request's `model` names: the served model, else the adapter of that name or id."""
        if name in self.names:
            return ModelChoice(name)
        if not name:
            return ModelChoice(self.names[0])
        given = await self.given_names()
        is_adapter = name in given or name in self.preloaded_ids
        if name in self._placeholders and not is_adapter:
            return ModelChoice(self.names[0])
        return ModelChoice(name, given.get(name, name))

    async def cards(self) -> list[ModelCard]:
        first = self.names[0]
        own = [self._card(name, root=first) for name in self.names]
        adapters = {name: name for name in self.preloaded_ids} | dict(await self.given_names())
        return own + [self._card(name, root=root, parent=first) for name, root in adapters.items()]

    async def list(self, request: Request) -> Response:
        return Response(msgspec.json.encode(ModelList(await self.cards())), media_type="application/json")

    async def retrieve(self, request: Request) -> Response:
        name = request.path_params["name"]
        for card in await self.cards():
            if card.id == name:
                return Response(msgspec.json.encode(card), media_type="application/json")
        raise missing_model(name)

    def _card(self, name: str, root: str, parent: str | None = None) -> ModelCard:
        return ModelCard(
            name,
            self._created,
            root=root,
            parent=parent,
            max_model_len=self._max_model_len,
            default_sampling=dict(self.default_sampling) or UNSET,
        )
