"""LMI's API over a real socket."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from tests.support.http_exchange import HttpReply
from tests.support.router.served_http import ServedHttp
from tests.support.router.served_inputs import call, open_inputs


def open_lmi(
    directory: Path, formatter: str | None = None, **more: Any
) -> AbstractAsyncContextManager[ServedHttp]:
    return open_inputs(directory, "lmi", lmi_output_formatter=formatter, **more)


async def ask(
    served: ServedHttp, body: Any, path: str = "/invocations", method: str = "POST", **headers: str
) -> HttpReply:
    return await call(served, path, body, method, **headers)
