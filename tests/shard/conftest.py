"""Share fixtures among the shard's tests: checkpoints on disk, and further ranks."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.shard.checkpoints import CASES, write_llama
from tests.support.shard.rank_forker import RankForker
from tests.support.shard.ranks import Ranks, serve
from tgis.shard.startup.platforms.interface import configure_torch

FORKER = pytest.StashKey[RankForker]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Create the forker of ranks after the imports and before tests start threads."""
    if any("rank_forker" in item.fixturenames for item in session.items if isinstance(item, pytest.Function)):
        forker = session.config.stash[FORKER] = RankForker(serve)
        session.config.add_cleanup(forker.stop)


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
def rank_forker(pytestconfig: pytest.Config) -> RankForker:
    return pytestconfig.stash[FORKER]


@pytest.fixture(scope="session")
def ranks(rank_forker: RankForker) -> Iterator[Ranks]:
    """Start groups of two and four ranks for the whole session."""
    with Ranks(rank_forker) as group:
        yield group
