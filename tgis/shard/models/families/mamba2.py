"""Mamba 2, Codestral Mamba: layers of Mamba 2 only, without attention and MLPs."""

from tgis.shard.checkpoint.weights import Source, first_of
from tgis.shard.models.config_reader import Config, integer, number, refuse_others
from tgis.shard.models.families import granitemoehybrid
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.spec import Branches, DecoderSpec, MambaSpec

MODEL_TYPES: tuple[str, ...] = ("mamba2",)


def spec(config: Config) -> DecoderSpec:
    refuse_others(config, hidden_act="silu")
    num_layers = integer(config, "num_hidden_layers", 64)
    kind: Branches = "mixer"
    return DecoderSpec(
        num_layers=num_layers,
        hidden_size=integer(config, "hidden_size", 4096),
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        intermediate_size=0,
        vocab_size=integer(config, "vocab_size", 32768),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        branches=(kind,) * num_layers,
        mamba=_mamba(config, num_layers),
        tie_embeddings=bool(config.get("tie_word_embeddings")),
    )


def sources(spec: DecoderSpec) -> dict[str, Source]:
    embedding = first_of("backbone.embeddings", "backbone.embedding")
    return {
        "embed": embedding,
        "blocks.{i}.norm_1": "backbone.layers.{i}.norm",
        **granitemoehybrid.mamba_sources("backbone.layers.{i}.mixer"),
        "norm": "backbone.norm_f",
        "head": first_of("lm_head", embedding) if spec.tie_embeddings else "lm_head",
    }


def _mamba(config: Config, num_layers: int) -> MambaSpec:
    width = integer(config, "expand", 2) * integer(config, "hidden_size", 4096)
    num_heads, head_dim = integer(config, "num_heads", 128), integer(config, "head_dim", 64)
    if num_heads * head_dim != width:
        raise UnsupportedModelError(f"{num_heads} Mamba heads of {head_dim} are not {width} channels")
    renamed = {
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": integer(config, "n_groups", 8),
        "mamba_d_state": integer(config, "state_size", 128),
        "mamba_d_conv": integer(config, "conv_kernel", 4),
        "mamba_conv_bias": config.get("use_conv_bias"),
        "mamba_proj_bias": config.get("use_bias"),
        "time_step_limit": config.get("time_step_limit"),
    }
    return granitemoehybrid.read_mamba(renamed, frozenset(range(num_layers)), width)
