"""Private parts of transformers that `transformers_internals.py` uses."""

import pytest
import transformers

from tgis.shard.models.hf_transformers.transformers_internals import keeps_state

MOVED = (
    f"transformers {transformers.__version__} is not what "
    "tgis/shard/models/hf_transformers/transformers_internals.py was checked with"
)


@pytest.mark.parametrize(
    ("config", "has_state"),
    [
        (transformers.MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1), True),
        (
            transformers.LlamaConfig(
                vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
            ),
            False,
        ),
    ],
    ids=["mamba", "llama"],
)
def test_models_with_a_state_are_marked(config: transformers.PretrainedConfig, has_state: bool) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert keeps_state(model) is has_state, MOVED
