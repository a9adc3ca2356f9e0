"""Quantized models on an emulated device, captured: weights stay codes, and answers equal the CPU's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cuda.capturing_device import CapturingDevice
from tests.support.cuda.late_platform import late_platform
from tests.support.shard.checkpoints import write_llama, write_model
from tests.support.shard.driver import Request, Router, configure, prompts
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.gguf_writer import write_gguf
from tests.support.shard.packed_kinds import PACKED_KINDS
from tests.support.shard.quantized_files import KINDS, write_quantized
from tests.support.shard.stepping import ALONE, read_config
from tgis.convert.gguf.model_directory import write_model_directory
from tgis.pb import shard_pb2 as pb
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.gguf_memory import measure_gguf
from tgis.shard.collectives import CPU
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.kernels.cuda.products.codes import CudaCodeProduct
from tgis.shard.kernels.cuda.products.floats import CudaProduct
from tgis.shard.models import registry
from tgis.shard.models.sensitive_weights import measure_sensitive_share
from tgis.shard.quant.schemes.weight_only import WEIGHT_ONLY
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup import engine_choice
from tgis.shard.startup.load import load
from tgis.shard.startup.quantize import check as quantize_check

ALL_KINDS = KINDS | PACKED_KINDS
SIZES = {"dtype": "float32", "kv_cache_tokens": 2048, "block_size": 4, "max_step_tokens": 64}
TOLERANCE = 2e-4  # of log-probabilities in float32


@pytest.mark.slow  # the int8 scheme is tested quickly
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_checkpoints(kind: str, tmp_path: Path) -> None:
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    write_model(plain, CASES["llama_grouped_queries"]())
    write_quantized(plain, quantized, ALL_KINDS[kind])
    compare(quantized)


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_schemes(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, CASES["llama_grouped_queries"]())
    compare(tmp_path, quantize=name)


@pytest.mark.slow
def test_gguf_files(tmp_path: Path) -> None:
    """Matrices of several types, some of which are joined."""
    plain, made = tmp_path / "plain", tmp_path / "made"
    plain.mkdir()
    made.mkdir()
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 99}
    write_llama(plain, **sizes, **heads, tie_word_embeddings=True)
    write_gguf(plain, plain / "model.gguf", "llama")
    write_model_directory([plain / "model.gguf"], made)
    measured = measure_gguf(made)
    assert measured is not None
    assert measured.elements.keys() == {"Q4_0", "Q5_1", "Q8_0"}
    compare(made)


def test_int8_rounds_weights_only(tmp_path: Path) -> None:
    """On CPUs, it also rounds activations."""
    write_model(tmp_path, CASES["llama_grouped_queries"]())
    config = configure(tmp_path, **SIZES, cuda_graphs="8", quantize="int8")
    runner = load(config, on=late_platform(CapturingDevice()))
    assert runner.info.weight_dtype == "int8"
    assert 0 < find_difference(runner, load(config)) < 0.05
    answer(runner, wants_details=False)


@pytest.mark.slow
def test_experts_of_codes_have_no_graphs(tmp_path: Path) -> None:
    write_model(tmp_path, CASES["mixtral"]())
    compare(tmp_path, pb.STEP_PATH_MODEL, quantize="eetq")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_activations_of_16_bits(dtype: str, tmp_path: Path) -> None:
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    write_model(plain, CASES["llama_grouped_queries"]())
    write_quantized(plain, quantized, ALL_KINDS["gptq"])
    wide, narrow = (
        load(configure(quantized, **{**SIZES, "dtype": each}), on=late_platform(CapturingDevice()))
        for each in ("float32", dtype)
    )
    assert 0 < find_difference(wide, narrow) < 0.02


def test_matrices_stay_codes(tmp_path: Path) -> None:
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    write_model(plain, CASES["llama_grouped_queries"]())
    write_quantized(plain, quantized, ALL_KINDS["gptq"])
    kernels = CudaKernels(CPU, Implementations.plain())
    model: Any = registry.load(quantized, read_config(quantized), ALONE, torch.bfloat16, kernels)
    block = model._blocks[0]
    assert isinstance(block._feed_forward._down._multiply, CudaCodeProduct)
    assert isinstance(model._head._multiply, CudaProduct)


def test_replaced_kernels_keep_no_codes_on_gpus() -> None:
    layout = CodeLayout(torch.int8, 8, 128)
    for device, expected in ((torch.device("cuda", 0), False), (CPU, True)):
        kernels = CudaKernels(device, Implementations.plain())
        assert (kernels.find_code_packer(layout) is not None) == expected
    kernels = CudaKernels(torch.device("cuda", 0), Implementations.choose(frozenset({"norm"})))
    assert kernels.find_code_packer(layout) is not None


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_memory_is_checked_with_the_codes_sizes(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, CASES["llama_grouped_queries"]())
    settings, on = read_config(tmp_path), late_platform(CapturingDevice())
    choice = engine_choice.choose(tmp_path, settings, None, 1, trust_remote_code=False)

    def count(quantize: str | None) -> int:
        config = configure(tmp_path, quantize=quantize)
        return quantize_check.count_bytes(config, settings, choice, on, torch.bfloat16)

    elements, table = count(None) // 2, choice.table_elements
    if name == "int8":
        assert count(name) == int(elements * (1 + 4 / 128)) + 2 * table
        return
    share = measure_sensitive_share(choice.spec)  # 8 bits, groups of 64 like all others
    per_weight = (1 - share) * (0.5 + 4 / 64) + share * (1 + 4 / 64)
    assert count(name) == int((elements - table) * per_weight + table * (2 + 1 + 4 / 64))


def find_difference(*runners: ModelRunner) -> float:
    """Return the mean difference of the log-probabilities of first tokens."""
    answers = [answer(runner, wants_details=True) for runner in runners]
    pairs = zip(*answers, strict=True)
    return sum(abs(one.logprobs[0] - other.logprobs[0]) for one, other in pairs) / len(answers[0])


def compare(directory: Path, path: int = pb.STEP_PATH_GRAPH, **options: Any) -> None:
    """Compare a captured runner, whose steps have a path, with the CPU's."""
    device = CapturingDevice()
    config = configure(directory, **SIZES, cuda_graphs="3,8", **options)
    runner = load(config, on=late_platform(device))
    expected = answer(load(config), wants_details=True)
    bare = answer(runner, wants_details=False, path=path)
    detailed = answer(runner, wants_details=True)
    for mine, other, theirs in zip(bare, detailed, expected, strict=True):
        assert mine.generated == other.generated == theirs.generated
        assert other.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)


def answer(runner: ModelRunner, wants_details: bool, path: int = pb.STEP_PATH_GRAPH) -> list[Request]:
    details = {"logprobs": True} if wants_details else {}
    requests = [Request(prompt, 8, details=details) for prompt in prompts(3, 6)]
    runner.reset()
    router = Router(runner, seed=1, depth=1 if wants_details else 3)
    router.run(list(requests))
    assert wants_details or path in {response.path for response in router.responses}
    return requests
