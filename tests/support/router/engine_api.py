"""Router that serves vLLM's engine API beside fmaas's, and a client of both."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from tests.support.router.router_process import Setup, start_router, stop_router

FLAGS = ("--grpc-api", "fmaas,vllm-engine", "--served-model-name", "m")
DEFAULTS = ("--override-generation-config", '{"top_k": 7}')


class EngineApi(NamedTuple):
    setup: Setup
    stub: VllmEngineStub

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.setup.tokenizer.encode(text).ids
        return ids


@contextmanager
def serve_engine_api(directory: Path, *flags: str) -> Iterator[EngineApi]:
    setup = start_router(directory, 1, *FLAGS, *DEFAULTS, *flags)
    yield EngineApi(setup, VllmEngineStub(setup.channel))  # type: ignore[no-untyped-call]
    assert stop_router(setup) == 0, setup.service.output
