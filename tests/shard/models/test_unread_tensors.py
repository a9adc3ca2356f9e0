"""Tensors that a model does not read: known ones are ignored, all others are refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.shard.checkpoints import SMALL, edit_config, find_auto_class, write_model
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.stepping import ALONE, read_config
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.collectives import ProcessGroup
from tgis.shard.models import registry
from tgis.shard.models.hf_transformers import load as hf_transformers
from tgis.shard.models.registry import FAMILIES
from tgis.shard.models.unread_tensors import refuse_unread

# The first case of each family, by the name of its module.
FIRST_CASES = {
    FAMILIES[make().model_type].__name__.rpartition(".")[2]: name for name, make in reversed(CASES.items())
}
LAYER_KEYS = {"t5": "num_decoder_layers", "bart": "decoder_layers"}
LAYER_OF_NAME = re.compile(r"(?:^|\.)(?:layers|blocks?|h)\.(\d+)\.")

# Additional tensors of published checkpoints, by family.
PUBLISHED = {
    "llama": (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.rotary_emb.cos_cached",
        "model.rotary_emb.inv_freq",
        "score.weight",
        "v_head.summary.weight",
        "medusa_head.0.0.linear.weight",
        "model.mm_projector.0.weight",
        "model.image_newline",
        "model.vision_tower.vision_tower.vision_model.embeddings.class_embedding",
        "model.layers.0.self_attn.core_attention._extra_state",
    ),
    "mistral": ("vision_tower.ln_pre.weight", "multi_modal_projector.linear_1.weight", "value_head.weight"),
    "qwen2": ("model.layers.0.self_attn.rotary_emb.inv_freq", "visual.merger.mlp.0.weight", "score.weight"),
    "qwen3": ("classifier.weight", "mtp.layers.0.input_layernorm.weight"),
    "qwen3_5": ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "model.visual.patch_embed.proj.bias"),
    "granite": ("speculator.head.0.weight", "lm_head.weight"),
    "gemma3": (
        "vision_tower.vision_model.post_layernorm.bias",
        "multi_modal_projector.mm_soft_emb_norm.weight",
    ),
    "gemma4": (
        "model.layers.4.self_attn.k_proj.weight",
        "model.layers.5.self_attn.v_proj.weight",
        "model.layers.5.self_attn.k_norm.weight",
        "model.audio_tower.output_proj.bias",
        "model.embed_vision.embedding_projection.weight",
    ),
    "phi3": ("model.vision_embed_tokens.img_projection.0.weight", "score.weight"),
    "gpt_neox": (
        "gpt_neox.layers.0.attention.bias",
        "gpt_neox.layers.0.attention.masked_bias",
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq",
    ),
    "gpt2": (
        "h.0.attn.bias",
        "transformer.h.1.attn.masked_bias",
        "lm_head.weight",
        "multiple_choice_head.summary.weight",
        "v_head.summary.bias",
    ),
    "gpt_bigcode": ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"),
    "bloom": ("h.0.self_attention.scale_mask_softmax.causal_mask", "lm_head.weight", "score.weight"),
    "falcon": ("transformer.h.0.self_attention.maybe_rotary.inv_freq", "lm_head.weight"),
    "mpt": ("lm_head.weight", "score.weight"),
    "opt": ("model.decoder.version", "lm_head.weight", "score.weight"),
    "t5": (
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "lm_head.weight",
        "classification_head.dense.weight",
    ),
    "bart": (
        "model.encoder.version",
        "decoder.version",
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "lm_head.weight",
        "classification_head.out_proj.bias",
        "qa_outputs.weight",
    ),
}
# Tensors that no family reads and that are not ignored, most of them with names similar to ignored ones.
STRANGE = (
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.self_attn.bias_k",
    "model.layers.0.mlp.down_proj.bias",
    "model.layers.0.self_attn.score.weight",
    "model.layers.0.version",
    "model.layers.0.embed_tokens.weight",
    "model.layers.0.mtp.weight",
    "model.layers.0.vision.weight",
    "model.layers.2.input_layernorm.weight",
    "lm_head.bias",
    "model.norm.bias",
    "other",
    "decoder.block.1.layer.1.EncDecAttention.relative_attention_bias.weight",
    "decoder.layers.0.final_layer_norm.weight",
)


class Written:
    """Checkpoints of each family, written when a test first needs them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(self, family: str) -> Path:
        directory = self._root / family
        if not directory.exists():
            write_model(directory, CASES[FIRST_CASES[family]]())
        return directory


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("ignored"))


