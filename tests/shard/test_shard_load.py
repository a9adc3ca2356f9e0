"""What an engine makes of a directory and its options, and how it says no."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.checkpoints import write_llama
from tests.shard.driver import configure
from tgis.hub import ModelNotFoundError
from tgis.pb import shard_pb2 as pb
from tgis.shard.capacity import CacheTooSmallError
from tgis.shard.loading import load
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.weights import WeightsError


@pytest.fixture(scope="module")
def model_path(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("grouped_queries")


def test_info_tells_what_was_loaded(model_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("config", "options", "error", "text"),
    [
        ("{}", {}, UnsupportedModelError, "None"),
        ('{"model_type": "clock"}', {}, UnsupportedModelError, "'clock'"),
        ('{"model_type": "llama"}', {}, UnsupportedModelError, "hidden_size"),
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
