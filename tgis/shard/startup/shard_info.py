"""Describes a shard to the router, except the size of its cache."""

from tgis.hub import model_files
from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.loading import read_names
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.startup.load_plan import LoadPlan


def describe_shard(plan: LoadPlan) -> pb.InfoResponse:
    config, spec, directory = plan.config, plan.choice.spec, plan.directory
    kinds = pb.InfoResponse.ModelKind
    info = pb.InfoResponse(
        model_kind=kinds.MODEL_KIND_DECODER_ONLY,
        model_type=plan.settings["model_type"],
        vocab_size=spec.vocab_size,
        eos_token_ids=model_files.eos_token_ids(directory),
        block_size=config.block_size,
        rank=config.rank,
        world_size=config.world_size,
        epoch=config.epoch,
        weight_dtype=plan.weight_type,
        cache_dtype=plan.cache_type.name,
        rope_switch_len=spec.rope_switch_len,
        pad_token_id=model_files.pad_token_id(directory, plan.tokenizer_directory, spec.vocab_size),
        prompt_cache_bytes=plan.limits.prompt_bytes,
        adapter_cache_bytes=plan.limits.adapter_bytes,
        preloaded_adapter_ids=read_names(config.lora_adapters),
        replaced_kernels=plan.on.replaced_kernels,
    )
    if spec.is_encoder_decoder:
        info.model_kind = kinds.MODEL_KIND_ENCODER_DECODER
        info.decoder_start_token_id = _find_start_token_id(plan)
    return info


def _find_start_token_id(plan: LoadPlan) -> int:
    generation = model_files.read_json(plan.directory, "generation_config.json")
    for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        for settings in (plan.settings, generation):
            if type(settings.get(key)) is int:
                if settings[key] not in range(plan.choice.spec.vocab_size):
                    raise UnsupportedModelError(f"{key} {settings[key]} is not a token id of the model")
                return int(settings[key])
    raise UnsupportedModelError("the configuration has no decoder_start_token_id")
