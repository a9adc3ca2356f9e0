"""CannedService whose calls end as a script says."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from tests.support.canned_service import CannedService
from tgis.pb import generation_pb2 as pb


@dataclass(frozen=True)
class Failed:
    """Failure of one call."""

    code: grpc.StatusCode
    trailers: tuple[tuple[str, str | bytes], ...] = ()
    num_messages: int = 0
    """Number of messages of a stream before it."""


class ScriptedService(CannedService):
    """Service whose first calls fail; the calls after them succeed."""

    def __init__(self, failures: Iterable[Failed], delay: float = 0.0) -> None:
        super().__init__(delay)
        self._failures = deque(failures)

    def Generate(self, request: Any, context: Any) -> pb.BatchedGenerationResponse:
        answer = super().Generate(request, context)
        if self._failures:
            self._fail(context, self._failures.popleft())
        return answer

    def GenerateStream(self, request: Any, context: Any) -> Iterator[pb.GenerationResponse]:
        failed = self._failures.popleft() if self._failures else None
        for index, message in enumerate(super().GenerateStream(request, context)):
            if failed is not None and index == failed.num_messages:
                self._fail(context, failed)
            yield message

    def _fail(self, context: Any, failed: Failed) -> None:
        context.set_trailing_metadata(failed.trailers)
        context.abort(failed.code, "as scripted")
