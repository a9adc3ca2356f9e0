"""Models of deployment/models/ against their published configurations, and the page that lists them."""

import re
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from integration_tests.deployment.manifests.launches import config_of, variables
from integration_tests.deployment.manifests.pods import Container, Pod, pods_of
from integration_tests.deployment.manifests.rendering import DIRECTORIES, ROOT, objects_of
from tests.support.shard.small_configs import read_published
from tgis.router.chat.formats.registry import choose_formats
from tgis.shard.models.registry import check_sharding, make_spec
from tgis.shard.startup.engine_choice import find_gpu_obstacle

pytestmark = pytest.mark.deploy

# Names in tests/data/published_configs, by directory of models/.
PUBLISHED = {
    "gemma-4-e2b": "gemma-4-E2B",
    "glm-4.7-flash": "GLM-4.7-Flash",
    "gpt-oss-20b": "gpt-oss-20b",
    "nemotron-3-nano-30b": "Nemotron-3-Nano-30B-A3B",
    "qwen3.5-2b": "Qwen3.5-2B",
}
ROW = re.compile(r"^\| `([^`]+)` \| (CPU|GPU) \| (\d+)Gi \| `(\w+)` \| `(\w+)` \|$", re.MULTILINE)
PAGE = (ROOT / "docs" / "deployment.md").read_text()
ROWS = ROW.findall(PAGE)


def server_of(directory: str) -> tuple[Pod, Container]:
    ((pod, container),) = ((pod, one) for pod in pods_of(objects_of(directory)) for one in pod.servers)
    return pod, container


def memory_gib(container: Container) -> int:
    amounts = {container["resources"][kind]["memory"] for kind in ("requests", "limits")}
    return max(int(amount.removesuffix("Gi")) for amount in amounts)


@cache
def count_parameters(name: str) -> int:
    """Return the number of parameters of the text part of transformers' model, which gets no memory."""
    config: Any = transformers.AutoConfig.for_model(**read_published(name)).get_text_config()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_engine_runs_the_model_on_the_device(name: str) -> None:
    pod, container = server_of(f"models/{name}")
    published, config = read_published(PUBLISHED[name]), config_of(pod, container)
    spec = make_spec(published)
    check_sharding(spec, config.num_shard or 1)
    text = published.get("text_config", published)
    assert config.max_sequence_length is not None
    assert config.max_sequence_length <= text["max_position_embeddings"]
    assert variables(container)["TGIS_DEVICE"] == "cpu" or find_gpu_obstacle(spec) is None


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_weights_fit_into_two_thirds_of_the_memory(name: str) -> None:
    """As docs/deployment.md promises for CPUs. Weights on GPUs are not in the pod's memory."""
    _, container = server_of(f"models/{name}")
    if variables(container)["TGIS_DEVICE"] == "cpu":
        num_bytes = 2 * count_parameters(PUBLISHED[name])
        assert 3 * num_bytes <= 2 * memory_gib(container) << 30


def test_the_page_counts_the_models_and_lists_the_published_ones() -> None:
    assert {*PUBLISHED} <= {name for name, *_ in ROWS}
    num_models = sum(one.startswith("models/") for one in DIRECTORIES)
    assert f"one overlay for each of {num_models} well-known models" in PAGE


@pytest.mark.parametrize(("name", "device", "memory", "tools", "reasoning"), ROWS)
def test_the_page_lists_what_the_manifests_have(
    name: str, device: str, memory: str, tools: str, reasoning: str
) -> None:
    _, container = server_of(f"models/{name}")
    assert variables(container)["TGIS_DEVICE"] == {"CPU": "cpu", "GPU": "cuda"}[device]
    limits = container["resources"]["limits"]
    assert limits["memory"] == f"{memory}Gi"
    formats = choose_formats(None, tools, reasoning)
    assert [one.name if one else "none" for one in formats] == [tools, reasoning]


def test_the_overlay_has_the_formats_of_the_page() -> None:
    _, container = server_of("overlays/tool-calls")
    given = variables(container)
    formats = {(name, tools, reasoning) for name, _, _, tools, reasoning in ROWS}
    served = ("qwen3.5-2b", given["TOOL_CALL_PARSER"], given["REASONING_PARSER"])
    assert served in formats
    assert given["HTTP_API"] == "openai"
