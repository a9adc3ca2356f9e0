import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Use the service's event loop.

    Asyncio's own loop leaves a connection open that it accepts just as its server closes."""
    return {"uvloop": uvloop.new_event_loop}
