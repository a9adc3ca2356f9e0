"""Check `--kv-cache-dtype` in whole engines against transformers with rounded keys and values, and in other
batches.

Other tests check the scales, the refusals and the log lines."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.cuda.capturing_device import CapturingDevice
from tests.support.cuda.late_device import LateDevice
from tests.support.cuda.late_platform import late_platform
from tests.support.shard.attention_scene import round_stored
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, check_company, configure
from tests.support.shard.family_cases.encoder_decoders import CASES
from tests.support.shard.ranks import ALONE
from tests.support.shard.stepping import read_config
from tgis.pb import shard_pb2 as pb
from tgis.shard.memory.kv_cache import bytes_per_block
from tgis.shard.memory.layered_cache import allocate_cache
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.startup.load import load
from tgis.shard.startup.memory.cache_type import find_float8
from tgis.shard.startup.memory.memory_plan import Demand, MemoryBudget, plan_blocks
from tgis.shard.startup.platforms.cuda import find_sizes
from tgis.shard.startup.platforms.interface import DeviceError
from tgis.shard.startup.prepare import prepare
from tgis.shard.startup.shard_info import describe_shard

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TYPES = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2, "int8": torch.int8}
FLOAT_TYPES = pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
ONNX_MODEL = Path(__file__).parents[3] / "data" / "onnx" / "llama"
SCALES = ((0.03, 0.02), (0.005, 0.3))  # keys and values of each layer
KIND = pytest.mark.parametrize("kind", TYPES)
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.fixture(scope="module")
def model_path(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("grouped_queries")


@pytest.fixture(scope="module")
def scaled(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of the same weights with scales, named as llm-compressor names them."""
    directory = tmp_path_factory.mktemp("scaled")
    shutil.copytree(model_path, directory, dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    for layer, (key, value) in enumerate(SCALES):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([key])
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([value])
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


class RoundingCache(transformers.DynamicCache):
    """A cache for transformers whose keys and values are rounded to 8 bits."""

    def __init__(self, dtype: torch.dtype, scales: tuple[tuple[float, float], ...]):
        super().__init__()
        self._dtype, self._scales = dtype, scales

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **more: Any) -> Any:
        key, value = self._scales[layer]
        if self._dtype == torch.int8:  # [batch, num_heads, num_tokens, head_dim], with scales of their own
            keys, values = (round_stored(x, torch.int8, x is keys).float() for x in (keys, values))
        else:
            keys, values = self._round(keys, key), self._round(values, value)
        return super().update(keys, values, layer, *args, **more)

    def _round(self, x: Tensor, scale: float) -> Tensor:
        if self._dtype == torch.float32:
            return x
        largest = torch.finfo(self._dtype).max
        return (x * torch.tensor(1 / scale)).clamp(-largest, largest).to(self._dtype).float() * scale


