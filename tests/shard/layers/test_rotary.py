"""Rotary embeddings against transformers' for every scaling, read from configurations of any age; and
splitting, normalisation and rotation of heads, with the same bits in every batch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from tgis.shard.kernels.cpu.ops import CPU_KERNELS, split_heads
from tgis.shard.layers.ops import HeadNorm
from tgis.shard.layers.rotary import DynamicScaling, LinearScaling, LongScaling, Rope, Rotary
from tgis.shard.models.config_reader import rope
from tgis.shard.models.interface import UnsupportedModelError

HEAD_DIM = 16
LENGTH = 128  # max_position_embeddings
FACTORS = {
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
}
ORIGINAL = {"original_max_position_embeddings": 32}

# Each as `rope_parameters` without theta.
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
    "part of the channels": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn, part": {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.75, **ORIGINAL},
    "yarn, bounds": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 2.0, **ORIGINAL},
    "yarn, exact": {"rope_type": "yarn", "factor": 4.0, "truncate": False, **ORIGINAL},
    "yarn, amplitude": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, **ORIGINAL},
    "yarn, magnitudes": {
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        **ORIGINAL,
    },
    "yarn, one magnitude": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, **ORIGINAL},
    "yarn, no factor": {"rope_type": "yarn", "factor": None, **ORIGINAL},
    "longrope": {"rope_type": "longrope", **FACTORS, **ORIGINAL},
    "longrope, factor": {"rope_type": "longrope", "factor": 8.0, **FACTORS, **ORIGINAL},
    "longrope, amplitude": {"rope_type": "longrope", "attention_factor": 1.25, **FACTORS, **ORIGINAL},
    "longrope, no stretch": {"rope_type": "longrope", "factor": 1.0, **FACTORS, **ORIGINAL},
}


def configure(parameters: dict[str, Any]) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": 5000.0, **parameters},
    )


def turn_oracle(embedding: torch.nn.Module, positions: Tensor, *layer_type: str) -> Tensor:
    """Return transformers' cosines and sines, [2, num_tokens, dim / 2]."""
    turned = embedding(torch.empty(0), positions[None], *layer_type)
    return torch.stack([half[0, :, : half.shape[-1] // 2] for half in turned])


def assert_angles_are_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=3e-5)


@pytest.mark.parametrize("case", SCALINGS)
def test_scalings_are_those_of_transformers(case: str) -> None:
    """Positions are within the original length. If there are long sequences, 31 is the last position of a
    short one."""
    config = configure(SCALINGS[case])
    rotary = Rotary(rope(config.to_dict(), HEAD_DIM), CPU_KERNELS)
    positions = torch.tensor([0, 1, 5, 31, 30] if "longrope" in case else [0, 1, 5, 31, 127, 60])
    expected = turn_oracle(Phi3RotaryEmbedding(config), positions)
    assert_angles_are_close(rotary(positions), expected)
    assert torch.equal(rotary(positions), rotary(positions, torch.zeros(len(positions), dtype=torch.bool)))


@pytest.mark.parametrize("case", [case for case in SCALINGS if "longrope" in case])
def test_long_sequences_use_their_own_factors_everywhere(case: str) -> None:
    config = configure(SCALINGS[case])
    actual = rope(config.to_dict(), HEAD_DIM)
    assert actual.switch_len == 32
    rotary, positions = Rotary(actual, CPU_KERNELS), torch.tensor([0, 1, 5, 31, 32, 100])
    is_long = torch.ones(len(positions), dtype=torch.bool)
    expected = turn_oracle(Phi3RotaryEmbedding(config), positions)
    assert_angles_are_close(rotary(positions, is_long), expected)
    is_long[:2] = False
    assert_angles_are_close(rotary(positions, is_long)[:, 2:], expected[:, 2:])
    assert torch.equal(rotary(positions, is_long)[:, :2], rotary(positions[:2]))


def test_amplitudes_of_long_and_short_sequences_may_be_given() -> None:
    given = {"rope_type": "longrope", "short_mscale": 1.1, "long_mscale": 1.4, **FACTORS, **ORIGINAL}
    scaling = rope(configure(given).to_dict(), HEAD_DIM).scaling
    assert isinstance(scaling, LongScaling)
    assert (scaling.short_amplitude, scaling.long_amplitude) == (1.1, 1.4)
    actual = Rotary(Rope(HEAD_DIM, 5000.0, scaling), CPU_KERNELS)(
        torch.tensor([0, 0]), torch.tensor([False, True])
    )
    assert actual[0, 0].tolist() == pytest.approx([1.1] * 8)
    assert actual[0, 1].tolist() == pytest.approx([1.4] * 8)


def test_dynamic_scaling_grows_with_the_position() -> None:
    """Each position is rotated like transformers rotates the last token of a prompt that ends there."""
    config = configure(SCALINGS["dynamic"])
    actual = rope(config.to_dict(), HEAD_DIM)
    assert actual.scaling == DynamicScaling(2.0, LENGTH)
    assert actual.switch_len == 0
    positions = torch.tensor([0, 100, 127, 128, 129, 255, 700])
    turned = Rotary(actual, CPU_KERNELS)(positions)
    for i, position in enumerate(positions.tolist()):
        inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=position + 1)
        angle = position * inv_freq
        assert_angles_are_close(turned[:, i], torch.stack([angle.cos(), angle.sin()]))
    assert torch.equal(
        Rotary(actual, CPU_KERNELS)(positions[:3]), Rotary(Rope(HEAD_DIM, 5000.0), CPU_KERNELS)(positions[:3])
    )


@pytest.mark.parametrize(
    "scaling", [None, DynamicScaling(2.0, 50), LongScaling((2.0,), (3.0,), 50, 1.0, 1.2)]
)
def test_angles_do_not_depend_on_the_batch(scaling: Any) -> None:
    half = 1 if isinstance(scaling, LongScaling) else 5
    rotary, positions = Rotary(Rope(2 * half, 1e4, scaling), CPU_KERNELS), torch.arange(40, 101)
    is_long = positions % 3 == 0
    whole = rotary(positions, is_long)
    for i in range(len(positions)):
        assert torch.equal(rotary(positions[i : i + 1], is_long[i : i + 1]), whole[:, i : i + 1])


OLD = [
    case for case, given in SCALINGS.items() if given.get("factor", 0) is not None and case != "proportional"
]


@pytest.mark.parametrize("case", OLD)
def test_older_configurations_mean_the_same(case: str) -> None:
    config = configure(SCALINGS[case]).to_dict()
    expected = rope(config, HEAD_DIM)
    given = config.pop("rope_parameters")
    for key in ("rope_theta", "partial_rotary_factor"):
        config[key] = given.pop(key, None)
    assert rope({**config, "rope_scaling": given}, HEAD_DIM) == expected
    given["type"] = given.pop("rope_type")
    assert rope({**config, "rope_parameters": None, "rope_scaling": given}, HEAD_DIM) == expected
    if "original_max_position_embeddings" in given:
        config["original_max_position_embeddings"] = given.pop("original_max_position_embeddings")
        assert rope({**config, "rope_scaling": given}, HEAD_DIM) == expected


def test_nothing_given_means_the_original() -> None:
    assert rope({"rope_scaling": None}, HEAD_DIM) == Rope(HEAD_DIM, 10000.0)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi3_had_other_names_for_longrope(kind: str) -> None:
    shared = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    old = {**shared, **ORIGINAL, "rope_theta": 5000.0, "rope_scaling": {"type": kind, **FACTORS}}
    config = transformers.Phi3Config(
        **shared, **ORIGINAL, rope_parameters={"rope_type": "longrope", "rope_theta": 5000.0, **FACTORS}
    )
    assert rope(old, HEAD_DIM) == rope(config.to_dict(), HEAD_DIM)
    positions = torch.arange(32)
    expected = turn_oracle(Phi3RotaryEmbedding(config), positions)
    assert_angles_are_close(Rotary(rope(old, HEAD_DIM), CPU_KERNELS)(positions), expected)


def test_layers_of_gemma3_have_different_angles() -> None:
    config = transformers.Gemma3TextConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, head_dim=HEAD_DIM, max_position_embeddings=LENGTH,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    )  # fmt: skip
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    positions = torch.arange(100)
    for kind in ("full_attention", "sliding_attention"):
        actual = rope(config.to_dict(), HEAD_DIM, kind)
        assert rope(old, HEAD_DIM, kind) == actual
        expected = turn_oracle(Gemma3RotaryEmbedding(config), positions, kind)
        assert_angles_are_close(Rotary(actual, CPU_KERNELS)(positions), expected)
    assert rope({"rope_theta": 7e3}, HEAD_DIM, "sliding_attention") == Rope(HEAD_DIM, 7e3)


