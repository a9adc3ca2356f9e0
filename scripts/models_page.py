"""`docs/models.md`, from the families that the shard knows."""

from inspect import getdoc

from tgis.shard.models import registry
from tgis.shard.models.unread_tensors import IGNORED

INTRODUCTION = """\
# Models

The family of a model is the `model_type` of its `config.json`. Those of the table run on this service's own engine
(`DEPLOYMENT_FRAMEWORK` unset, or `tgis_native`). If a configuration asks for something that its family does not
compute, the model runs through transformers' code with a warning, or is refused; `tgis_native` always refuses it.
"""
COLUMNS = ("family", "what it is", "`model_type`", "kind")
OTHERS = """\
All of them can be sharded (`--num-shard`) and quantized (`--quantize int8`), and take soft prompts and adapters. The
tests compare tiny models of every family with transformers in float32, on one shard, and Llamas on two; accuracy and
speed were measured with Llama's shapes only.

## Sharding

`--num-shard` splits every native model: attention by heads, feed-forward layers and each expert by width, the
embedding and the head by tokens. The number of attention heads and the widths must be divisible by the number of
shards; if there are fewer key/value heads than shards, neighbours share them; the vocabulary need not be divisible. A
model that cannot be split is refused with its numbers.

## Soft prompts and adapters

Prompts may be for the decoder, the encoder or both; their embeddings stand where those of tokens do. Adapters may be of
any linear layers, of the embeddings of tokens and of the head, by the names that PEFT gives these modules.

## Everything else

A causal model of no family above runs through transformers' own code with this service's cache and attention, if that
code asks transformers' attention interface for its attention (`DEPLOYMENT_FRAMEWORK` unset or `hf_transformers`). At
start, its scores of a few tokens are computed with the cache and without; if they differ, the model is refused with the
reason. Every shard then holds the whole model, and there are no soft prompts and no adapters. Code that is part of a
checkpoint runs only with `TRUST_REMOTE_CODE=true`.

`hf_transformers` and `hf_accelerate` ask for that code for models of the table too, on one shard. Encoder-decoders, models
with ALiBi, Falcon and models with a `dynamic` or `longrope` rope cannot run there: the service's own engine serves them,
with a warning, and with soft prompts and adapters.

`hf_optimum_ort` runs a decoder-only model in ONNX form on ONNX Runtime (`pip install 'tgis-next[onnx]'`).
"""


UNREAD = """\
## Tensors that are not read

A checkpoint is refused at the start if it has tensors that are not part of the model in its `config.json`: more layers
or experts than the configuration names, or biases that it leaves out. The error names the first. Only these are left
unread, in the checkpoint of any family, and layers that predict further tokens, if `num_nextn_predict_layers` counts
them:
"""


def render() -> str:
    rows = [_row(module) for module in registry.MODULES]
    table = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
    unread = [f"- {kind}" for kind in IGNORED]
    return "\n".join([INTRODUCTION, *table, "", OTHERS, UNREAD, *unread, ""])


def _row(module: registry.Family) -> list[str]:
    name, _, what = " ".join((getdoc(module) or "").split()).partition(": ")
    assert name, "a family says what it is"
    types = ", ".join(f"`{model_type}`" for model_type in module.MODEL_TYPES)
    kind = "encoder-decoder" if module in registry.ENCODER_DECODERS else "decoder"
    return [name.rstrip("."), what.rstrip("."), types, kind]
