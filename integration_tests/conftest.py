"""Provides a launched service on a tiny random checkpoint, and transformers' responses for the same
checkpoint. Fixtures import torch and transformers, because the process that distributes the tests also reads
this file, but runs no test."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.real_models import GEMMA, SMOLLM2
from tests.support.suites import skip_tests_of_one_worker

if TYPE_CHECKING:
    from integration_tests.support.adapter_requests import Tuned
    from integration_tests.support.greedy_answers import Model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "ROUTER_WORKERS" in os.environ:
        skip_tests_of_one_worker(items)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two of them would wait for each other, and services for both."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> "Model":
    from integration_tests.support import shared_models

    return shared_models.make_decoder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def encoder_decoder(tmp_path_factory: pytest.TempPathFactory) -> "Model":
    from integration_tests.support import shared_models

    return shared_models.make_encoder_decoder(tmp_path_factory.mktemp("models") / "t5")


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Tuned]":
    from integration_tests.support import shared_models

    models, adapters = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("adapters")
    yield from shared_models.serve_tuned(models / "tuned", adapters / "kept")


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA], ids=["smollm2", "gemma"])
def gguf_file(request: pytest.FixtureRequest) -> Path:
    """Return the GGUF file of a real model."""
    path: Path = request.param
    if not path.is_file():
        pytest.skip(f"{path} is missing; `make test` and `make gemma` fetch the models")
    return path
