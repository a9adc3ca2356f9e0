"""Times work on a GPU."""

from collections.abc import Callable

from tgis.shard.runner.device.stream import DeviceStream

NUM_REPLAYS = 5


def time_captured(stream: DeviceStream, work: Callable[[], None]) -> float:
    """Return the seconds of work that is replayed as a graph, without the time in which the host launches
    its kernels. Raises RuntimeError if it cannot be captured."""
    graph = stream.capture(work)
    graph.replay()
    timer = stream.start_timer()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    timer.stop()
    stream.record().wait()
    return timer.read_ns() / NUM_REPLAYS / 1e9