KINDS = "default, linear, dynamic, llama3, yarn, longrope, proportional"
REFUSED: dict[str, dict[str, Any]] = {
    f"rope type 'mrope' is not supported; supported are: {KINDS}": {"rope_type": "mrope"},
    f"rope type ['yarn'] is not supported; supported are: {KINDS}": {"rope_type": ["yarn"]},
    "rope parameters [2.0] are not supported": [2.0],
    "partial_rotary_factor 2.0 of the configuration is above 1": {
        "rope_type": "proportional",
        "partial_rotary_factor": 2,
    },
    "rotary embedding of 5 channels is not supported": {"partial_rotary_factor": 0.33},
    "rotary embedding of 32 channels is not supported": {"partial_rotary_factor": 2},
    "factor is missing in the model's configuration": {"rope_type": "linear"},
    "long_factor is missing in the model's configuration": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
    },
    "short_factor of the configuration is not a list of 8 positive numbers": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 7,
        "long_factor": [1.0] * 8,
    },
    "long_factor of the configuration is not a list of 8 positive numbers": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [1.0] * 7 + ["2"],
    },
}


@pytest.mark.parametrize("text", REFUSED)
def test_refuses_in_one_line(text: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        rope({"max_position_embeddings": LENGTH, "rope_scaling": REFUSED[text]}, HEAD_DIM)
    assert str(caught.value) == text


def turn(x: Tensor, dim: int, positions: Tensor) -> Tensor:
    """Rotate the first `dim` channels of x, [num_tokens, heads, head_dim], in double precision with complex
    numbers."""
    frequency = 100.0 ** (-torch.arange(0, dim, 2).double() / max(dim, 1)) / 2.0
    real, imaginary = x[..., :dim].double().chunk(2, -1)
    turned = torch.complex(real, imaginary) * 1.5 * torch.exp(1j * positions[:, None, None] * frequency)
    return torch.cat((turned.real, turned.imag, x[..., dim:].double()), -1)


@pytest.mark.parametrize("normed", ["", "keys", "values"])
@pytest.mark.parametrize("turned", [8, 6, None])
def test_split_heads(turned: int | None, normed: str) -> None:
    """Heads are normalised before their first channels are rotated. Without angles, they are not rotated."""
    torch.manual_seed(0)
    num_tokens, heads, kv_heads, dim = 1000, 3, 1, 8
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * dim)
    positions = torch.arange(num_tokens) + 5
    angles = None
    if turned:
        angles = Rotary(Rope(turned, 100.0, LinearScaling(2.0), amplitude=1.5), CPU_KERNELS)(positions)
    v_weight = torch.ones(dim) if normed == "values" else None
    norm = HeadNorm(torch.randn(dim), torch.randn(dim), 1e-5, v_weight) if normed else None
    q, k, v = split_heads(qkv, heads, kv_heads, angles, norm)
    given_q, given_k, given_v = qkv.view(num_tokens, -1, dim).double().split([heads, kv_heads, kv_heads], 1)
    if norm:
        given_q = F.rms_norm(given_q, (dim,), norm.q_weight.double(), 1e-5)
        given_k = F.rms_norm(given_k, (dim,), norm.k_weight.double(), 1e-5)
    if v_weight is not None:
        expected_v = F.rms_norm(given_v, (dim,), eps=1e-5)
        torch.testing.assert_close(v.double(), expected_v, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(v.double(), given_v)
    for actual, given in ((q, given_q), (k, given_k)):
        expected = turn(given, turned, positions) if turned else given
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)
    for i in (0, 8, 999):
        own_angles = None if angles is None else angles[:, i : i + 1].contiguous()
        alone = split_heads(qkv[i : i + 1], heads, kv_heads, own_angles, norm)
        assert all(torch.equal(mine[0], whole[i]) for mine, whole in zip(alone, (q, k, v), strict=True))
