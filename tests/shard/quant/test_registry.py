"""Formats by their settings, and the errors of unsupported ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.shard import packers
from tests.support.shard.checkpoints import write_llama
from tests.support.shard.driver import configure
from tests.support.shard.quantized_modules import open_module
from tests.support.shard.stepping import read_config
from tgis.config.model import QUANTIZATIONS
from tgis.errors import OperatorError
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.quant.formats.gptq import Gptq
from tgis.shard.quant.formats.settings import SERVED, read_settings
from tgis.shard.quant.registry import FORMATS, METHODS_OF, SCHEMES, find_format, find_scheme_name
from tgis.shard.startup.load import load

NOT_SERVED = (
    "exl2 gguf aqlm quip hqq vptq bitnet quanto torchao higgs spqr qqq nvfp4 modelopt eetq fp_quant "
    "auto-round quark squeezellm something-new"
).split()
OTHER_FORMS: dict[str, dict[str, Any]] = {
    "GPTQ checkpoints with checkpoint_format marlin_24": {
        "quant_method": "gptq",
        "checkpoint_format": "marlin_24",
    },
    "AWQ checkpoints of version gemv_fast": {"quant_method": "awq", "version": "GEMV_FAST"},
    "AWQ checkpoints of version llm-awq": {"quant_method": "awq", "backend": "llm-awq"},
    "compressed-tensors of format nvfp4-pack-quantized": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
    },
    "compressed-tensors of format mxfp4-pack-quantized": {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {"a": {"format": "pack-quantized"}, "b": {"format": "mxfp4-pack-quantized"}},
    },
    "compressed-tensors of format sparse-24-bitmask": {
        "quant_method": "compressed-tensors",
        "sparsity_config": {"format": "sparse-24-bitmask"},
    },
    "compressed-tensors of format marlin-24": {"quant_method": "compressed-tensors", "format": "marlin-24"},
    "compressed-tensors with a transform_config": {
        "quant_method": "compressed-tensors",
        "transform_config": {"config_groups": {"R3": {"type": "hadamard"}}},
    },
}
WRONG_VALUES: dict[str, Any] = {
    "quantization_config is not an object": "gptq",
    "quantization_config: quant_method 4 is not a text": {"quant_method": 4},
    "quantization_config: bits '4' is not an integer": {"quant_method": "gptq", "bits": "4"},
    "quantization_config: bits 5 is not 2, 3, 4 or 8": {"quant_method": "gptq", "bits": 5},
    "quantization_config: group_size True is not an integer": {"quant_method": "awq", "group_size": True},
    "quantization_config: desc_act 1 is neither true nor false": {"quant_method": "gptq", "desc_act": 1},
    "quantization_config: AWQ checkpoints of 8 bits are not served, only of 4": {
        "quant_method": "awq",
        "bits": 8,
    },
    "quantization_config: Marlin checkpoints of 8 bits are not served, only of 4": {
        "quant_method": "gptq",
        "bits": 8,
        "is_marlin_format": True,
    },
    "quantization_config: config_groups is not an object": {
        "quant_method": "compressed-tensors",
        "config_groups": [],
    }
    | {"config_groups": ["W4A16"]},
    "quantization_config: block_structure [128] is not two positive integers": {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": {"block_structure": [128]}}},
    },
}


def refusal(directory: Path, settings: Any) -> str:
    with pytest.raises(WeightsError) as refused:
        find_format({"quantization_config": settings}, directory)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("method", NOT_SERVED)
def test_methods_are_refused_by_name(method: str, tmp_path: Path) -> None:
    text = f"{tmp_path / 'config.json'}: quantization_config: {method} checkpoints are not served: {SERVED}"
    assert refusal(tmp_path, {"quant_method": method.upper()}) == text


def test_settings_without_a_method_are_refused(tmp_path: Path) -> None:
    assert "quantized checkpoints of no method are not served" in refusal(tmp_path, {"bits": 4})


@pytest.mark.parametrize("text", OTHER_FORMS)
def test_forms_are_refused_by_name(text: str, tmp_path: Path) -> None:
    place = f"{tmp_path / 'config.json'}: quantization_config"
    assert refusal(tmp_path, OTHER_FORMS[text]) == f"{place}: {text} are not served: {SERVED}"


@pytest.mark.parametrize("text", WRONG_VALUES)
def test_wrong_values_are_refused(text: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, WRONG_VALUES[text]) == f"{tmp_path / 'config.json'}: {text}"


def test_files_of_settings(tmp_path: Path) -> None:
    rounded = packers.draw(32, 64)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    actual = open_module(tmp_path, packers.pack_gptq(rounded), None)
    assert torch.equal(actual.read(), rounded.dequantize())
    (tmp_path / "quantize_config.json").unlink()
    of_awq = {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}
    (tmp_path / "quant_config.json").write_text(json.dumps(of_awq))
    actual = open_module(tmp_path, packers.pack_awq_gemm(rounded), None)
    assert torch.equal(actual.read(), rounded.dequantize())
    for content, text in (("{", "is not valid JSON"), ("[4]", "is not a JSON object")):
        (tmp_path / "quant_config.json").write_text(content)
        with pytest.raises(OperatorError, match=text) as refused:
            find_format({}, tmp_path)
        assert str(tmp_path / "quant_config.json") in str(refused.value)
    config = {"quantization_config": {"quant_method": "gptq"}}
    assert isinstance(find_format(config, tmp_path), Gptq), "config.json goes first"


def test_settings_as_tensors(tmp_path: Path) -> None:
    """TGIS's `quantize` writes them."""
    rounded = packers.draw(32, 64, 8)
    tensors = {f"m.{end}": tensor for end, tensor in packers.pack_gptq(rounded, has_order=False).items()}
    for bits, text in ((torch.tensor([8]), None), (torch.tensor([8.0]), "single"), (torch.ones(2), "single")):
        numbers = {"gptq_bits": bits, "gptq_groupsize": torch.tensor([32])}
        save_file({**tensors, **numbers}, tmp_path / "model.safetensors")
        if text is None:
            settings = read_settings({}, tmp_path)
            assert settings is not None
            assert (settings.method, settings["bits"], settings["group_size"]) == ("gptq", 8, 32)
        else:
            with pytest.raises(WeightsError, match=rf"tensor gptq_bits is not a {text} integer$"):
                read_settings({}, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_settings({}, tmp_path) is None


def test_flags_name_formats_or_schemes() -> None:
    assert set(QUANTIZATIONS) == set(METHODS_OF) | set(SCHEMES) - {"none"}
    assert {method for methods in METHODS_OF.values() for method in methods} == set(FORMATS)


@pytest.mark.parametrize("flag", [None, *QUANTIZATIONS])
@pytest.mark.parametrize("method", [None, *FORMATS])
def test_flags_must_match_the_checkpoint(flag: str | None, method: str | None, tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": method}} if method else {}
    settings = read_settings(config, tmp_path)
    methods = METHODS_OF.get(flag or "", ())
    if method in methods:
        assert find_scheme_name(flag, settings) is None
    elif flag in SCHEMES and not (method and methods):
        assert find_scheme_name(flag, settings) == flag, "what the format reads is rounded again, or is plain"
    elif flag is None:
        assert find_scheme_name(flag, settings) is None
    else:
        with pytest.raises(WeightsError) as refused:
            find_scheme_name(flag, settings)
        assert f"--quantize {flag} " in str(refused.value)
        assert (method or "not quantized") in str(refused.value)


def test_nothing_starts_with_a_contradiction(tmp_path: Path) -> None:
    write_llama(tmp_path)
    with pytest.raises(WeightsError, match=r"^--quantize gptq is for quantized checkpoints"):
        load(configure(tmp_path, quantize="gptq"))
    config = {**read_config(tmp_path), "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"^--quantize gptq contradicts .*config\.json.*, which says awq:"):
        load(configure(tmp_path, quantize="gptq"))
    config["quantization_config"] = {"quant_method": "exl2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="exl2 checkpoints are not served"):
        load(configure(tmp_path))


def test_models_of_other_engines_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "mamba", "quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="only the native engine serves quantized checkpoints"):
        load(configure(tmp_path))
