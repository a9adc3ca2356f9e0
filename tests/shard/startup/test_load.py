"""Check the engine that a directory and its options give, and the refusals."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.shard.checkpoints import edit_config, write_llama, write_model
from tests.support.shard.driver import configure
from tgis.hub.model_files import ModelNotFoundError
from tgis.pb import shard_pb2 as pb
from tgis.prompts.errors import AdapterError
from tgis.shard.adapters.loading import open_store
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.memory.host_limits import HostMemory
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.startup.load import load
from tgis.shard.startup.memory import warm_up
from tgis.shard.startup.memory.memory_plan import GIB, MIB, CacheTooSmallError, ModelTooLargeError

KIB = 1 << 10

NATIVE = {"deployment_framework": "tgis_native"}


@pytest.fixture(scope="module")
def model_path(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("grouped_queries")


def test_info_describes_the_loaded_model(model_path: Path) -> None:
    info = load(configure(model_path)).info
    assert info.model_kind == pb.InfoResponse.MODEL_KIND_DECODER_ONLY
    assert (info.model_type, info.vocab_size, list(info.eos_token_ids)) == ("llama", 99, [2])
    assert (info.block_size, info.num_blocks) == (16, 8 * 192 // 16)
    assert (info.rank, info.world_size, info.weight_dtype, info.cache_dtype) == (0, 1, "float32", "float32")


def test_types(model_path: Path, tmp_path: Path) -> None:
    write_llama(tmp_path, dtype=torch.bfloat16)
    assert load(configure(tmp_path)).info.weight_dtype == "bfloat16"
    info = load(configure(model_path, dtype="float16", kv_cache_tokens=200, epoch=7)).info
    assert (info.weight_dtype, info.cache_dtype, info.num_blocks, info.epoch) == ("float16", "float16", 12, 7)


def test_the_type_may_be_named_for_the_language_model(model_path: Path, tmp_path: Path) -> None:
    shutil.copytree(model_path, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    edit_config(tmp_path, {**config, "text_config": {"torch_dtype": "bfloat16"}})
    assert load(configure(tmp_path)).info.weight_dtype == "bfloat16"
    edit_config(tmp_path, config)
    assert load(configure(tmp_path)).info.weight_dtype == "float32"


def test_info_of_an_encoder_decoder(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_heads": 4, "vocab_size": 99}
    write_model(tmp_path, transformers.T5Config(**sizes, decoder_start_token_id=7))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "generation_config.json").unlink()

    def start(**ids: int) -> int:
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
        edit_config(tmp_path, {**config, **dict.fromkeys(names), **ids})
        info = load(configure(tmp_path, kv_cache_tokens=1024)).info
        assert info.model_kind == pb.InfoResponse.MODEL_KIND_ENCODER_DECODER
        return info.decoder_start_token_id

    assert start(decoder_start_token_id=7, bos_token_id=5) == 7
    assert start(bos_token_id=5, pad_token_id=4) == 5
    assert start(pad_token_id=4) == 4
    with pytest.raises(UnsupportedModelError, match="has no decoder_start_token_id"):
        start()
    for token_id in (-5, 99):
        with pytest.raises(UnsupportedModelError, match=f"bos_token_id {token_id} is not a token id"):
            start(bos_token_id=token_id)


def test_info_of_soft_prompts_and_adapters(model_path: Path, tmp_path: Path) -> None:
    """Check that the info reports the configured cache sizes where the model supports them."""

    def bytes_of(**options: Any) -> tuple[int, int]:
        sizes = {"prompt_cache_size_mb": 3, "adapter_cache_size_mb": 5}
        info = load(configure(model_path, **sizes, **options)).info
        return info.prompt_cache_bytes, info.adapter_cache_bytes

    missing = str(tmp_path / "not-mounted-yet")
    assert bytes_of() == (0, 0)
    assert bytes_of(prefix_store_path=missing) == (3 * MIB, 5 * MIB)
    assert bytes_of(adapter_cache=missing) == (0, 5 * MIB)
    assert bytes_of(lora_adapters="one=/a,two=/b") == (0, 5 * MIB)
    info = load(configure(model_path, lora_adapters="one=/a,two=/b")).info
    assert list(info.preloaded_adapter_ids) == ["one", "two"]
    assert info.pad_token_id == 2, "its EOS token, as nothing names another"


STABLELM = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
UNSET = "leave DEPLOYMENT_FRAMEWORK unset"


@pytest.mark.parametrize("is_known", [True, False])
def test_an_engine_without_soft_prompts_refuses_them(
    is_known: bool, model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that the refusal also says what to do, if our engine knows the model."""
    remedy = f": {UNSET}" if is_known else ", which does not run this model"
    if not is_known:
        model_path = tmp_path / "model"
        config = transformers.StableLmConfig(**STABLELM, vocab_size=99, intermediate_size=48, pad_token_id=0)
        write_model(model_path, config)
    through = {"deployment_framework": "hf_transformers", "prefix_store_path": str(tmp_path / "none")}
    config = configure(model_path, uds_path=str(tmp_path / "shard"), kv_cache_tokens=1024, **through)
    runner = load(config)
    assert (runner.info.prompt_cache_bytes, runner.info.adapter_cache_bytes) == (0, 0)
    store = open_store(config, runner.model, 192)
    (tmp_path / "none" / "a").mkdir(parents=True)
    torch.save(torch.ones(2, 32), tmp_path / "none" / "a" / "decoder.pt")
    text = f"soft prompts and adapters need the service's own engine{remedy}"
    with pytest.raises(AdapterError, match=f"'a': {text}$"):
        store.find("prompt", "a")
    with pytest.raises(AdapterError, match=f"^{text}$"):
        runner.adapters.load("0" * 64)
    assert f"prefix_store_path: the directory {tmp_path / 'none'} does not exist" in caplog.text
    assert f"requests for soft prompts and adapters will fail: {text}" in caplog.text


