"""--rope-scaling and --rope-factor beyond a model's length: same logits as transformers with the same rotary
parameters, and refusals with a reason."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.shard.checkpoints import SMALL, edit_config, write_model
from tests.support.shard.driver import configure
from tests.support.shard.stepping import ALONE, Stepper, read_config
from tgis.config.model import ModelOptions
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.rope_option import RopeOption, read_rope_option
from tgis.shard.startup import engine_choice
from tgis.shard.startup.prepare import prepare

LENGTH = 16  # of the models
IDS = [5 + (7 * i) % 90 for i in range(48)]
SIZES = {**SMALL, "max_position_embeddings": LENGTH}
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    # Partial rotary embedding.
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    # Layers with a window have a separate rotary embedding, which is not scaled.
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 6}, head_dim=8, sliding_window=6
    ),
    # Served only with transformers' code.
    "stablelm": lambda: transformers.StableLmConfig(**SIZES, partial_rotary_factor=0.5),
    "bloom": lambda: transformers.BloomConfig(
        hidden_size=32, n_layer=2, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=2
    ),
    "biogpt": lambda: transformers.BioGptConfig(**SIZES),
    "mt5": lambda: transformers.MT5Config(
        d_model=32, d_ff=48, d_kv=8, num_layers=1, num_heads=4, vocab_size=99, decoder_start_token_id=0
    ),
}
Models = Callable[[str], Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("roped")

    def find(case: str) -> Path:
        if not (root / case).exists():
            write_model(root / case, CONFIGS[case]())
        return root / case

    return find


def score_by_transformers(directory: Path, **rope: Any) -> Tensor:
    """Return the logprobs after each token. Tokens are computed one by one, so keys keep the frequencies of
    the length at which they were computed."""
    config = transformers.AutoConfig.from_pretrained(directory)
    nested = config.rope_parameters.get("full_attention", config.rope_parameters)
    nested |= rope
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, config=config).eval()
    cache, result = transformers.DynamicCache(config=config), []
    with torch.inference_mode():
        for place, token in enumerate(IDS):
            ids, position = torch.tensor([[token]]), torch.tensor([[place]])
            result.append(model(ids, position_ids=position, past_key_values=cache).logits[0])
    return torch.cat(result).log_softmax(-1)


def score(directory: Path, rope: RopeOption | None, chunk: int, framework: str | None = None) -> Tensor:
    settings = read_config(directory)
    choice = engine_choice.choose(directory, settings, framework, 1, trust_remote_code=False, rope=rope)
    stepper = Stepper(choice.load(ALONE, torch.float32, CPU_KERNELS), block_size=16)  # type: ignore[arg-type]
    spans = [(start, min(start + chunk, len(IDS))) for start in range(0, len(IDS), chunk)]
    logits = [stepper.step({0: (IDS[:end], start)})[0] for start, end in spans]
    return torch.cat(logits).log_softmax(-1)


@pytest.mark.parametrize(
    ("case", "framework", "kind"),
    [
        ("llama", None, "linear"),
        ("llama", None, "dynamic"),
        ("gpt_neox", None, "dynamic"),
        ("gemma3_text", None, "linear"),
        ("llama", "hf_transformers", "linear"),
        ("stablelm", None, "linear"),
    ],
)
def test_scores_beyond_the_length_are_those_of_transformers(
    case: str, framework: str | None, kind: str, models: Models
) -> None:
    expected = score_by_transformers(models(case), rope_type=kind, factor=3.0)
    for chunk in (7, 100):
        actual = score(models(case), RopeOption(kind, 3.0), chunk, framework)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    plain = score(models(case), None, 100, framework)
    assert (plain - expected)[-1].abs().max() > 0.01, "the option changes the scores"


def test_dynamic_runs_in_the_native_engine_instead_of_transformers(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    """In transformers' code, sequences of one step would affect each other. Models that only it supports are
    refused."""
    option = RopeOption("dynamic", 2.0)
    settings = read_config(models("llama"))
    choice = engine_choice.choose(models("llama"), settings, "hf_transformers", 1, False, rope=option)
    assert choice.engine == "tgis_native"
    with pytest.raises(UnsupportedModelError, match="its rotary embedding, dynamic, lets sequences"):
        score(models("stablelm"), option, 100)


@pytest.mark.parametrize("case", ["bloom", "biogpt", "mt5"])
def test_a_model_without_rotary_positions_is_refused(case: str, models: Models) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        score(models(case), RopeOption("linear", 2.0), 100)
    reason = "--rope-scaling and --rope-factor do not apply to this model: the model has no rotary positions"
    assert str(error.value) == reason


def test_code_that_ignores_a_scaling_is_refused(models: Models, tmp_path: Path) -> None:
    shutil.copytree(models("biogpt"), tmp_path, dirs_exist_ok=True)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    edit_config(tmp_path, {**read_config(tmp_path), "rope_parameters": rope})
    with pytest.raises(UnsupportedModelError, match="transformers' code of this model scales no rotary"):
        score(tmp_path, RopeOption("linear", 2.0), 100)


ONNX = Path(__file__).parents[2] / "data" / "onnx" / "half"


def test_other_refusals(models: Models, tmp_path: Path) -> None:
    for case in ("llama", "stablelm"):
        config = CONFIGS[case]()
        config.rope_parameters |= {"rope_type": "linear", "factor": 3.0}
        write_model(tmp_path / case, config)
        score(tmp_path / case, RopeOption("linear", 3.0), 100)  # as the configuration says
        for other in (RopeOption("linear", 2.0), RopeOption("dynamic", 3.0)):
            with pytest.raises(UnsupportedModelError, match="the model's configuration already has another"):
                score(tmp_path / case, other, 100)
    with pytest.raises(UnsupportedModelError, match="this model: an ONNX model computes its positions"):
        prepare(configure(ONNX, deployment_framework="hf_optimum_ort", rope_factor=2.0))
    settings = read_config(models("llama"))
    del settings["max_position_embeddings"]
    edit_config(tmp_path, settings)
    with pytest.raises(UnsupportedModelError, match="model: dynamic needs the model's length"):
        engine_choice.choose(tmp_path, settings, None, 1, False, rope=RopeOption("dynamic", 2.0))


def test_meaning_of_the_options(models: Models) -> None:
    plain = ModelOptions()
    assert read_rope_option(plain) is None
    assert read_rope_option(replace(plain, rope_factor=2.0)) == RopeOption("linear", 2.0)
    assert read_rope_option(replace(plain, rope_scaling="dynamic")) == RopeOption("dynamic", 1.0)
    assert read_rope_option(replace(plain, rope_scaling="linear")) is None, "all positions divided by 1"
    plan = prepare(configure(models("llama"), rope_scaling="dynamic", rope_factor=2.0))
    assert plan.choice.spec.rope.scaling.factor == 2.0  # type: ignore[union-attr]
