"""Serves routes that add and remove names of LoRA adapters at run time, as vLLM's do."""

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tgis.config.adapter_ids import is_adapter_id
from tgis.router.adapters.names import NAME, check_new_name
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.models import is_model_name
from tgis.router.api.openai.errors import ApiError, as_api_error
from tgis.router.api.openai.fields.sampling_fields import read_fields
from tgis.router.engine.handle import GivenNames
from tgis.router.errors import NotFoundError, RequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")

ELSEWHERE = (
    "lora_path is neither an adapter's id nor a folder below --adapter-cache or --prefix-store-path, where "
    "adapters are found"
)
OFF = "adapters are not named at run time; to allow it, start the service with --runtime-adapters"


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_path: str
    """Id of the adapter, or its path below one of the adapter directories."""
    load_inplace: bool | None = None
    """True to replace the adapter that has the name now."""


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None
    """Ignored: adapters have no numbers in this service."""


_load_decoder = msgspec.json.Decoder(LoadAdapterBody)
_unload_decoder = msgspec.json.Decoder(UnloadAdapterBody)


class AdapterRoutes:
    def __init__(self, parts: ServiceParts) -> None:
        self._parts = parts
        self._models = parts.models

    async def load(self, request: Request) -> Response:
        body = await self._read(_load_decoder, request)
        name = body.lora_name
        adapter_id = await self._adapter_id(body.lora_path)
        self._check_name(name)
        with _translated(NAME):
            check_new_name(await self._models.given_names(), name, bool(body.load_inplace))
        with _translated("lora_path"):
            await self._parts.service.load_adapter(adapter_id, request.state.call.id)
        with _translated(NAME):  # another call may have taken the name
            await self._given.give_name(name, adapter_id, bool(body.load_inplace))
        logger.info("the LoRA adapter %r is the model %r now", adapter_id, name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        name = (await self._read(_unload_decoder, request)).lora_name
        if name in self._models.preloaded_ids:
            raise ApiError(400, f"The LoRA adapter '{name[:256]}' was given at the start.", NAME)
        with _translated(NAME):
            await self._given.take_name(name)
        logger.info("the model %r is gone", name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    @property
    def _given(self) -> GivenNames:
        assert self._models.given is not None, "the option allows names"
        return self._models.given

    async def _read(self, decoder: msgspec.json.Decoder[T], request: Request) -> T:
        if self._parts.adapter_roots is None:
            raise ApiError(404, OFF, code="not_found")
        return await read_fields(decoder, request)

    def _check_name(self, name: str) -> None:
        """Raise ApiError if no adapter can ever get this name."""
        if not is_model_name(name):
            raise ApiError(
                400, "lora_name must have 1 to 256 letters, digits and characters of _.:/@+-", NAME
            )
        if name in self._models.names or name in self._models.preloaded_ids:
            raise ApiError(400, f"'{name}' is a model that was given at the start.", NAME)

    async def _adapter_id(self, path: str) -> str:
        """Return the id of the adapter at a path. Raises ApiError."""
        adapter_id, others = _locate(path, self._parts.adapter_roots or ())
        if adapter_id is None:
            raise ApiError(400, ELSEWHERE, "lora_path")
        is_hidden = path.startswith("/") and adapter_id in self._models.preloaded_ids
        if is_hidden or await asyncio.to_thread(lambda: any(map(os.path.exists, others))):
            text = f"the id '{adapter_id}' names another adapter, which is found before this one"
            raise ApiError(400, text, "lora_path")
        return adapter_id


@contextmanager
def _translated(field: str) -> Iterator[None]:
    """Raise refusals as this API's errors for a field."""
    try:
        yield
    except RequestError as error:
        status = 404 if isinstance(error, NotFoundError) else 400
        raise as_api_error(error, field, status) from None


def _locate(path: str, roots: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the id of the adapter at a path, or None if it has none. Also return the paths with the same id
    that are searched before it."""
    normalized = os.path.normpath(path)
    if not os.path.isabs(normalized):
        return normalized if is_adapter_id(normalized) else None, []
    for number, root in enumerate(roots):
        adapter_id = normalized.removeprefix(os.path.join(root, ""))
        if adapter_id != normalized and is_adapter_id(adapter_id):
            return adapter_id, [os.path.join(other, adapter_id) for other in roots[:number]]
    return None, []
