"""Every field of the configurations of transformers: with another value, or without one, the model's outputs
are those of transformers, or the model is refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.shard.checkpoints import write_model
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.family_oracle import load_model
from tests.support.shard.stepping import compute_prompt, load
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.models.interface import UnsupportedModelError

# One case of each family of the last year.
NAMES = (
    "deepseek_v2_groups_yarn",
    "deepseek_v3",
    "falcon_h1",
    "gemma4_text",
    "gemma4_text_experts",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granite_swa",
    "granitemoe_swa_shared",
    "granitemoehybrid",
    "granitemoehybrid_experts_rope_biases",
    "llama4_text",
    "mamba2",
    "ministral3",
    "mistral4",
    "nemotron_h",
    "nemotron_h_experts",
    "olmo3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "smollm3",
)
# Fields without an effect on a generated token, and sizes of the vocabulary, from which token ids follow.
OTHERS = {"model_type", "architectures", "dtype", "transformers_version", "vocab_size", "initializer_range"}
OTHERS |= {"bos_token_id", "eos_token_id", "output_attentions", "output_hidden_states", "return_dict"}
OTHERS |= {"id2label", "label2id", "problem_type", "_name_or_path", "chunk_size_feed_forward"}
# Fields that transformers applies only to prompts, or also to stored weights.
DIFFERENT = {("nemotron_h", "time_step_min"), ("nemotron_h", "time_step_limit")}
DIFFERENT |= {("mamba2", "rescale_prenorm_residual")}
ACTIVATIONS = {"hidden_act", "hidden_activation", "mlp_hidden_act", "mamba_hidden_act"}
LISTS = {"layer_types", "layers_block_type", "mlp_layer_types"}
TOLERANCE = 2e-3
IDS = torch.randint(3, 99, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def other_values(key: str, value: Any) -> list[Any]:
    if key in ACTIVATIONS:
        return ["gelu", "relu2"]
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value * 2, value // 2]
        case float():
            return [value * 1.7]
        case None:
            return [True, 3, 0.5]
        case [*_] if key in LISTS:
            return [value[::-1], value[:1] * len(value)]
        case [0 | 1, *_]:
            return [[1 - each for each in value]]
        case [float(), *_]:
            return [[each * 1.3 for each in value]]
    return []


def list_changes(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in config.keys() - OTHERS:
        yield from ((key, value) for value in other_values(key, config[key]))


def can_write(directory: Path, config: transformers.PretrainedConfig, fields: dict[str, Any]) -> bool:
    """Write a model with these fields. Return False if transformers has no such model."""
    try:
        write_model(directory, type(config)(**fields))
    except Exception:
        return False
    return True


def expect(directory: Path) -> Tensor | None:
    """Return transformers' log-probabilities, or None if it cannot compute them."""
    try:
        model = load_model(directory, transformers.AutoConfig.from_pretrained(directory))
        with torch.inference_mode():
            expected = model(torch.tensor([IDS]), use_cache=False).logits[0].log_softmax(-1)
    except Exception:
        return None
    return expected if expected.isfinite().all() else None


def check(directory: Path, label: object) -> bool:
    """Compare the outputs. Return False if transformers cannot compute them, or if the model is refused."""
    expected = expect(directory)
    if expected is None:
        return False
    try:
        actual = compute_prompt(load(directory), IDS).log_softmax(-1)
    except (UnsupportedModelError, WeightsError):
        return False
    is_other = ~torch.isclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE).all(1)
    # One token may choose another expert whose score is the same but for a rounding error.
    assert is_other.sum() <= 1, (label, is_other.nonzero().flatten().tolist())
    return True


@pytest.mark.slow
@pytest.mark.parametrize("case", NAMES)
def test_other_values_agree_or_are_refused(case: str, tmp_path: Path) -> None:
    config = CASES[case]()
    fields = config.to_dict()
    num_compared = 0
    for key, value in sorted(list_changes(fields), key=str):
        if (config.model_type, key) in DIFFERENT:
            continue
        directory = tmp_path / "other"
        shutil.rmtree(directory, ignore_errors=True)
        if can_write(directory, config, {**fields, key: value}):
            num_compared += check(directory, (key, value))
    assert num_compared > 15


@pytest.mark.slow
@pytest.mark.parametrize("case", NAMES)
def test_missing_values_agree_or_are_refused(case: str, tmp_path: Path) -> None:
    write_model(tmp_path, CASES[case]())
    file = tmp_path / "config.json"
    fields, num_compared = json.loads(file.read_text()), 0
    for key in sorted(fields.keys() - OTHERS):
        file.write_text(json.dumps({name: value for name, value in fields.items() if name != key}))
        num_compared += check(tmp_path, key)
    assert num_compared > 5
