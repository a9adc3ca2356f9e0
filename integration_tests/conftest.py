"""Provides a launched service on a tiny random checkpoint, and transformers' responses for the same
checkpoint."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, LlamaForCausalLM

from integration_tests.support import oracle
from integration_tests.support.adapter_requests import SLOW_DISK, Tuned
from integration_tests.support.greedy_answers import (
    MAX_SEQUENCE_LENGTH,
    VOCAB_SIZE,
    Model,
    Oracle,
    answer_prompts,
)
from integration_tests.support.served_models import FLAGS, write_fallback, write_t5, write_t5_tokenizer
from integration_tests.support.service import serve
from integration_tests.support.tuned_files import LINEAR, write_adapter
from tests.support.real_models import GEMMA, SMOLLM2
from tests.support.shard.checkpoints import write_llama
from tests.support.suites import skip_tests_of_one_worker
from tests.support.tokenizers.trained import write_byte_level


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "ROUTER_WORKERS" in os.environ:
        skip_tests_of_one_worker(items)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two of them would wait for each other, and services for both."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_llama(directory, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_SEQUENCE_LENGTH, eos_token_id=1)
    tokenizer = write_byte_level(directory, 400)
    oracle = Oracle(LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32), tokenizer)
    return Model(directory, answer_prompts(oracle))


@pytest.fixture(scope="session")
def encoder_decoder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("models") / "t5"
    tokenizer = write_t5_tokenizer(directory)
    write_t5(directory, {})
    oracle = Oracle(AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32), tokenizer)
    return Model(directory, answer_prompts(oracle))


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    """Launch a service with a small cache, so that inputs are chunked and preempted. The adapter `kept` is
    named on the command line."""
    served = write_fallback(tmp_path_factory.mktemp("models") / "tuned")
    kept = tmp_path_factory.mktemp("adapters") / "kept"
    write_adapter(kept, served.directory, 9, LINEAR)
    served.store.adapters["kept"] = kept
    tight = ["--block-size", "8", "--kv-cache-tokens", "640", "--max-step-tokens", "64"]
    contents = ["--prompt-cache-size-mb", "1", "--adapter-cache-size-mb", "1"]
    contents += ["--lora-adapters", f"kept={kept}"]
    flags = [*FLAGS, *served.flags, *tight, *contents, "--num-shard", "2", "--failpoints", SLOW_DISK]
    for client in serve(served.directory, *flags):
        yield Tuned(client, served, oracle.Oracle(served))


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA], ids=["smollm2", "gemma"])
def gguf_file(request: pytest.FixtureRequest) -> Path:
    """Return the GGUF file of a real model."""
    path: Path = request.param
    if not path.is_file():
        pytest.skip(f"{path} is missing; `make test` and `make gemma` fetch the models")
    return path
