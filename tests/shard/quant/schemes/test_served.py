"""Models whose weights are rounded while loading: same results as a checkpoint with the rounded weights, on
one rank and two, and log lines."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.shard import stepping
from tests.support.shard.checkpoints import SMALL, edit_config, write_model
from tests.support.shard.driver import configure
from tests.support.shard.quantized_files import KINDS, NOT_QUANTIZED, write_quantized
from tests.support.shard.ranks import Ranks
from tests.support.shard.stepping import Stepper
from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu.codes.integer_sums import CAN_ROUND
from tgis.shard.kernels.cpu.ops import CpuKernels
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.models import registry
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.quant.registry import find_scheme
from tgis.shard.quant.rounding import Rounding
from tgis.shard.quant.schemes.weight_only import WEIGHT_ONLY
from tgis.shard.startup import engine_choice
from tgis.shard.startup.load import load
from tgis.shard.startup.platforms.cpu import ON_CPU
from tgis.shard.startup.quantize import check as quantize_check

ROUNDING = 2e-5  # error of logits by the order of sums
SIZES = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
# Groups of 64 and 128 are split over two ranks, and the last ones are partial.
WIDE = {"intermediate_size": 200}

# `make test` runs one of them; "eetq" is "bitsandbytes".
_SLOW = ("bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "fp8")
DISTINCT = ["int4", *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixtral")
    write_model(directory, transformers.MixtralConfig(**{**SMALL, **SIZES, **WIDE}))
    return directory


def round_file(directory: Path, rounded: Path, name: str) -> None:
    """Write a checkpoint with the rounded weights of whole matrices."""
    content = load_file(directory / "model.safetensors")
    for key, tensor in content.items():
        if tensor.dim() == 2 and not NOT_QUANTIZED.fullmatch(key):
            content[key] = find_scheme(name).encode("linear", TensorInMemory(tensor, key)).read()
    if name == "int4":
        round_sensitive(load_file(directory / "model.safetensors"), content)
    rounded.mkdir()
    save_file(content, rounded / "model.safetensors")
    edit_config(rounded, stepping.read_config(directory))


def round_sensitive(wide: dict[str, Tensor], content: dict[str, Tensor]) -> None:
    """Round to 8 bits the values, the last of two layers, the embedding and the head."""
    for key, tensor in wide.items():
        is_last = ".layers.1." in key and not NOT_QUANTIZED.fullmatch(key)
        if tensor.dim() == 2 and (is_last or ".v_proj." in key or "embed" in key or "lm_head" in key):
            groups = tensor.float().split(64, 1)
            scales = [group.abs().amax(1, keepdim=True) / 127 for group in groups]
            pairs = zip(groups, scales, strict=True)
            content[key] = torch.cat([(group / scale).round() * scale for group, scale in pairs], 1)


def compute_logits(group: ProcessGroup, directory: Path, name: str | None) -> Tensor:
    config = stepping.read_config(directory)
    model = registry.load(directory, config, group, torch.float32, rounding=Rounding(find_scheme(name)))
    result = Stepper(model, group).step({0: (list(range(5, 20)), 0), 1: ([30, 31], 0)})  # type: ignore[arg-type]
    return torch.cat(list(result.values()))


@pytest.mark.parametrize("name", DISTINCT)
def test_ranks_have_parts_of_the_same_weights(
    name: str, model_path: Path, ranks: Ranks, tmp_path: Path
) -> None:
    round_file(model_path, tmp_path / "rounded", name)
    for size in (1, 2):
        actual = ranks.run(size, compute_logits, model_path, name)
        expected = ranks.run(size, compute_logits, tmp_path / "rounded", None)
        plain = ranks.run(size, compute_logits, model_path, None)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)
        assert not torch.equal(actual[0], plain[0])


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_the_log_names_the_stored_type(name: str, model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        runner = load(configure(model_path, quantize=name, dtype="float16"))
    kept = "float16" if name == "fp8" else name
    assert runner.info.weight_dtype == kept
    assert any(f"GiB ({kept})" in message for message in caplog.messages)
    text = (
        f"--quantize {name} rounds the weights but stores them as float16, with the memory and speed of "
        "--dtype float16, because this platform has no matrix products for their codes"
    )
    assert (text in caplog.messages) == (name == "fp8")
    logged = f"the weights of linear layers are stored as {8 if name == 'int8' else 4}-bit codes"
    assert (logged in caplog.messages) == (name != "fp8")


def test_a_quantized_checkpoint_is_said_to_be_kept_in_the_type(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    write_model(plain, transformers.MixtralConfig(**{**SMALL, **SIZES, **WIDE}))
    write_quantized(plain, quantized, KINDS["fp8, a scale for each row"])
    with caplog.at_level(logging.INFO):
        assert load(configure(quantized, dtype="bfloat16")).info.weight_dtype == "bfloat16"
    assert sum("of this quantized checkpoint are stored as bfloat16" in text for text in caplog.messages) == 1
    caplog.clear()
    # Both at once: the checkpoint's weights are rounded again.
    assert load(configure(quantized, quantize="int8")).info.weight_dtype == "int8"


def measure_share(content: dict[str, Tensor]) -> float:
    """Return the share of sensitive weights among linear layers: values, and the last of two layers."""
    linear = {
        key: tensor.numel()
        for key, tensor in content.items()
        if tensor.dim() == 2 and not NOT_QUANTIZED.fullmatch(key)
    }
    sensitive = [size for key, size in linear.items() if ".layers.1." in key or ".v_proj." in key]
    return sum(sensitive) / sum(linear.values())


def count_bytes_per_weight(kind: str | None, name: str | None, share: float) -> float | None:
    """Return the bytes per weight, including scales, or None if weights are not held as codes. `share` of
    them are sensitive."""
    if name == "fp8" or (name is None and (kind is None or kind.startswith("fp8"))):
        return None
    if name in ("eetq", "bitsandbytes") or (name is None and kind == "int8"):
        return 1 + 4 / 128
    if name == "int4":  # 8 bits and scales of 4 bytes, or 4 bits and two values of 2 bytes
        return share * (1 + 4 / 64) + (1 - share) * (0.5 + 4 / 64)
    return 0.5 + 4 / 64


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_memory_is_that_of_the_stored_weights(kind: str | None, model_path: Path, tmp_path: Path) -> None:
    directory, plain = model_path, tmp_path / "plain"
    content = load_file(model_path / "model.safetensors")
    share = measure_share(content)
    num_elements = sum(each.numel() for each in content.values() if each.dim() > 1)
    if kind is not None:
        directory = tmp_path / "quantized"
        plain.mkdir()
        for file in model_path.glob("*.*"):
            (plain / file.name).write_bytes(file.read_bytes())
        write_quantized(plain, directory, KINDS[kind])
    settings = stepping.read_config(directory)
    choice = engine_choice.choose(directory, settings, None, 1, trust_remote_code=False)
    for name in (None, *WEIGHT_ONLY):
        config = configure(directory, quantize=name)
        for dtype in (torch.float16, torch.float32):
            counted = quantize_check.count_bytes(config, settings, choice, ON_CPU, dtype)
            table, per_weight = 99 * 32, count_bytes_per_weight(kind, name, share)
            table_bytes = 1 + 4 / 64 if name == "int4" else dtype.itemsize
            kept = (num_elements - table) * (per_weight or dtype.itemsize) + 2 * table * table_bytes
            assert counted == (int(kept) if per_weight else num_elements * dtype.itemsize)


@pytest.mark.skipif(not CAN_ROUND, reason="the processor has no AVX2, VNNI or ARM dot product")
def test_activations_are_rounded_when_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, transformers.LlamaConfig(**SMALL))
    with caplog.at_level(logging.INFO):
        runner = load(configure(tmp_path, quantize="int4", activations="int8"))
    assert "products with integer codes round activations to 8 bits" in caplog.messages
    assert runner.info.weight_dtype == "int4"
    config, scheme = stepping.read_config(tmp_path), find_scheme("int4")

    def compute(kernels: CpuKernels) -> Tensor:
        model = registry.load(tmp_path, config, stepping.ALONE, torch.float32, kernels, Rounding(scheme))
        return Stepper(model).step({0: (list(range(5, 20)), 0)})[0].log_softmax(-1)  # type: ignore[arg-type]

    actual, expected = compute(CpuKernels(rounds_activations=True)), compute(CpuKernels())
    assert 1e-5 < (actual - expected).abs().mean() < 0.05
    caplog.clear()
    load(configure(tmp_path, activations="int8"))
    assert "--activations int8 has no effect: the weights are not quantized" in caplog.messages


def test_other_devices_serve_it_and_other_engines_refuse(model_path: Path) -> None:
    elsewhere = replace(ON_CPU, kernels=TorchKernels(torch.device("cpu")))
    for name in WEIGHT_ONLY:
        quantize_check.check_platform(name, elsewhere)
    options = {"quantize": "int4", "deployment_framework": "hf_transformers"}
    with pytest.raises(UnsupportedModelError, match=r"^--quantize int4 needs tgis_native, not hf_tr"):
        load(configure(model_path, **options))


MEASURE = """
import json, sys, torch
from pathlib import Path
from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.memory.host_limits import HostMemory
from tgis.shard.models import registry
from tgis.shard.quant.registry import find_scheme
from tgis.shard.quant.rounding import Rounding

