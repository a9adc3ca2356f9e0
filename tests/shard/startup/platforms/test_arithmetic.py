"""Check `--cpu-arithmetic bfloat16` for whole models and engines, against float32 and in other batches.

Other tests check the log lines and the refusals."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from tests.support.shard import stepping
from tests.support.shard.checkpoints import SMALL, write_llama, write_model
from tests.support.shard.driver import Request, Router, check_company, configure
from tests.support.shard.gguf_writer import write_gguf
from tests.support.shard.stepping import Stepper
from tgis.convert.gguf.model_directory import write_model_directory
from tgis.shard.kernels.cpu.amx import permission
from tgis.shard.kernels.cpu.bf16 import kernels, self_check
from tgis.shard.kernels.cpu.bf16.attention import ROUNDED, BfloatAttention
from tgis.shard.kernels.cpu.bf16.ops import BfloatKernels
from tgis.shard.kernels.cpu.bf16.product import pack_rounded
from tgis.shard.kernels.cpu.codes import kernels as code_kernels
from tgis.shard.kernels.cpu.codes.layout import Kind
from tgis.shard.kernels.cpu.codes.tile_kernels import CodeTileKernels
from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.models import registry
from tgis.shard.models.decoder import Decoder
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.startup import engine_choice
from tgis.shard.startup.load import load
from tgis.shard.startup.platforms import cpu
from tgis.shard.startup.platforms.cpu import ON_CPU, has_fast_bfloat16, on_cpu
from tgis.shard.startup.platforms.host_runner import HostRunners
from tgis.shard.startup.platforms.requirements import CpuProducts
from tgis.shard.startup.prepare import prepare
from tgis.shard.startup.quantize import check as quantize_check
from tgis.shard.startup.shard_info import describe_shard

TOLERANCE = 0.01  # mean difference of log-probabilities for models this small and random
SAID = "matrix products and attention multiply in bfloat16 and accumulate in float32"


@pytest.fixture(scope="module")
def model_path(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("grouped_queries")


def load_rounded(directory: Path) -> Decoder:
    settings, on = stepping.read_config(directory), on_cpu(CpuProducts("bfloat16"))
    model = registry.load(directory, settings, stepping.ALONE, torch.float32, on.kernels)
    assert isinstance(model, Decoder)
    return model


def test_steps_are_near_float32_and_the_same_in_any_company(model_path: Path) -> None:
    ids, other = list(range(5, 20)), [30, 31]
    exact, whole = (Stepper(each) for each in (stepping.load(model_path), load_rounded(model_path)))
    expected, actual = (each.step({0: (ids, 0)})[0] for each in (exact, whole))
    difference = (actual.log_softmax(-1) - expected.log_softmax(-1)).abs()
    assert 0 < difference.mean() < TOLERANCE
    chunks = Stepper(load_rounded(model_path))
    first = chunks.step({0: (ids[:9], 0)})[0]
    last = chunks.step({0: (ids, 9), 1: (other, 0)})[0]
    assert torch.equal(torch.cat((first, last)), actual)


def test_the_gate_of_experts_is_not_rounded(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    write_model(tmp_path, transformers.MixtralConfig(**SMALL, **sizes))
    feed = load_rounded(tmp_path)._blocks[0]._feed_forward
    plain = stepping.load(tmp_path)._blocks[0]._feed_forward
    x, inner = torch.randn(3, SMALL["hidden_size"]), torch.randn(3, SMALL["intermediate_size"])
    assert torch.equal(feed._score._multiply(x), plain._score._multiply(x))
    assert not torch.equal(feed._experts[3]._down._multiply(inner), plain._experts[3]._down._multiply(inner))


def test_the_gate_of_experts_is_not_rounded_if_it_is_stored_as_codes(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "sliding_window": None, "intermediate_size": 64}
    write_model(tmp_path, transformers.MixtralConfig(**{**SMALL, **sizes}))
    write_gguf(tmp_path, tmp_path / "model.gguf", "llama", plain=Type.Q4_0)
    made = tmp_path / "made"
    made.mkdir()
    write_model_directory([tmp_path / "model.gguf"], made)
    rounding = code_kernels.MULTIPLY[Kind(8, rounds_activations=False)]  # another one than that of 4 bits
    kind = Kind(4, rounds_activations=False)
    of_codes = BfloatKernels(pack_rounded, tile_kernels={kind: CodeTileKernels(rounding, rounding)})
    settings = stepping.read_config(made)
    model = registry.load(made, settings, stepping.ALONE, torch.float32, of_codes)
    feed = model._blocks[0]._feed_forward
    assert feed._experts[3]._down._multiply.tiles.multiply is rounding
    assert feed._score._multiply.tiles is None


def test_an_engine_answers_the_same_alone_and_in_company(
    model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), caplog.at_level(logging.DEBUG, cpu.__name__):
        runner = load(configure(model_path, cpu_arithmetic="bfloat16", cpu_threads=2, block_size=16))
    assert SAID in caplog.messages
    assert "the float32 weights of matrix products are rounded to bfloat16" in caplog.messages
    assert (runner.info.weight_dtype, runner.info.cache_dtype) == ("bfloat16", "bfloat16")
    check_company(runner)


def test_a_machine_without_the_instruction_answers_the_same(model_path: Path) -> None:
    emulated = replace(
        ON_CPU,
        kernels=BfloatKernels(pack_rounded),
        make_runner=HostRunners(BfloatAttention(ROUNDED), captures_steps=True),
        product_dtype=torch.bfloat16,
        cache_dtype=torch.bfloat16,
    )
    answers = []
    for on in (emulated, None):
        request = Request(list(range(7, 20)), 8, details={"logprobs": True})
        Router(load(configure(model_path, cpu_arithmetic="bfloat16", block_size=16), on=on)).run([request])
        answers.append((request.generated, request.logprobs))
    assert answers[0] == answers[1]


def test_replaced_kernels_are_reported(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "is_exact", lambda pack: False)
    monkeypatch.setattr(kernels, "MULTIPLY_PAIRS", object())
    plan = prepare(configure(model_path, cpu_arithmetic="bfloat16", cpu_amx="off"))
    assert list(describe_shard(plan).replaced_kernels) == ["multiply_pairs"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_reported_where_there_is_any(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_llama(tmp_path, dtype=dtype)
    with caplog.at_level(logging.INFO), caplog.at_level(logging.DEBUG, cpu.__name__):
        info = describe_shard(prepare(configure(tmp_path, cpu_arithmetic="bfloat16")))
        assert prepare(configure(tmp_path)).on is ON_CPU
    assert caplog.messages.count(SAID) == 1
    assert info.weight_dtype == "bfloat16"
    text = "the float16 weights of matrix products are rounded to bfloat16"
    assert (text in caplog.messages) == (dtype == torch.float16)


def test_codes_stay_codes(model_path: Path) -> None:
    plan = prepare(configure(model_path, cpu_arithmetic="bfloat16", quantize="int8"))
    assert (plan.weight_type, plan.cache_type.name) == ("int8", "bfloat16")


def test_a_cache_of_8_bits_stays_one(model_path: Path) -> None:
    config = configure(model_path, cpu_arithmetic="bfloat16", kv_cache_dtype="fp8_e4m3")
    request = Request(list(range(7, 20)), 8, details={"logprobs": True})
    runner = load(config)
    Router(runner).run([request])
    assert runner.info.cache_dtype == "fp8_e4m3"
    assert len(request.generated) == 8


def test_memory_is_that_of_bfloat16(model_path: Path) -> None:
    settings = stepping.read_config(model_path)
    choice = engine_choice.choose(model_path, settings, None, 1, trust_remote_code=False)
    config, on = configure(model_path), on_cpu(CpuProducts("bfloat16"))

    def count_bytes(dtype: torch.dtype) -> int:
        return quantize_check.count_bytes(config, settings, choice, on, dtype)

    whole = quantize_check.count_bytes(config, settings, choice, ON_CPU, torch.float16)
    assert count_bytes(torch.float16) == whole
    assert count_bytes(torch.float32) == whole + 2 * registry.count_embedding_elements(choice.spec)


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_default_is_bfloat16_for_16_bits_where_the_processor_is_faster(
    dtype: torch.dtype,
    is_fast: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_llama(tmp_path, dtype=dtype)
    monkeypatch.setattr(pairs, "are_fast", lambda: is_fast)
    with caplog.at_level(logging.INFO), caplog.at_level(logging.DEBUG, cpu.__name__):
        plan = prepare(configure(tmp_path, cpu_arithmetic="auto", cpu_amx="off"))
    rounds = is_fast and dtype != torch.float32
    assert plan.config.cpu_arithmetic == ("bfloat16" if rounds else "float32")
    assert (SAID in caplog.messages) == rounds
    assert (
        any(line.startswith("--cpu-arithmetic auto selects bfloat16") for line in caplog.messages) == rounds
    )


@pytest.mark.parametrize("is_fast", [True, False])
def test_the_default_of_quantized_weights_is_bfloat16_where_the_processor_is_faster(
    is_fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path, dtype=torch.float32)
    monkeypatch.setattr(pairs, "are_fast", lambda: is_fast)
    options = {"cpu_arithmetic": "auto", "cpu_amx": "off", "no_quantize_check": True}
    plan = prepare(configure(tmp_path, quantize="int4", **options))
    assert plan.config.cpu_arithmetic == ("bfloat16" if is_fast else "float32")


def test_an_engine_with_codes_answers_the_same_alone_and_in_company(model_path: Path) -> None:
    """Codes use AMX tiles if the processor has them."""
    runner = load(configure(model_path, cpu_arithmetic="bfloat16", quantize="int4", cpu_threads=2))
    check_company(runner)


def test_the_type_of_the_option_decides_too(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "are_fast", lambda: True)
    plan = prepare(configure(model_path, cpu_arithmetic="auto", dtype="float16"))
    assert plan.config.cpu_arithmetic == "bfloat16"


def test_the_default_with_another_engine_is_float32(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "are_fast", lambda: True)
    other = {"deployment_framework": "hf_transformers", "dtype": "bfloat16"}
    plan = prepare(configure(model_path, cpu_arithmetic="auto", **other))
    assert plan.config.cpu_arithmetic == "float32"


@pytest.mark.parametrize("has_amx", [True, False])
def test_amx_is_fast_if_it_may_be_used(has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "are_fast", lambda: False)
    monkeypatch.setattr(permission, "may_use_tiles", lambda: has_amx)
    assert has_fast_bfloat16(may_use_amx=True) == has_amx
    assert not has_fast_bfloat16(may_use_amx=False)


@pytest.mark.parametrize(
    ("processor", "is_fast"),
    [("znver4", True), ("znver5", True), ("emeraldrapids", False), ("znver3", False)],
)
def test_products_of_pairs_are_fast_on_processors_of_amd(
    processor: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llvm, "processor_name", lambda: processor)
    monkeypatch.setattr(llvm, "has_feature", lambda name: name == "avx512bf16" and processor != "znver3")
    assert pairs.are_fast() == is_fast


def test_other_engines_refuse(model_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        load(configure(model_path, cpu_arithmetic="bfloat16", deployment_framework="hf_transformers"))
    assert str(refused.value) == "--cpu-arithmetic bfloat16 needs tgis_native, not hf_transformers"
