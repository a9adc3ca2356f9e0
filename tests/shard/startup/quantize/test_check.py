"""Check `--quantize int8` for whole models and engines, against float32 and in other batches, and the
refusals."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.shard import stepping
from tests.support.shard.checkpoints import SMALL, write_model
from tests.support.shard.driver import check_company, configure
from tests.support.shard.ranks import Ranks
from tests.support.shard.stepping import Stepper
from tgis.config.processes import ShardConfig
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu.gemm.product import PackedProduct
from tgis.shard.kernels.cpu.int8.product import Int8Product
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.models import registry
from tgis.shard.models.decoder import Decoder
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.quant.registry import find_scheme
from tgis.shard.quant.rounding import Rounding
from tgis.shard.startup import engine_choice
from tgis.shard.startup.load import load
from tgis.shard.startup.platforms.cpu import ON_CPU
from tgis.shard.startup.platforms.interface import DeviceError
from tgis.shard.startup.quantize import check as quantize_check

TOLERANCE = 0.05  # mean difference of log-probabilities for models this small and random


@pytest.fixture(scope="module")
def model_path(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("grouped_queries")


def quantized(directory: Path, group: ProcessGroup = stepping.ALONE) -> Decoder:
    config, rounding = stepping.read_config(directory), Rounding(find_scheme("int8"))
    model = registry.load(directory, config, group, torch.float32, rounding=rounding)
    assert isinstance(model, Decoder)
    return model


def compute_steps(group: ProcessGroup, directory: Path) -> Tensor:
    """Return the log-probabilities of two sequences, in chunks and together."""
    stepper = Stepper(quantized(directory, group), group)
    first, second = list(range(5, 20)), [30, 31]
    steps = [{0: (first[:9], 0)}, {0: (first, 9), 1: (second, 0)}]
    return torch.cat([torch.cat(list(stepper.step(work).values())) for work in steps]).log_softmax(-1)


@pytest.mark.parametrize(
    "case", ["grouped_queries", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tied", "biases"))]
)
def test_both_numbers_of_ranks_are_near_float32(
    case: str, ranks: Ranks, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(case)
    stepper = Stepper(stepping.load(directory))
    first, second = stepper.step({0: (list(range(5, 20)), 0), 1: ([30, 31], 0)}).values()
    expected = torch.cat((first, second)).log_softmax(-1)
    one, (two, same) = compute_steps(stepping.ALONE, directory), ranks.run(2, compute_steps, directory)
    assert torch.equal(two, same)
    for actual in (one, two):
        assert not torch.equal(actual, expected)
        difference = (actual - expected).abs()
        assert difference.mean() < TOLERANCE
        assert difference.max() < 5 * TOLERANCE


def test_experts_are_quantized_and_their_gate_is_not(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    write_model(tmp_path, transformers.MixtralConfig(**SMALL, **sizes))
    model, ids = quantized(tmp_path), list(range(5, 20))
    feed = model._blocks[0]._feed_forward
    assert isinstance(feed._score._multiply, PackedProduct)
    assert isinstance(feed._experts[3]._down._multiply, Int8Product)
    assert isinstance(model._head._multiply, Int8Product)
    actual, expected = (Stepper(each).step({0: (ids, 0)})[0] for each in (model, stepping.load(tmp_path)))
    difference = (actual.log_softmax(-1) - expected.log_softmax(-1)).abs()
    assert 0 < difference.mean() < TOLERANCE


@pytest.mark.parametrize(
    ("name", "activations"),
    [("int8", None), ("bitsandbytes", None), ("bitsandbytes-nf4", None), ("int4", None), ("int4", "int8")],
)
def test_an_engine_answers_the_same_alone_and_in_company(
    name: str, activations: str | None, model_path: Path
) -> None:
    runner = load(configure(model_path, quantize=name, activations=activations, cpu_threads=2))
    assert (runner.info.weight_dtype, runner.info.cache_dtype) == (name, "float32")
    check_company(runner)


def test_memory_is_that_of_bytes(model_path: Path) -> None:
    settings = stepping.read_config(model_path)
    choice = engine_choice.choose(model_path, settings, None, 1, trust_remote_code=False)
    config = configure(model_path, quantize="int8")

    def count_bytes(config: ShardConfig) -> int:
        return quantize_check.count_bytes(config, settings, choice, ON_CPU, torch.float16)

    elements = engine_choice.registry.count_embedding_elements(choice.spec)
    assert elements == 99 * 32
    whole = count_bytes(configure(model_path)) // 2
    assert count_bytes(config) == int(whole * 33 / 32) + 2 * elements


def test_other_engines_and_devices_refuse(model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(UnsupportedModelError) as refused:
        load(configure(model_path, quantize="int8", deployment_framework="hf_transformers"))
    assert str(refused.value) == "--quantize int8 needs tgis_native, not hf_transformers"
    elsewhere = replace(ON_CPU, kernels=TorchKernels(torch.device("cpu")))
    with pytest.raises(
        DeviceError, match=r"^--quantize int8 needs products of codes, which this device lacks; "
    ):
        load(configure(model_path, quantize="int8"), on=elsewhere)
