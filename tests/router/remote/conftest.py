import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The service's event loop. Asyncio's own forgets a connection that it accepts just as its server closes,
    without ending it."""
    return {"uvloop": uvloop.new_event_loop}
