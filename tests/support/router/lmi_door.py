"""LMI's API over a real socket."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from tests.support.http_exchange import HttpReply
from tests.support.router.http_door import HttpDoor
from tests.support.router.inputs_door import call, inputs_door


def lmi_door(
    directory: Path, formatter: str | None = None, **more: Any
) -> AbstractAsyncContextManager[HttpDoor]:
    return inputs_door(directory, "lmi", lmi_output_formatter=formatter, **more)


async def ask(
    door: HttpDoor, body: Any, path: str = "/invocations", method: str = "POST", **headers: str
) -> HttpReply:
    return await call(door, path, body, method, **headers)
