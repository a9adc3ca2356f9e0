"""Serves the engine API beside fmaas's, in a router of its own process."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from tests.support.router.router_process import Setup, start_router, stop_router


class ServedEngine(NamedTuple):
    setup: Setup
    stub: VllmEngineStub

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.setup.tokenizer.encode(text).ids
        return ids


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    flags = ("--grpc-api", "fmaas,vllm-engine", "--served-model-name", "m")
    setup = start_router(tmp_path_factory.mktemp("router"), 1, *flags)
    yield ServedEngine(setup, VllmEngineStub(setup.channel))  # type: ignore[no-untyped-call]
    assert stop_router(setup) == 0, setup.service.output
