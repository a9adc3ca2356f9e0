"""Which engine a model gets, by DEPLOYMENT_FRAMEWORK, its type and the number of shards."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.shard.checkpoints import SMALL, edit_config, write_model
from tests.shard.driver import Request, Router, configure
from tgis.shard.layers import cpu
from tgis.shard.loading import load
from tgis.shard.models import engines
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.world import World

Checkpoint = Callable[[str], Path]
# In files of transformers' types that we have no family for, a feature that our family lacks, and ours.
CONFIGS = {
    "ours": transformers.LlamaConfig(**SMALL),
    "theirs": transformers.StableLmConfig(**SMALL, pad_token_id=0),
    "a feature of theirs": transformers.GPT2Config(scale_attn_by_inverse_layer_idx=True),
}
CHOICES = [
    ("ours", None, 1, "tgis_native"),
    ("ours", None, 2, "tgis_native"),
    ("ours", "tgis_native", 1, "tgis_native"),
    ("ours", "hf_custom_tp", 1, "tgis_native"),
    ("ours", "hf_optimum_bt", 1, "tgis_native"),
    ("ours", "hf_transformers", 1, "hf_transformers"),
    ("ours", "hf_accelerate", 1, "hf_transformers"),
    ("ours", "hf_transformers", 2, "tgis_native"),
    ("theirs", None, 1, "hf_transformers"),
    ("theirs", None, 2, "hf_transformers"),
    ("theirs", "hf_optimum_bt", 1, "hf_transformers"),
    ("theirs", "hf_transformers", 2, "hf_transformers"),
    ("theirs", "tgis_native", 1, "model type 'stablelm' is not supported; supported are: Ref"),
    ("a feature of theirs", None, 1, "hf_transformers"),
    ("a feature of theirs", "tgis_native", 1, "scale_attn_by_inverse_layer_idx True"),
    ("ours", None, 3, "cannot be cut over 3 shards"),
]


@pytest.mark.parametrize(("model", "framework", "size", "outcome"), CHOICES)
def test_choice(model: str, framework: str | None, size: int, outcome: str, tmp_path: Path) -> None:
    settings = CONFIGS[model].to_dict()
    edit_config(tmp_path, settings)
    if outcome in ("tgis_native", "hf_transformers"):
        choice = engines.choose(tmp_path, settings, framework, size, trust_remote_code=False)
        assert choice.engine == outcome
        assert choice.spec.vocab_size == settings["vocab_size"]
    else:
        with pytest.raises(UnsupportedModelError) as caught:
            engines.choose(tmp_path, settings, framework, size, trust_remote_code=False)
        assert outcome in str(caught.value)
        assert "\n" not in str(caught.value)


ONNX = Path(__file__).parent.parent / "data" / "onnx"


def test_a_model_in_onnx_form_is_served(tmp_path: Path) -> None:
    """Loaded as a shard loads it, in the type that its graph computes in, and driven."""
    engine = load(configure(ONNX / "half", deployment_framework="hf_optimum_ort", dtype="float32"))
    assert engine.info.cache_dtype == "float16"
    request = Request([5, 6, 7], max_new_tokens=4)
    Router(engine).run([request])
    assert len(request.generated) == 4


def test_a_broken_configuration_is_not_served_by_guesses(tmp_path: Path) -> None:
    """transformers would take a value of its own for what is missing, and blame the weights."""
    settings = {**CONFIGS["ours"].to_dict(), "hidden_size": None}
    edit_config(tmp_path, settings)
    with pytest.raises(UnsupportedModelError, match="hidden_size is missing in the model"):
        engines.choose(tmp_path, settings, None, 1, trust_remote_code=False)


def test_both_reasons_are_told(tmp_path: Path) -> None:
    settings = transformers.BloomConfig(apply_residual_connection_post_layernorm=True, n_layer=1, n_head=2)
    write_model(tmp_path, settings)
    choice = engines.choose(tmp_path, settings.to_dict(), None, 1, trust_remote_code=False)
    with pytest.raises(UnsupportedModelError) as caught:
        choice.load(World(0, 1), torch.float32, cpu)
    ours = "apply_residual_connection_post_layernorm True of the configuration is not supported; through "
    assert str(caught.value).startswith(f"{ours}transformers: model type 'bloom' cannot be served")


def test_says_that_ours_would_be_faster(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = CONFIGS["ours"].to_dict()
    edit_config(tmp_path, settings)
    engines.choose(tmp_path, settings, "hf_transformers", 1, trust_remote_code=False)
    assert "tgis_native serves this model faster" in caplog.text
