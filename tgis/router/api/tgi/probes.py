"""Serves `/info` and the health probes."""

import re
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tgis import __version__
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.tgi.errors import UNHEALTHY, TgiErrorBody
from tgis.router.api.tgi.fields.refusals import find_max_input_tokens
from tgis.router.api.tgi.rules import TGI

_COMMIT = re.compile("[0-9a-f]{40}")


class Info(msgspec.Struct, kw_only=True):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None = None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str = "tgis-router"
    version: str = __version__
    sha: str | None = None
    docker_label: str | None = None


class Probes:
    def __init__(self, parts: ServiceParts) -> None:
        self._is_ready = parts.is_ready
        self._info = msgspec.json.encode(_describe(parts))

    async def info(self, request: Request) -> Response:
        return Response(self._info, media_type="application/json")

    async def health(self, request: Request) -> Response:
        if self._is_ready():
            return Response()
        return Response(
            msgspec.json.encode(TgiErrorBody("unhealthy", UNHEALTHY)), 503, media_type="application/json"
        )


def _describe(parts: ServiceParts) -> Info:
    limits = parts.limits
    folder = Path(parts.config.tokenizer_path).name
    return Info(
        model_id=parts.models.names[0],
        model_sha=folder if _COMMIT.fullmatch(folder) else None,  # the hub's cache names them by commit
        max_concurrent_requests=parts.config.max_concurrent_requests,
        max_best_of=limits.max_best_of_for(TGI),
        max_stop_sequences=limits.max_stop_sequences_for(TGI),
        max_input_tokens=find_max_input_tokens(limits),
        max_total_tokens=limits.max_sequence_length,
        validation_workers=parts.tokenizer.num_workers,
        max_client_batch_size=limits.max_inputs,
    )