def load(directory: Path, group: ProcessGroup = ALONE) -> object:
    return registry.load(directory, read_config(directory), group, torch.float32)


def load_through_transformers(directory: Path) -> object:
    spec = hf_transformers.make_spec(directory, read_config(directory), False)
    return hf_transformers.load(directory, spec, ALONE, torch.float32, False)


def refusal(read: Callable[[], object]) -> str:
    with pytest.raises(WeightsError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def said(directory: Path, count: int, first: str) -> str:
    """Return the beginning of the refusal."""
    return (
        f"{directory}: config.json describes a model without {count} of the checkpoint's tensors, the first "
        f"of which is {first}. It names too few layers or experts, "
    )


def stored(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def copy(source: Path, target: Path, added: dict[str, Tensor], **changes: Any) -> Path:
    """Return a copy of the checkpoint with additional tensors and another configuration."""
    save_file({**stored(source), **added}, target / "model.safetensors", {"format": "pt"})
    edit_config(target, read_config(source) | changes)
    return target


def fewer_layers(family: str, config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the configuration without its last layer, and the index of that layer."""
    text = config.get("text_config", config)
    if "layers_block_type" in text:  # it has the number of layers too
        kinds = text["layers_block_type"][:-1]
        return {**config, "layers_block_type": kinds}, len(kinds)
    keys = (LAYER_KEYS.get(family, ""), "num_hidden_layers", "n_layer", "n_layers")
    key = next(key for key in keys if key in text)
    last = text[key] - 1
    changed = {**text, key: last}
    for per_layer in ("layer_types", "layer_rope_theta"):
        if text.get(per_layer) is not None:
            changed[per_layer] = text[per_layer][:last]
    return ({**config, "text_config": changed} if "text_config" in config else changed), last


# Without the last layer, another layer of Gemma 4 has another shape, and Granite 4 here has no attention.
@pytest.mark.parametrize("family", sorted(FIRST_CASES.keys() - {"gemma4", "granitemoehybrid"}))
def test_a_layer_that_the_configuration_leaves_out(family: str, written: Written, tmp_path: Path) -> None:
    source = written.find(family)
    config, last = fewer_layers(family, read_config(source))
    copy(source, tmp_path, {})
    edit_config(tmp_path, config)
    left_out = [
        name
        for name in stored(source)
        if (actual := LAYER_OF_NAME.search(name))
        and int(actual[1]) == last
        and not name.startswith(("encoder", "model.encoder", "vision_tower", "model.vision_tower"))
    ]
    assert left_out
    for group in (ALONE, ProcessGroup(1, 2)):
        assert refusal(lambda group=group: load(tmp_path, group)).startswith(
            said(tmp_path, len(left_out), min(left_out))
        )


@pytest.mark.parametrize(("family", "key"), [("t5", "num_layers"), ("bart", "encoder_layers")])
def test_a_layer_of_the_encoder(family: str, key: str, written: Written, tmp_path: Path) -> None:
    source = written.find(family)
    last = read_config(source)[key] - 1
    copy(source, tmp_path, {}, **{key: last})
    assert re.search(
        rf"the first of which is (model\.)?encoder\.(block|layers)\.{last}\.", refusal(lambda: load(tmp_path))
    )


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe", "gpt_oss"])
def test_an_expert_that_the_configuration_leaves_out(family: str, written: Written, tmp_path: Path) -> None:
    """The router is cut as well, so that its shape does not reveal the expert."""
    source = written.find(family)
    last = read_config(source)["num_local_experts"] - 1
    routers = {
        name: tensor[:last].clone()
        for name, tensor in stored(source).items()
        if name.endswith((".gate.weight", "router.layer.weight", "router.weight", "router.bias"))
    }
    assert routers
    copy(source, tmp_path, routers, num_local_experts=last)
    if family in ("granitemoe", "gpt_oss"):  # which have all experts of a layer in one tensor
        fused = ("put_linear.weight", "_proj", "_proj_bias")
        names = [f"{name}[{last}]" for name in stored(source) if name.endswith(fused)]
    else:
        names = [name for name in stored(source) if f".experts.{last}." in name]
    assert refusal(lambda: load(tmp_path)).startswith(said(tmp_path, len(names), min(names)))


def published(family: str, source: Path) -> dict[str, Tensor]:
    """Return the ignored tensors. A head is a copy of the table of tokens."""
    tensors = stored(source)
    table = next(
        x for name, x in tensors.items() if re.search(r"embed_(tokens|in)|wte|word_emb|shared", name)
    )
    names = [name for name in PUBLISHED[family] if name not in tensors]
    return {name: table.clone() if name == "lm_head.weight" else torch.zeros(2, 3) for name in names}


@pytest.mark.parametrize("family", PUBLISHED)
def test_additional_tensors_of_published_checkpoints(family: str, written: Written, tmp_path: Path) -> None:
    source = written.find(family)
    load(copy(source, tmp_path, published(family, source)))


def test_the_last_norm_of_an_opt_that_was_removed(written: Written, tmp_path: Path) -> None:
    source = written.find("opt")
    assert "model.decoder.final_layer_norm.weight" in stored(source)
    load(copy(source, tmp_path, {}, _remove_final_layer_norm=True))


@pytest.mark.parametrize("name", STRANGE)
def test_unknown_tensors(name: str, written: Written, tmp_path: Path) -> None:
    copy(written.find("llama"), tmp_path, {name: torch.zeros(2, 3)})
    assert refusal(lambda: load(tmp_path)).startswith(said(tmp_path, 1, name))


def test_the_first_is_that_of_the_first_layer(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in (10, 9, 11)] + ["score.weight"]
    text = refusal(lambda: refuse_unread(tmp_path, names, {}))
    assert text.startswith(said(tmp_path, 3, "model.layers.9.mlp.up_proj.weight"))


@pytest.mark.parametrize("place", ["", "text_config"])
def test_layers_that_predict_further_tokens(place: str, tmp_path: Path) -> None:
    """They are known if the configuration counts them; others are not."""
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    config = {place: config} if place else config
    refuse_unread(tmp_path, ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"], config)
    for i in (1, 3):
        name = f"model.layers.{i}.eh_proj.weight"
        assert refusal(lambda name=name: refuse_unread(tmp_path, [name], config)).startswith(
            said(tmp_path, 1, name)
        )


@pytest.mark.parametrize("odd", [None, True, "1", 1.0, [1], -1, 0])
def test_an_odd_number_of_layers_ahead_names_none(odd: object, tmp_path: Path) -> None:
    name = "model.layers.2.eh_proj.weight"
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": odd}
    assert refusal(lambda: refuse_unread(tmp_path, [name], config)).startswith(said(tmp_path, 1, name))


def names_of(config: transformers.PretrainedConfig) -> set[str]:
    """Return the names of all parameters in transformers, built without tensors."""
    with torch.device("meta"):
        return {name for name, _ in find_auto_class(config).from_config(config).named_parameters()}


def test_the_list_hides_nothing_that_a_model_needs() -> None:
    """Of all families' parameters, the list contains only tables that are stored under several names, OPT's
    optional norm, and vision parts."""
    hidden = set()
    for make in CASES.values():
        for name in names_of(make()):
            try:
                refuse_unread(Path(), [name], {})
                hidden.add(name)
            except WeightsError:
                continue
    parts = tuple(
        prefix + part
        for part in ("vision_tower.", "vision_model.", "visual.", "embed_vision.", "multi_modal_projector.")
        for prefix in ("", "model.")
    )
    seen = {name for name in hidden if name.startswith(parts)}
    norms = {f"model.decoder.final_layer_norm.{end}" for end in ("weight", "bias")}
    tables = {"shared.weight", "model.shared.weight", "model.decoder.embed_tokens.weight"}
    assert seen
    assert hidden - seen == norms | tables | {"decoder.final_layer_norm.weight"}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_through_transformers(family: str, written: Written, tmp_path: Path) -> None:
    source = written.find(family)
    load_through_transformers(copy(source, tmp_path, published(family, source)))
    config, last = fewer_layers(family, read_config(source))
    edit_config(tmp_path, config)
    text = refusal(lambda: load_through_transformers(tmp_path))
    assert re.search(
        rf"without \d+ of .*, the first of which is (model\.layers|transformer\.h)\.{last}\.", text
    )


def test_unknown_tensors_through_transformers(tmp_path: Path) -> None:
    write_model(tmp_path, transformers.CohereConfig(**SMALL))
    load_through_transformers(tmp_path)
    copy(tmp_path, tmp_path, {"model.layers.0.extra.weight": torch.zeros(2, 3)})
    text = refusal(lambda: load_through_transformers(tmp_path))
    assert text.startswith(said(tmp_path, 1, "model.layers.0.extra.weight"))


def test_through_transformers_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    write_model(tmp_path, transformers.CohereConfig(**SMALL))
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(2, 3)}
    load_through_transformers(copy(tmp_path, tmp_path, extra, num_nextn_predict_layers=1))