def test_a_disk_too_small_for_copies_is_logged_at_the_start(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(
        model_path, uds_path=str(tmp_path / "later" / "shard"), prefix_store_path=str(tmp_path)
    )
    model = load(config).model
    caplog.clear()
    open_store(replace(config, prompt_cache_size_mb=1, adapter_cache_size_mb=1), model, 192)
    assert not caplog.records
    open_store(replace(config, adapter_cache_size_mb=1 << 40, rank=1), model, 192)
    assert not caplog.records
    open_store(replace(config, adapter_cache_size_mb=1 << 40), model, 192)
    [record] = caplog.records
    text = f"{tmp_path}/later/shard-contents: copies of soft prompts and adapters may need {(1 << 40) + 512}"
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"{text} MiB, but only ")


def test_preloaded_adapters_are_refused_without_adapter_support(model_path: Path) -> None:
    options = {"deployment_framework": "hf_transformers", "lora_adapters": "one=/a"}
    text = f"^--lora-adapters needs the service's own engine: {UNSET}$"
    with pytest.raises(UnsupportedModelError, match=text):
        load(configure(model_path, **options))


def test_a_model_that_can_never_answer_is_refused(model_path: Path, tmp_path: Path) -> None:
    """Check that the start fails, rather than every request of a ready server."""
    shutil.copytree(model_path, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="the model failed a warm-up step: "):
        load(configure(tmp_path))


@pytest.mark.parametrize(
    ("config", "options", "error", "text"),
    [
        ("{}", {}, UnsupportedModelError, "None"),
        ('{"model_type": "clock"}', {}, UnsupportedModelError, "'clock'"),
        ('{"model_type": "llama"}', NATIVE, UnsupportedModelError, "hidden_size"),
        ("{", {}, ModelNotFoundError, "not valid JSON"),
        (None, {"kv_cache_tokens": 191}, CacheTooSmallError, "192 takes 12 blocks .* leave room for 11$"),
    ],
)
def test_refusals_are_one_line(
    model_path: Path, tmp_path: Path, config: str | None, options: Any, error: type[Exception], text: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(error, match=text) as caught:
        load(configure(model_path if config is None else tmp_path, **options))
    assert "\n" not in str(caught.value)


def test_a_model_without_weights_is_refused(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_path / "config.json").read_bytes())
    with pytest.raises(WeightsError):
        load(configure(tmp_path))