@torch.inference_mode()
def score(directory: Path, request: Request, dtype: torch.dtype, scales: Any) -> Tensor:
    """Return the log-probabilities that transformers gives the generated tokens."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([request.prompt + request.generated])
    logits = oracle(input_ids=ids, past_key_values=RoundingCache(dtype, scales), use_cache=True).logits
    scores = logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
    return scores.gather(1, torch.tensor(request.generated)[:, None])[:, 0]


def answer(directory: Path, **options: Any) -> Request:
    request = Request(list(range(5, 40)), 12, details={"logprobs": True})
    Router(load(configure(directory, **options))).run([request])
    return request


@KIND
@pytest.mark.parametrize("framework", ["tgis_native", "hf_transformers"])
def test_answers_are_those_of_rounded_keys_and_values(kind: str, framework: str, scaled: Path) -> None:
    request = answer(scaled, kv_cache_dtype=kind, deployment_framework=framework)
    expected = score(scaled, request, TYPES[kind], SCALES)
    torch.testing.assert_close(torch.tensor(request.logprobs), expected, rtol=0, atol=2e-4)
    for other in ({"fp8_e4m3": E5M2, "fp8_e5m2": E4M3, "int8": E4M3}[kind], torch.float32):
        assert (score(scaled, request, other, SCALES) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["fp8_e4m3", pytest.param("fp8_e5m2", marks=pytest.mark.slow)])
def test_graphs_answer_with_rounded_keys_and_values(kind: str, scaled: Path) -> None:
    """With the engine for GPUs, whose steps of single tokens are replayed, also those with drafts."""
    options = {"kv_cache_dtype": kind, "speculate": 3, "cuda_graphs": "4", "max_step_tokens": 16}
    runner = load(configure(scaled, **options), on=late_platform(CapturingDevice()))
    assert runner.info.cache_dtype == kind
    request = Request(list(range(5, 40)), 12, details={"logprobs": True})
    router = Router(runner)
    router.run([Request([7, 8, 9], 9), request, Request(list(range(40, 60)), 5)])
    assert pb.STEP_PATH_GRAPH in {response.path for response in router.responses}
    expected = score(scaled, request, TYPES[kind], SCALES)
    torch.testing.assert_close(torch.tensor(request.logprobs), expected, rtol=0, atol=2e-4)


@pytest.mark.slow
@FLOAT_TYPES
def test_transformers_code_on_gpus_answers_with_rounded_keys_and_values(kind: str, scaled: Path) -> None:
    options = {"kv_cache_dtype": kind, "deployment_framework": "hf_transformers", "max_step_tokens": 16}
    runner = load(configure(scaled, **options, speculate=3), on=late_platform(LateDevice()))
    assert runner.info.cache_dtype == kind
    request = Request(list(range(5, 40)), 12, details={"logprobs": True})
    Router(runner).run([Request([7, 8, 9], 9), request, Request(list(range(40, 60)), 5)])
    expected = score(scaled, request, TYPES[kind], SCALES)
    torch.testing.assert_close(torch.tensor(request.logprobs), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("framework", ["tgis_native", "hf_transformers"])
def test_a_gpu_s_kernels_are_checked_with_the_cache_s_type(framework: str, scaled: Path) -> None:
    spec = prepare(configure(scaled, deployment_framework=framework)).choice.spec
    for option, expected in (("auto", None), ("int8", None), ("fp8", E4M3), ("fp8_e5m2", E5M2)):
        assert find_sizes(spec, 1, cache_type=find_float8(option)).cache_types == (expected,)


def test_without_scales_they_are_1(model_path: Path, scaled: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        request = answer(model_path, kv_cache_dtype="fp8")
    expected = score(model_path, request, E4M3, ((1.0, 1.0),) * 2)
    torch.testing.assert_close(torch.tensor(request.logprobs), expected, rtol=0, atol=2e-4)
    said = "the KV cache uses fp8_e4m3"
    missing = "the checkpoint has no scales for 2 of 2 layers, which use 1"
    assert f"{said}; {missing}" in caplog.messages
    assert "GiB (fp8_e4m3): " in caplog.text
    with caplog.at_level(logging.INFO):
        assert (
            describe_shard(prepare(configure(scaled, kv_cache_dtype="fp8_e4m3fn"))).cache_dtype == "fp8_e4m3"
        )
    assert f"{said} with the checkpoint's scales" in caplog.messages


@KIND
def test_an_engine_answers_the_same_alone_and_in_company(kind: str, scaled: Path) -> None:
    """Check that a preempted request continues with the same tokens."""
    runner = load(configure(scaled, kv_cache_dtype=kind, cpu_threads=2))
    whole = check_company(runner)[0]
    resumed = Request(list(whole.prompt), 8, generated=whole.generated[:4], details={"logprobs": True})
    Router(runner, seed=3).run([resumed])
    assert resumed.generated == whole.generated
    assert resumed.logprobs == whole.logprobs[4:]


@KIND
def test_an_encoder_decoder_answers_the_same_in_company(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, CASES["t5"]())
    runner = load(configure(tmp_path, kv_cache_dtype=kind))
    inputs = [list(range(5, 45)), list(range(60, 77)), [9]]
    runs = []
    for seed, groups in ((1, [[0, 1, 2]]), (2, [[0], [1], [2]])):
        requests = [Request([2], 6, encoder_token_ids=ids, details={"logprobs": True}) for ids in inputs]
        for group in groups:
            runner.reset()
            Router(runner, seed=seed).run([requests[i] for i in group])
        runs.append([(request.generated, request.logprobs) for request in requests])
    assert runs[0] == runs[1]
    exact = Request([2], 1, encoder_token_ids=inputs[0], details={"logprobs": True})
    Router(load(configure(tmp_path))).run([exact])
    assert abs(exact.logprobs[0] - runs[0][0][1][0]) < 0.2


@FLOAT_TYPES
def test_a_token_takes_half_the_memory_of_16_bits(kind: str, scaled: Path) -> None:
    spec = prepare(configure(scaled)).choice.spec
    small, large = (bytes_per_block(spec, ALONE, 16, each) for each in (TYPES[kind], torch.float16))
    assert 2 * small == large
    demand = Demand(16, 100, 4, None)
    budget = MemoryBudget(4 * 10 * large, 0, 1)
    assert plan_blocks(demand, small, budget) == 2 * plan_blocks(demand, large, budget) == 20


@KIND
def test_a_cache_has_the_memory_that_was_planned(kind: str, scaled: Path) -> None:
    plan = prepare(configure(scaled, kv_cache_dtype=kind))
    cache = allocate_cache(
        plan.choice.spec, ALONE, 7, 16, plan.cache_type.dtype, scales=plan.cache_type.scales
    )
    planned = 7 * bytes_per_block(plan.choice.spec, ALONE, 16, TYPES[kind])
    assert cache.keys.nbytes + cache.values.nbytes == planned
    if kind == "int8":
        spec = plan.choice.spec
        vectors = 2 * spec.num_cache_layers * spec.num_kv_heads * 16
        assert planned == 7 * vectors * (spec.head_dim + 4)
        assert {tuple(scale) for scale in cache.scales} == {(1.0, 1.0)}
        return
    assert [tuple(scale) for scale in cache.scales] == [pytest.approx(scale) for scale in SCALES]


def test_a_checkpoint_made_for_the_option_is_logged(scaled: Path, tmp_path: Path, caplog: Any) -> None:
    shutil.copytree(scaled, tmp_path, dirs_exist_ok=True)
    settings = {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": SCHEME}
    (tmp_path / "config.json").write_text(json.dumps(read_config(scaled) | {"quantization_config": settings}))
    with caplog.at_level(logging.INFO):
        assert describe_shard(prepare(configure(tmp_path))).cache_dtype == "float32"
    made = "the checkpoint is calibrated for 8 bits, which --kv-cache-dtype fp8_e4m3 selects"
    assert f"the KV cache uses float32; {made}" in caplog.messages
    caplog.clear()
    with caplog.at_level(logging.INFO):
        prepare(configure(scaled))
    assert "8 bits" not in caplog.text


def test_unsupported_engines_refuse_the_option(model_path: Path) -> None:
    on = replace(late_platform(LateDevice()), device=torch.device("cuda", 0))
    with pytest.raises(DeviceError) as refused:
        prepare(configure(model_path, kv_cache_dtype="int8"), on)
    text = "--kv-cache-dtype int8 works only on the CPU: remove the option, set fp8_e4m3, or set --device cpu"
    assert str(refused.value) == text
    assert prepare(configure(model_path, kv_cache_dtype="fp8"), on).cache_type.dtype == E4M3
    framework = "hf_optimum_ort"
    with pytest.raises(UnsupportedModelError) as unserved:
        prepare(configure(ONNX_MODEL, kv_cache_dtype="fp8_e5m2", deployment_framework=framework))
    assert str(unserved.value) == f"--kv-cache-dtype fp8_e5m2 does not support {framework}: remove the option"
