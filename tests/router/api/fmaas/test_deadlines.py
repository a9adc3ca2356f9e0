"""Checks that the service receives the deadline of a call from the protocol."""

import time
from pathlib import Path

import pytest

from tests.support.router.messages import batch, single
from tests.support.router.served_grpc import open_grpc
from tgis.router.api import service


@pytest.mark.parametrize("timeout_s", [None, 60])
async def test_the_deadline_reaches_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: int | None
) -> None:
    deadlines = list[float | None]()
    monkeypatch.setattr(service, "_call_at", lambda deadline, callback: deadlines.append(deadline))
    async with open_grpc(tmp_path) as served:
        began = time.monotonic()
        await served.stub.Generate(batch("a", "b"), timeout=timeout_s)
        assert [response async for response in served.stub.GenerateStream(single("a"), timeout=timeout_s)]
        ended = time.monotonic()
    assert len(deadlines) == 3
    for deadline in deadlines:
        if timeout_s is None:
            assert deadline is None
        else:
            assert deadline is not None
            assert began < deadline - timeout_s < ended + 1, "gRPC rounds the time that is left"
