"""Serves `/v1/models`, the list of the models that requests can name."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tgis.router.api.models import Models
from tgis.router.api.openai.answers.dates import unix_time
from tgis.router.api.openai.errors import missing_model

OWNER = "tgis"


class ModelCard(msgspec.Struct):
    id: str
    created: int
    object: str = "model"
    owned_by: str = OWNER
    root: str = ""
    """Name of the model, or the id of an adapter."""
    parent: str | None = None
    """Name of the model that an adapter changes."""
    max_model_len: int | None = None
    default_sampling: dict[str, float] | UnsetType = UNSET
    """Values of the sampling fields that a request does not set."""


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class ModelRoutes:
    def __init__(
        self,
        models: Models,
        max_model_len: int | None = None,
        created: int | None = None,
        default_sampling: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._models = models
        self._max_model_len = max_model_len
        self._default_sampling = default_sampling
        self._created = unix_time() if created is None else created

    async def _cards(self) -> list[ModelCard]:
        first = self._models.names[0]
        own = [self._card(name, root=first) for name in self._models.names]
        adapters = await self._models.adapters()
        return own + [self._card(name, root=root, parent=first) for name, root in adapters.items()]

    async def list_models(self, request: Request) -> Response:
        return Response(msgspec.json.encode(ModelList(await self._cards())), media_type="application/json")

    async def retrieve(self, request: Request) -> Response:
        name = request.path_params["name"]
        for card in await self._cards():
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
            default_sampling=dict(self._default_sampling) or UNSET,
        )
