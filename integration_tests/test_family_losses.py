"""Families whose caches differ from Llama's in the whole service: streams equal those that run alone, even if
the cache is too small for all of them, and if a shard is killed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration_tests.support.live_streams import check_survival, metrics, read
from integration_tests.support.served_models import FLAGS, VOCAB_SIZE
from integration_tests.support.service import Client, serve
from tests.support.shard.checkpoints import write_model
from tests.support.shard.family_cases.all import CASES
from tests.support.tokenizers.trained import write_byte_level

pytestmark = pytest.mark.slow  # the tests of the scheduler and of the families cover the same more quickly

# Enough room for the prompts of all streams, but not for their outputs; prompts are chunked.
TIGHT = ["--block-size", "8", "--kv-cache-tokens", "520", "--max-step-tokens", "24"]
NAMES = (
    "deepseek_v2_groups_yarn",
    "deepseek_v3",
    "falcon_h1",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granite_swa",
    "granitemoe_swa",
    "granitemoehybrid",
    "llama4_text",
    "mamba2",
    "ministral3",
    "mistral3",
    "mistral4",
    "nemotron_h_experts",
    "olmo3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "smollm3",
)
# Two for each kind of cache: windows, latents, states of Mamba and of gated DeltaNet.
ON_TWO_RANKS = (
    "gemma4_text",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe_lite",
    "granitemoehybrid",
    "nemotron_h_experts",
    "qwen3_5_text",
    "qwen3_next",
)
TEXTS = [
    "the quick",
    "a little girl had no bread, and once upon a time there was a fox",
    "7",
    "who",
    "fox jumps",
    "dog",
    "the quick brown fox jumps over the lazy dog",
    "the quick brown fox jumps over the lazy girl",
]
SERVICES = [*((name, 1) for name in NAMES), *((name, 2) for name in ON_TWO_RANKS)]


@pytest.fixture(
    scope="module", params=SERVICES, ids=[f"{name}, {num_ranks} ranks" for name, num_ranks in SERVICES]
)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    name, num_ranks = request.param
    directory = tmp_path_factory.mktemp("losses") / name
    write(directory, name)
    yield from serve(directory, *FLAGS, *TIGHT, "--num-shard", str(num_ranks))


def write(directory: Path, name: str) -> None:
    """Write a family's checkpoint with the vocabulary of a tokenizer."""
    config = CASES[name]()
    text_config = config.get_text_config()
    text_config.vocab_size = VOCAB_SIZE
    text_config.bos_token_id, text_config.eos_token_id = 0, 1
    if hasattr(text_config, "vocab_size_per_layer_input"):
        text_config.vocab_size_per_layer_input = VOCAB_SIZE
    write_model(directory, config)
    write_byte_level(directory)


def test_preempted_streams_equal_those_that_run_alone(client: Client) -> None:
    alone = [read(client, text) for text in TEXTS]
    assert metrics(client)["tgi_preemptions"] == 0
    with ThreadPoolExecutor(len(TEXTS)) as threads:
        together = list(threads.map(lambda text: read(client, text), TEXTS))
    assert metrics(client)["tgi_preemptions"] > 0
    assert together == alone
    assert len({result.text for result in alone}) == len(TEXTS)


def test_streams_survive_a_killed_shard(client: Client) -> None:
    """The last shard is the only one, or one of two."""
    check_survival(client, TEXTS, victim=-1)
    counts = metrics(client)
    if "slots for states of sequences" in client.service.output:
        created = counts['tgi_resources_created_total{kind="state"}']
        assert created == counts['tgi_resources_released_total{kind="state"}'] > len(TEXTS)
        assert counts["tgi_state_snapshots"] > 0
        assert counts["tgi_state_usage_ratio"] == 0
