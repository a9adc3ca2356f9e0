"""Check which engine a model gets, by DEPLOYMENT_FRAMEWORK, model type and number of shards."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.shard.checkpoints import SMALL, edit_config, write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.family_oracle import NEW_TOKENS, check, draw_inputs
from tests.support.shard.prompt_oracle import PromptOracle
from tests.support.shard.stepping import ALONE, read_config
from tests.support.shard.tuned import Tuned
from tgis.shard.adapters.loading import open_store
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.models.hf_transformers import load as hf_transformers
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.startup import engine_choice
from tgis.shard.startup.load import load

Checkpoint = Callable[[str], Path]
# Checkpoints of types without a native family, with a feature that our family lacks, and of native types.
CONFIGS = {
    "ours": transformers.LlamaConfig(**SMALL),
    "theirs": transformers.StableLmConfig(**SMALL, pad_token_id=0),
    "a feature of theirs": transformers.GPT2Config(scale_attn_by_inverse_layer_idx=True),
    "encoder-decoder": transformers.MT5Config(),
    "ALiBi": transformers.BloomConfig(),
    "attention sinks": transformers.GraniteSWAConfig(),
}
ONLY_OURS = ("encoder-decoder", "ALiBi", "attention sinks")
THEIRS = ("hf_transformers", "hf_accelerate")
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
    ("ours", None, 3, "cannot be split over 3 shards"),
    *((model, name, size, "tgis_native") for model in ONLY_OURS for name in THEIRS for size in (1, 2)),
]


@pytest.mark.parametrize(("model", "framework", "size", "outcome"), CHOICES)
def test_choice(model: str, framework: str | None, size: int, outcome: str, tmp_path: Path) -> None:
    settings = CONFIGS[model].to_dict()
    edit_config(tmp_path, settings)
    if outcome in ("tgis_native", "hf_transformers"):
        choice = engine_choice.choose(tmp_path, settings, framework, size, trust_remote_code=False)
        assert choice.engine == outcome
        assert choice.spec.vocab_size == settings["vocab_size"]
    else:
        with pytest.raises(UnsupportedModelError) as caught:
            engine_choice.choose(tmp_path, settings, framework, size, trust_remote_code=False)
        assert outcome in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("framework", [None, *THEIRS])
def test_gguf_files_are_served_by_ours_only(
    framework: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(tmp_path, CONFIGS["ours"].to_dict())
    (tmp_path / "model.gguf").touch()
    settings = read_config(tmp_path)
    choice = engine_choice.choose(tmp_path, settings, framework, 1, trust_remote_code=True)
    assert choice.engine == "tgis_native"
    warning = "tgis_native serves this model, because hf_transformers cannot: it is a GGUF file"
    assert (warning in caplog.text) == (framework is not None)
    with pytest.raises(UnsupportedModelError, match="hf_optimum_ort does not support GGUF files"):
        engine_choice.choose(tmp_path, settings, "hf_optimum_ort", 1, trust_remote_code=True)
    with pytest.raises(UnsupportedModelError, match="scale_attn_by_inverse_layer_idx"):
        engine_choice.choose(tmp_path, CONFIGS["a feature of theirs"].to_dict(), framework, 1, True)


# One case of each kind that transformers cannot run with our cache; `make test-all` tries all families.
OBSTACLES = {
    "llama4_text",
    "mistral3",
    "mt5",
    "bart",
    "bloom",
    "mpt",
    "falcon_7b",
    "falcon_alibi",
    "phi3_short_and_long",
}


@pytest.mark.parametrize(
    "name", [name if name in OBSTACLES else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_transformers_engine_is_used_where_it_can_run(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that our engine serves a model exactly where the other engine refuses it."""
    write_model(tmp_path, CASES[name]())
    settings = read_config(tmp_path)
    choice = engine_choice.choose(tmp_path, settings, "hf_accelerate", 1, trust_remote_code=False)
    if choice.engine == "hf_transformers":
        assert name not in OBSTACLES
        choice.load(ALONE, torch.float32, CPU_KERNELS)
        return
    assert "tgis_native serves this model, because hf_transformers cannot: it" in caplog.text
    choice.load(ALONE, torch.float32, CPU_KERNELS)
    with pytest.raises(UnsupportedModelError, match="cannot be served through transformers"):
        hf_transformers.load(
            tmp_path, hf_transformers.make_spec(tmp_path, settings, False), ALONE, torch.float32, False
        )