directory, scheme = Path(sys.argv[1]), find_scheme(sys.argv[2])
weight = TensorInMemory(torch.randn(64, 64), "a weight")
CPU_KERNELS.pack(weight, torch.float16)  # compiles
part = find_scheme("int4").encode("linear", weight)
CPU_KERNELS.find_code_packer(part.layout())(part)
memory = HostMemory()
memory.release_memory()
before, used = memory.begin_peak(), memory.memory_used()
config = json.loads((directory / "config.json").read_text())
model = registry.load(directory, config, ProcessGroup(0, 1), torch.float16, rounding=Rounding(scheme))
peak = memory.peak() - before
memory.release_memory()
print(peak, memory.memory_used() - used)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (None, "none"),
        (None, "bitsandbytes-nf4"),
        (None, "fp8"),
        ("fp8, a scale for each block", "none"),
        ("nf4", "none"),
        ("int8", "none"),
    ],
)
def test_loading_needs_little_extra_memory(kind: str | None, name: str, tmp_path: Path) -> None:
    """A separate process loads a model of 380 MB."""
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 16000}
    write_model(plain, transformers.LlamaConfig(**{**SMALL, **sizes, "num_attention_heads": 16}))
    if kind is not None:
        write_quantized(plain, quantized, KINDS[kind])
    directory = plain if kind is None else quantized
    command = [sys.executable, "-c", MEASURE, str(directory), name]
    peak, kept = map(int, subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.split())
    is_float = "fp8" in f"{kind} {name}" or (kind, name) == (None, "none")
    assert (250 if is_float else 90) << 20 < kept < (500 if is_float else 250) << 20
    assert peak <= kept + (48 << 20), "a table of 32 MB and a few rows"
