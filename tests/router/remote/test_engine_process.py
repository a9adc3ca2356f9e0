"""Check the engine process itself, with a socket of the test as its worker."""

import asyncio
from pathlib import Path

from tests.support.processes import Service
from tests.support.router.fake_shard import FakeShard, ShardServer
from tests.support.router.router_process import router_command
from tgis.net.framing import FrameReader, frame_body
from tgis.router.engine.handle import ClaimId, LimitedWork
from tgis.router.metrics.metric_file import read_records
from tgis.router.metrics.metric_types import Counter
from tgis.router.metrics.storage import SummedStorage
from tgis.router.remote import messages as wire


async def acquire(path: Path) -> None:
    """Connect as a worker, and wait until the engine has admitted a request, which never starts."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    for message in wire.Hello(0, []), wire.Acquire(ClaimId(1), LimitedWork.GENERATION, 1):
        writer.write(frame_body(wire.encode(message)))
    frames, received = FrameReader(), list[object]()
    async with asyncio.timeout(20):
        while not any(isinstance(message, wire.Acquired) for message in received):
            received += map(wire.decode_engine_message, frames.push(await reader.read(1 << 16)))
    writer.close()


async def test_it_leaves_all_its_counts(tmp_path: Path) -> None:
    """Check counts that the process had not published while it served."""
    shard = ShardServer(FakeShard(0, 1), str(tmp_path / "shard"))
    flags = ["--shard-uds-path", str(tmp_path / "shard"), "--engine-path", str(tmp_path / "engine")]
    command = router_command(tmp_path, *flags, "--metrics-dir", str(tmp_path / "metrics"))
    service = Service(["engine", *command[1:]])
    try:
        service.wait_for_line("the engine serves")
        await acquire(tmp_path / "engine")
        assert service.end() == 0
    finally:
        service.process.kill()
        shard.stop()
    counts = SummedStorage(read_records(tmp_path / "metrics"))
    for name in ("tgi_resources_created", "tgi_resources_released"):
        assert Counter(name, "", ("kind",), counts).values()["permit",] == 1
