"""Qwen 3.5, whose text part is served: Qwen 3 Next without experts, with a matrix for each projection of
gated DeltaNet."""

from tgis.shard.checkpoint.weights import Source, stack
from tgis.shard.models.config_reader import Config, section
from tgis.shard.models.families import qwen3_next
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("qwen3_5", "qwen3_5_text")
PREFIX = "language_model."

# Values that a configuration may leave out.
DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "vocab_size": 248320,
}


def spec(config: Config) -> DecoderSpec:
    return qwen3_next.dense_spec({**DEFAULTS, **read_text_config(config)})


def sources(spec: DecoderSpec) -> dict[str, Source]:
    mixer = "model.layers.{i}.linear_attn."
    return {
        **qwen3_next.attention_sources(spec),
        "blocks.{i}.delta_net.in": stack(mixer + "in_proj_z", mixer + "in_proj_qkv"),
        "blocks.{i}.delta_net.gates": stack(mixer + "in_proj_b", mixer + "in_proj_a"),
    }


def read_text_config(config: Config) -> Config:
    """Return the configuration of the text part. Raises UnsupportedModelError."""
    if "text_config" not in config:
        return config
    text = section(config, "text_config")
    is_tied = any(part.get("tie_word_embeddings") for part in (config, text))
    return {**text, "tie_word_embeddings": is_tied}
