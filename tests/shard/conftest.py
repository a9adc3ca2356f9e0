"""Share fixtures among the shard's tests: checkpoints on disk, and further ranks."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.shard.checkpoints import CASES, write_llama
from tests.support.shard.ranks import Ranks
from tgis.shard.startup.platforms.interface import configure_torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Use one thread, since several are slow on a busy machine; tests of threading set their own number."""
    configure_torch(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the checkpoint directory of a case."""
    root = tmp_path_factory.mktemp("checkpoints")

    def find(case: str) -> Path:
        directory = root / case
        if not directory.exists():
            write_llama(directory, **CASES[case])
        return directory

    return find


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Start groups of two and four ranks for the whole session."""
    with Ranks() as group:
        yield group
