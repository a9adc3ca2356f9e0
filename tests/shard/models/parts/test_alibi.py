"""ALiBi slopes against transformers' biases, for any number of heads."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_biases
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_biases
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt_biases

from tgis.shard.models.families import falcon, mpt
from tgis.shard.models.parts.alibi import alibi_slopes

HEADS = (1, 2, 3, 4, 6, 8, 12, 14, 16, 25, 32, 40, 71, 112, 128)
TWO_KEYS = torch.ones(1, 2, dtype=torch.int64)


@pytest.mark.parametrize("num_heads", HEADS)
def test_slopes_are_those_of_bloom(num_heads: int) -> None:
    biases = bloom_biases(TWO_KEYS, num_heads, torch.float32)  # [num_heads, 1, 2]
    assert alibi_slopes(num_heads) == pytest.approx((biases[:, 0, 1] - biases[:, 0, 0]).tolist(), rel=1e-5)


@pytest.mark.parametrize("bias_max", [8, 16, 5])
@pytest.mark.parametrize("num_heads", HEADS)
def test_slopes_are_those_of_mpt(num_heads: int, bias_max: int) -> None:
    """Storywriter has a maximum bias of 16, which transformers' model ignores."""
    sizes = {"d_model": 8 * num_heads, "n_heads": num_heads, "n_layers": 1, "vocab_size": 9}
    actual = mpt.spec({**sizes, "attn_config": {"alibi_bias_max": bias_max}}).slopes
    biases = mpt_biases(num_heads, 2, bias_max)  # [num_heads, 1, 2]
    assert actual == pytest.approx((biases[:, 0, 1] - biases[:, 0, 0]).tolist(), rel=1e-5)


@pytest.mark.parametrize("num_heads", HEADS)
def test_slopes_are_those_of_falcon(num_heads: int) -> None:
    """Falcon rounds slopes to bfloat16 and scales them like scores."""
    sizes = {"hidden_size": 64 * num_heads, "num_attention_heads": num_heads, "num_hidden_layers": 1}
    spec = falcon.spec({**sizes, "model_type": "falcon", "vocab_size": 9, "alibi": True})
    biases = falcon_biases(TWO_KEYS, num_heads, torch.float32)  # [num_heads, 1, 2]
    assert torch.equal(torch.tensor(spec.slopes), biases[:, 0, 1] / 8)
