"""Cases of all families, grouped by family."""

from collections.abc import Callable
from functools import cache, partial

from transformers import LlamaConfig, PretrainedConfig

from tests.support.shard.checkpoints import CASES as LLAMAS
from tests.support.shard.checkpoints import SMALL
from tests.support.shard.family_cases import encoder_decoders, gpts, hybrids, llamas
from tgis.shard.models.registry import FAMILIES, make_spec
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.startup.engine_choice import find_gpu_obstacle

CASES: dict[str, Callable[[], PretrainedConfig]] = {
    **{f"llama_{name}": partial(LlamaConfig, **SMALL | changes) for name, changes in LLAMAS.items()},
    **llamas.CASES,
    **hybrids.CASES,
    **gpts.CASES,
    **encoder_decoders.CASES,
}


# For families whose kinds of layers another family has too: that family, both by their modules. `make test`
# runs all their cases, but only on one rank, in float32, without soft prompts and without adapters; `make
# test-all` runs all combinations.
COVERED_BY = {
    "ministral3": "mistral",
    "mistral4": "deepseek_v3",
    "deepseek_v2": "deepseek_v3",
    "glm4_moe_lite": "deepseek_v3",
    "smollm3": "llama",
    "granite_swa": "gpt_oss",
    "olmo3": "olmo2",
    "qwen2_moe": "qwen3_next",
    "granitemoeshared": "granitemoe",
    "granitemoe_swa": "gpt_oss",
    "glm4_moe": "deepseek_v3",
    "qwen3_5": "qwen3_next",
    "qwen3_5_moe": "qwen3_next",
    "mamba2": "nemotron_h",
}


@cache
def family_of(case: str) -> str:
    return FAMILIES[CASES[case]().model_type].__name__.rpartition(".")[2]


@cache
def has_experts(case: str) -> bool:
    spec = make_spec(CASES[case]().to_dict())
    return isinstance(spec, DecoderSpec) and spec.experts is not None


@cache
def runs_on_gpus(case: str) -> bool:
    return find_gpu_obstacle(make_spec(CASES[case]().to_dict())) is None
