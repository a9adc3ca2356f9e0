"""GPT-BigCode (StarCoder): GPT-2 with weights stored as [out, in], usually with multi-query attention."""

from dataclasses import replace

from tgis.shard.checkpoint.weights import Source, grouped
from tgis.shard.models.config_reader import Config
from tgis.shard.models.families import gpt2
from tgis.shard.models.spec import DecoderSpec

MODEL_TYPES: tuple[str, ...] = ("gpt_bigcode",)
PREFIX = gpt2.PREFIX


def spec(config: Config) -> DecoderSpec:
    shared = gpt2.spec(config)
    return replace(shared, num_kv_heads=1 if config.get("multi_query", True) else shared.num_heads)


def sources(spec: DecoderSpec) -> dict[str, Source]:
    layer = "transformer.h.{i}."
    qkv = layer + "attn.c_attn"
    return {
        **gpt2.sources(spec),
        "blocks.{i}.attention.qkv": qkv
        if spec.num_kv_heads == 1
        else grouped(qkv, spec.num_heads, spec.head_dim),
        "blocks.{i}.attention.out": layer + "attn.c_proj",
        "blocks.{i}.mlp.up": layer + "mlp.c_fc",
        "blocks.{i}.mlp.down": layer + "mlp.c_proj",
    }
