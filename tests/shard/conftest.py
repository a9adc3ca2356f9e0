"""What the shard's tests share: checkpoints on disk, and ranks beside the first."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.shard.checkpoints import CASES, write_llama
from tests.support.shard.ranks import Ranks
from tgis.shard.startup.platform import configure_torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Several threads are slow on a busy machine; the tests that are about them set their number."""
    configure_torch(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a case -> the directory of its checkpoint."""
    root = tmp_path_factory.mktemp("checkpoints")

    def find(case: str) -> Path:
        directory = root / case
        if not directory.exists():
            write_llama(directory, **CASES[case])
        return directory

    return find


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Groups of two and four ranks, for as long as the session lasts."""
    with Ranks() as group:
        yield group
