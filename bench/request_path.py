"""Lists the router's files that run for one gRPC text, with the number of their lines that run.

Run it as `python -m bench.request_path`. The request goes through gRPC, an engine and a fake shard in this
process, after an equal request, so that what runs only once is not counted. Files of metrics and scheduling
are listed but not counted. Log lines of requests are off."""

import asyncio
import gc
import logging
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.router.served_grpc import open_grpc
from tgis.pb import generation_pb2 as pb

ROOT = Path(__file__).resolve().parent.parent
ROUTER = f"{ROOT}/tgis/router/"
NOT_COUNTED = ("metrics/", "scheduling/", "engine/step_metrics.py")


class LineRecorder:
    """Recorder of the lines and functions of the router that run while it is active, in this thread and those
    that start after `install`."""

    def __init__(self) -> None:
        self.is_active = False
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.functions: dict[str, set[str]] = defaultdict(set)

    @contextmanager
    def install(self) -> Iterator[None]:
        before = sys.gettrace()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            yield
        finally:
            threading.settrace(None)
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        """Trace a function that is called, or a coroutine that is resumed. The line at which it is resumed
        does not count, because a coroutine that waits for an inner one runs no other."""
        path, resumed_at = frame.f_code.co_filename, frame.f_lineno
        if not self.is_active or not path.startswith(ROUTER):
            return None
        name = path.removeprefix(ROUTER)

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if self.is_active and event == "line" and frame.f_lineno != resumed_at:
                self.lines[name].add(frame.f_lineno)
                self.functions[name].add(frame.f_code.co_qualname)
            return trace

        return trace


async def record() -> LineRecorder:
    recorder = LineRecorder()
    request = pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text="The quick brown fox")],
        params=pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=5)),
    )
    with tempfile.TemporaryDirectory() as directory, recorder.install():
        async with open_grpc(Path(directory)) as served:
            await served.stub.Generate(request)
            gc.collect()  # finalizers of earlier objects would be counted
            logging.disable(logging.INFO)
            recorder.is_active = True
            await served.stub.Generate(request)
            recorder.is_active = False
            logging.disable(logging.NOTSET)
    return recorder


def is_counted(name: str) -> bool:
    return not name.startswith(NOT_COUNTED)


def main() -> None:
    recorder = asyncio.run(record())
    for name in sorted(recorder.lines, key=lambda name: (not is_counted(name), name)):
        mark = " " if is_counted(name) else "-"
        functions = ", ".join(sorted(recorder.functions[name]))
        print(f"{mark} {len(recorder.lines[name]):4} {name:36} {functions}")
    counted = [lines for name, lines in recorder.lines.items() if is_counted(name)]
    print(f"{len(counted)} files, {sum(map(len, counted))} lines")


if __name__ == "__main__":
    main()
