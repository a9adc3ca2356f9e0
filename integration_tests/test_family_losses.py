"""Families whose caches differ from Llama's in the whole service: streams equal those that run alone, even if
the cache is too small for all of them, and if a shard is killed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration_tests.support.live_streams import Result, check_survival, metrics, read
from integration_tests.support.served_models import FLAGS, VOCAB_SIZE
from integration_tests.support.service import Client, serve
from tests.support.shard.checkpoints import write_model
from tests.support.shard.family_cases.all import CASES, family_of
from tests.support.tokenizers.trained import write_byte_level
from tgis.shard.models.registry import make_spec
from tgis.shard.models.spec import DecoderSpec

pytestmark = pytest.mark.slow  # the tests of the scheduler and of the families cover the same more quickly

# Enough room for the prompts of all streams, but only for two outputs at a time; prompts are chunked.
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


def test_every_family_with_a_cache_of_its_own_is_served() -> None:
    specs = {case: make_spec(make_config().to_dict()) for case, make_config in CASES.items()}
    others = {
        family_of(case)
        for case, spec in specs.items()
        if isinstance(spec, DecoderSpec)
        and (spec.latent or spec.mamba or spec.delta_net or spec.layer_shapes)
    }
    assert others <= {family_of(name) for name in NAMES}


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


def test_preempted_streams_equal_those_with_room(client: Client) -> None:
    undisturbed = read_all(client, at_once=2)
    assert metrics(client)["tgi_preemptions"] == 0
    disturbed = read_all(client, at_once=len(TEXTS))
    assert metrics(client)["tgi_preemptions"] > 0
    assert disturbed == undisturbed
    assert len({result.text for result in undisturbed}) == len(TEXTS)


def read_all(client: Client, at_once: int) -> list[Result]:
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda text: read(client, text), TEXTS))


def test_streams_survive_a_killed_shard(client: Client) -> None:
    """The last shard is the only one, or one of two."""
    check_survival(client, TEXTS, victim=-1)
    counts = metrics(client)
    if "slots for states of sequences" in client.service.output:
        created = counts['tgi_resources_created_total{kind="state"}']
        assert created == counts['tgi_resources_released_total{kind="state"}'] > len(TEXTS)
        assert counts["tgi_state_snapshots"] > 0
        assert counts["tgi_state_usage_ratio"] == 0
