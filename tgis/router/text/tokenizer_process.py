"""Tokenizes long texts in a separate process. Short texts, which the router's threads tokenize, never wait
for long ones, and long texts do not block the router's interpreter."""

import os
import pickle
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TypeVar

from tgis.process.worker_pool import Codec, PoolBusyError, WorkerPool
from tgis.router.errors import OVERLOADED, OverloadedError, RequestError

MAX_QUEUED_BYTES = 64 << 20
WORKER = "tgis.router.text.tokenizer_child"
PICKLE = Codec(pickle.dumps, pickle.loads)  # calls of functions, whose results are large

T = TypeVar("T")


class TokenizerProcess:
    """Client of the tokenizer process. The process answers one call at a time and serves connections in turn.
    It starts with the first call and is restarted if it dies."""

    def __init__(self, directory: Path) -> None:
        arguments = str(directory), str(os.getpid())
        self._pool = WorkerPool(
            WORKER, 1, arguments=arguments, codec=PICKLE, max_queued_bytes=MAX_QUEUED_BYTES
        )

    async def run(
        self, function: Callable[..., T], *arguments: object, connection: Hashable, num_bytes: int
    ) -> T:
        """Call the module-level `function` with the tokenizer and `arguments`, and return its result.
        `num_bytes` is the size of its texts. Raises RequestError, OverloadedError, and RuntimeError if the
        process does not run."""
        try:
            reply = await self._pool.ask((function, arguments), connection, num_bytes)
        except PoolBusyError:
            raise OverloadedError(OVERLOADED) from None
        if isinstance(reply.value, RequestError):
            try:
                raise reply.value
            finally:
                del reply  # its traceback refers to this frame, and the cycle would keep the texts alive
        if reply.status > 0:
            raise RuntimeError(f"the tokenizer process failed: exit status {reply.status}")
        if reply.is_dead:
            raise RequestError("tokenizer error the text could not be encoded", "text")
        answer: T = reply.value
        return answer

    def close(self) -> None:
        """Stop the process. No call may follow."""
        self._pool.close()