@pytest.mark.parametrize("name", ["bloom", "mt5"])
def test_prompts_and_adapters_work_where_ours_serves_instead(name: str, tmp_path: Path) -> None:
    directory, store_path, config = tmp_path / "model", tmp_path / "store", CASES[name]()
    write_model(directory, config)
    oracle = PromptOracle(directory, config, store_path)
    (store_path / "prompt").mkdir(parents=True)
    part = "encoder.pt" if oracle.is_encoder_decoder else "decoder.pt"
    torch.save(oracle.draw(4, seed=1), store_path / "prompt" / part)
    tuned = Tuned(directory, store_path / "lora", r=4, target_modules="all-linear")
    options = {"deployment_framework": "hf_accelerate", "prefix_store_path": str(store_path)}
    shard = configure(directory, uds_path=str(tmp_path / "shard"), kv_cache_tokens=1024, **options)
    runner = load(shard)
    store = open_store(shard, runner.model, 192)
    prompt, adapter = store.find("prompt", "prompt"), store.find("adapter", "lora")
    for digest in (prompt.digest, adapter.digest):
        runner.adapters.load(digest)

    def ask(inputs: list[int], **digests: str) -> Request:
        begin, encoder = ([start], inputs) if oracle.is_encoder_decoder else (inputs, [])
        request = Request(begin, NEW_TOKENS, details={"logprobs": True}, encoder_token_ids=encoder, **digests)
        Router(runner).run([request])
        return request

    ids, start = draw_inputs()[1], oracle.start_token_id
    with_prompt = ask([0] * 4 + ids, prompt_digest=prompt.digest)
    with_adapter = ask(ids, adapter_digest=adapter.digest)
    check(with_prompt, oracle.answer(ids, 4, 1))
    check(with_adapter, tuned.answer(ids))
    assert with_prompt.logprobs != pytest.approx(with_adapter.logprobs, abs=1e-3)


ONNX = Path(__file__).parents[2] / "data" / "onnx"


def test_a_model_in_onnx_form_is_served(tmp_path: Path) -> None:
    """Check a model loaded as a shard loads it, in its compute type."""
    runner = load(configure(ONNX / "half", deployment_framework="hf_optimum_ort", dtype="float32"))
    assert runner.info.cache_dtype == "float16"
    request = Request([5, 6, 7], max_new_tokens=4)
    Router(runner).run([request])
    assert len(request.generated) == 4


def test_a_broken_configuration_is_not_served_by_guesses(tmp_path: Path) -> None:
    """Check that a missing value is reported; transformers would use a default and blame the weights."""
    settings = {**CONFIGS["ours"].to_dict(), "hidden_size": None}
    edit_config(tmp_path, settings)
    with pytest.raises(UnsupportedModelError, match="hidden_size is missing in the model"):
        engine_choice.choose(tmp_path, settings, None, 1, trust_remote_code=False)


@pytest.mark.parametrize("framework", [None, "hf_accelerate"])
def test_both_reasons_are_given(framework: str | None, tmp_path: Path) -> None:
    settings = transformers.BloomConfig(apply_residual_connection_post_layernorm=True, n_layer=1, n_head=2)
    write_model(tmp_path, settings)
    choice = engine_choice.choose(tmp_path, settings.to_dict(), framework, 1, trust_remote_code=False)
    with pytest.raises(UnsupportedModelError) as caught:
        choice.load(ALONE, torch.float32, CPU_KERNELS)
    ours = "apply_residual_connection_post_layernorm True of the configuration is not supported; through "
    assert str(caught.value).startswith(f"{ours}transformers: model type 'bloom' cannot be served")


@pytest.mark.parametrize(("model", "is_known"), [("ours", True), ("a feature of theirs", False)])
def test_the_log_recommends_the_faster_engine(
    model: str, is_known: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that the log recommends tgis_native only for models that it can run; a known type is not
    enough."""
    settings = CONFIGS[model].to_dict()
    edit_config(tmp_path, settings)
    engine_choice.choose(tmp_path, settings, "hf_transformers", 1, trust_remote_code=False)
    assert ("tgis_native would serve this model faster" in caplog.text) is is_known
    assert ("scale_attn_by_inverse_layer_idx True" in caplog.text) is not is_known
