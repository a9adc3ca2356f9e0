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
