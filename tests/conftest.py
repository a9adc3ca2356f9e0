"""Fixtures that several folders of tests need."""

from collections.abc import AsyncIterator

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool

from tests.support.steady_clock import run_steady_clock
from tests.support.wire_shapes import SHAPES, WIRE, buf


@pytest.fixture(scope="module", params=SHAPES)
def frozen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FileDescriptor:
    """A frozen shape as buf compiles it, in a pool of its own."""
    directory = tmp_path_factory.mktemp("image")
    image = directory / "image.binpb"
    arguments = ("build", str(WIRE / request.param), "--as-file-descriptor-set", "-o", str(image))
    result = buf(*arguments, home=directory)
    assert result.returncode == 0, result.stderr
    files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    [file] = [file for file in files if file.name == "generation.proto"]
    file.name = f"{request.param}.proto"
    pool = DescriptorPool()
    pool.Add(file)
    return pool.FindFileByName(file.name)


@pytest.fixture
async def steady_clock() -> AsyncIterator[None]:
    """A clock that does not count time during which the test's process stood still."""
    async with run_steady_clock():
        yield