def test_a_model_that_cannot_fit_is_refused_unread(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Check the memory arithmetic from the files' headers: matrices only, in their loaded type."""
    caplog.set_level("INFO")
    with safe_open(model_path / "model.safetensors", framework="pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    needed = sum(math.prod(shape) for shape in shapes if len(shape) == 2) * 2
    monkeypatch.setattr(HostMemory, "memory_left", lambda _: needed - 1)
    text = r"weights take 0\.00 GiB as float16, but only 0\.00 GiB of memory"
    with pytest.raises(ModelTooLargeError, match=text):
        load(configure(model_path, dtype="float16"))
    monkeypatch.setattr(HostMemory, "memory_left", lambda _: needed)
    with pytest.raises(CacheTooSmallError, match=r"but 0 MiB \(a quarter of 0 MiB\) leave room for 0$"):
        load(configure(model_path, dtype="float16"))
    # A speculator's weights count as well, here those of a copy of the model.
    both = {"dtype": "float16", "speculator": str(model_path)}
    monkeypatch.setattr(HostMemory, "memory_left", lambda _: 2 * needed - 1)
    with pytest.raises(ModelTooLargeError, match=text):
        load(configure(model_path, **both))
    monkeypatch.setattr(HostMemory, "memory_left", lambda _: 2 * needed)
    with pytest.raises(CacheTooSmallError):
        load(configure(model_path, **both))
    assert "weights read" not in caplog.text


def test_the_log_shows_the_limits(model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    load(configure(model_path))
    assert "96 blocks, 1536 tokens, 8.0 requests of 192 tokens" in caplog.text
    assert "GiB (float32), the KV cache takes 0.00 GiB" in caplog.text
    warmed_up = next(record for record in caplog.records if record.message == "warmed up")
    fields = warmed_up.fields  # type: ignore[attr-defined]
    assert (fields["tokens"], fields["largest_step_tokens"]) == (32, 8 * 191), "memory is plentiful"


@pytest.mark.parametrize(("held", "fraction"), [(0, None), (40, None), (0, 0.1)])
def test_the_cache_gets_a_share_of_what_the_largest_step_leaves(
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    held: int,
    fraction: float | None,
) -> None:
    """Check that the cache takes a quarter by default of the memory left by soft prompts and adapters (`held`
    MiB)."""
    caplog.set_level("INFO")
    left, step, block_bytes = 160 * MIB, 8 * MIB, 4 * KIB
    monkeypatch.setattr(HostMemory, "memory_left", lambda _: left)
    # A process that ran larger steps before needs no further memory for this one.
    monkeypatch.setattr(HostMemory, "begin_peak", lambda _: 0)
    monkeypatch.setattr(HostMemory, "peak", lambda _: step)
    monkeypatch.setattr(warm_up, "MAX_STEP_S", 100.0)
    options: dict[str, Any] = {"max_batch_size": 512, "max_sequence_length": 512}
    options["kv_cache_memory_fraction"] = fraction
    if held:
        sizes = {"prompt_cache_size_mb": held - 30, "adapter_cache_size_mb": 30}
        options |= {"prefix_store_path": "/nowhere", **sizes}
    info = load(configure(model_path, **options)).info
    fields = next(record.fields for record in caplog.records if record.message == "warmed up")  # type: ignore[attr-defined]
    assert (fields["tokens"], fields["largest_step_tokens"]) == (2048, 2048), "memory decides"
    assert fields["largest_step_gib"] * GIB == pytest.approx(step, abs=MIB)
    expected = (left - held * MIB - step) * (fraction or 0.25) / block_bytes
    assert info.num_blocks == pytest.approx(expected, abs=MIB / 4 / block_bytes)


def test_reserved_adapter_memory_must_be_available(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "memory_left", lambda _: 160 * MIB)
    held = {"prefix_store_path": "/nowhere", "prompt_cache_size_mb": 175, "adapter_cache_size_mb": 30}
    with pytest.raises(ModelTooLargeError, match=r"soft prompts and adapters may take 0\.20 GiB"):
        load(configure(model_path, **held))
