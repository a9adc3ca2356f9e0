"""Generates `docs/models.md` from the families that the shard implements."""

from inspect import getdoc

from tgis.convert.gguf.architectures import ARCHITECTURES
from tgis.shard.models import registry
from tgis.shard.models.unread_tensors import IGNORED

INTRODUCTION = """\
# Models

This page lists the models that can be served: families, quantized formats, GGUF architectures, and models that run on
other engines. The family of a model is the `model_type` of its `config.json`. The families in the table run on this
service's own engine (`DEPLOYMENT_FRAMEWORK` unset, or `tgis_native`). If a configuration needs a feature that its
family does not support, the service runs the model through transformers' code with a warning, or refuses it;
`tgis_native` always refuses it.
"""
COLUMNS = ("family", "what it is", "`model_type`", "kind", "quantized")
# Families whose checkpoints of every format are tested; for other families, one format is tested.
EACH_FORMAT = ("llama", "mixtral", "granitemoe", "gpt2", "falcon", "t5")
OTHERS = f"""\
All of them support sharding (`--num-shard`), quantization (`--quantize`), soft prompts and adapters. The tests compare
tiny models of every family with transformers in float32 on one shard, and Llama models on two. Accuracy and speed were
measured only with models of Llama's shape and Gemma 3.

Names of tensors may lack the name of the base model (`model.`, `transformer.`, `backbone.` or `gpt_neox.`), as in
checkpoints that were saved from transformers' `LlamaModel` instead of `LlamaForCausalLM`. Such a checkpoint is served
if its head is the table of tokens, or if the head was added to it.

## Models that keep a state

Models with Mamba layers (Granite 4, Nemotron-H, Falcon H1, Mamba 2) and with gated DeltaNet (Qwen 3 Next, Qwen 3.5) keep
a state for each sequence, in float32 and in addition to the keys and values of their attention layers: 56 MiB for
`granite-4.0-h-tiny`, 75 MiB for `Qwen3-Next-80B-A3B`. At startup, a shard reserves states for `--max-batch-size`
sequences and as many snapshots, but at most half of the cache's memory, or what the blocks leave. If there are fewer
states than sequences, the others wait. The log reports the number and size; `tgi_state_usage_ratio` and
`tgi_state_snapshots` report their use ([how it works](how-it-works.md)). `--kv-cache-memory-fraction` increases both.

On CPUs, speculators can draft for these models (`--speculator`): a step stores the states after each token of a sequence
with drafts, and keeps the one after the last accepted draft, so nothing is copied or computed again. For this, a shard
reserves further states, one more than the speculator drafts for each of 8 sequences, which the log names; at most 8
sequences have drafts in a step. Drafts of repeated tokens (`--speculate` without `--speculator`) are off, with a warning.
The numbers of heads and groups of Mamba layers, and of
heads of values and of keys of gated DeltaNet, must be divisible by the number of shards, but shards may share a group or
a key. Weights of the convolutions and decays are always float32, and `--quantize` leaves the projections of gated
DeltaNet's decays and strengths in `--dtype`. Constant factors of Falcon H1 are never multiplied into matrices, so
quantized checkpoints are read as they are. Images of Qwen 3.5 are not served. Qwen 3 Next and 3.5 need at least one layer with attention.

A model without attention, such as Mamba 2, has a KV cache whose blocks take no memory. The router still counts its tokens
in blocks, because prefixes are found by them, so `--kv-cache-tokens` limits it like other models; without the option, the
blocks suffice for `--max-batch-size` requests of maximum length. All of the cache's memory is for states.

transformers raises the time steps of Nemotron-H to `time_step_min` in prompts, but not in generated tokens. This service
uses `time_step_limit` for both, which sets no limit by default.

## Processors

| processor | what has run |
| --- | --- |
| x86, 64 bits: AVX2, AVX-512, AMX | the service and its tests; [measured](performance.md) |
| NVIDIA GPU | one H200 ([GPUs](gpu.md)) |
| ARM servers, 64 bits: Neoverse N1 (Ampere Altra, Graviton 2) and V2 (Graviton 4, Axion, Grace) | nothing has run on a real ARM machine, and no speed was measured. `make test-all` compiles all kernels for both, and runs tests of kernels in QEMU: attention in prompts and decoding with every type of cache, with bfloat16 arithmetic, and in segments of keys; rows and matrix products of floats, int8, and codes, also those of GGUF files; LoRA, Mamba, gated DeltaNet, norms and activations |

On ARM, products of integer codes use the dot product (`sdot`), and 4-bit codes are looked up with NEON. bfloat16
arithmetic is emulated, as on x86 processors without AVX512_BF16, so `--cpu-arithmetic auto` selects float32: `bfdot`
rounds differently, and `bfmlalb` multiplies no more numbers per instruction than float32's. `locks/service.lock` has
wheels for ARM, which need glibc 2.31 or later, and `locks/torch-cpu.lock` the hashes of torch's builds for ARM and x86.
The image is built on an ARM machine by the same commands ([deployment](deployment.md#the-image)).

## Models that GPUs do not run

GPUs run the models of all families above, except those whose layers have different heads (Gemma 4) and those with
latent attention. They also run models through transformers' code, on one shard and without CUDA graphs
([GPUs](gpu.md#transformers-code)), and with `DEPLOYMENT_FRAMEWORK=hf_transformers` Gemma 4 and models with latent
attention. They do not run ONNX models. No model that keeps a state and none that transformers' code runs has run on a
GPU yet: they were tested only by an interpreter, by compiling their kernels and on an emulated device
([GPUs](gpu.md#how-it-was-tested)).

One rule holds for every model that GPUs do not run. With `--device auto`, it runs on the CPU, and a warning has the
reason. With `--device cuda`, the shard does not start, and the error has the reason.

## Latent attention

DeepSeek, GLM 4.7 Flash and Mistral 4 cache one vector per token and layer, the latent, from which the keys and values
of all heads are products: with its rotated part, 576 numbers for DeepSeek V3. Attention reads latents directly, for
prompts as well as for generated tokens, so keys and values are never computed, and an answer does not depend on how
its prompt was cut. The cost: attention of prompts multiplies vectors as long as the latent, several times as long as a
head's.

The kernels read keys and values in different layouts, so the cache holds every latent twice: 1,152 numbers per token
and layer for DeepSeek V3, or 137 KiB per token in 16 bits. The query heads are split over the shards, and each shard
holds all latents. `kv_b_proj` is divided by heads, and half of it is kept in `--dtype`, whatever the format of the
checkpoint; `--quantize` leaves both halves in `--dtype`. Adapters may change every linear layer, including `kv_b_proj`.

## Quantized checkpoints

The service takes the settings of a quantized checkpoint from the checkpoint itself: `quantization_config` of
`config.json`, `quantize_config.json`, `quant_config.json`, or the tensors `gptq_bits` and `gptq_groupsize`. Every
format works with every family, with sharding, soft prompts and adapters, because families request weights by name. The
column `quantized` shows whether the tests compare checkpoints of each format, or of one, with transformers.

| format | what is read |
| --- | --- |
| `gptq` | 2, 3, 4 and 8 bits, version 1 and 2, `desc_act`, groups of any size; Marlin's layout (4 bits, symmetric) |
| `awq` | 4 bits, `gemm` and `gemv` |
| `compressed-tensors` | `pack-quantized` (2, 3, 4 and 8 bits), `int-quantized`, `float-quantized`, `naive-quantized` |
| `fp8`, `fbgemm_fp8` | a scale for each matrix, row or block |
| `bitsandbytes` | `nf4` and `fp4`, also nested, and 8 bits |
| `mxfp4` | experts of gpt-oss |

CPUs keep weights of 8 bits or fewer as codes and scales, but `fp8` weights in `--dtype`. GPUs keep all of them as codes
([how each format is kept and multiplied](quantized-checkpoints.md#serving)). The shapes of a module's tensors
determine its bits and groups, so modules may differ. The service refuses all other formats with an error that names the
format, for example EXL2, AQLM, QuIP, HQQ, VPTQ, BitNet, Quanto, torchao, HIGGS, SpQR, QQQ, NVFP4, Marlin 2:4, sparse
formats, the `gemv_fast` and `llm-awq` forms of AWQ, and weights that EETQ saved.

## GGUF files

The service serves a GGUF file without conversion, with the configuration, the tokenizer and the chat template that the
file contains. A CPU computes with the codes of the file ([GGUF files](gguf.md)). These architectures are served:
{", ".join(f"`{name}`" for name in sorted((*ARCHITECTURES, "t5")))}.

## Sharding

`--num-shard` splits every native model: attention by heads, feed-forward layers and each expert by width, the embedding
and the head by tokens. The number of attention heads and the widths must be divisible by the number of shards. If there
are fewer key/value heads than shards, neighbouring shards share them. The size of the vocabulary need not be divisible.
If a model cannot be split, the service refuses it with an error that contains its numbers.

## Soft prompts and adapters

Soft prompts may be for the decoder, the encoder or both. Adapters may change any linear layers, the token embedding and
the head, under PEFT's names of these modules. PEFT itself refuses adapters of `out_proj` in models with Mamba layers. In
training a soft prompt, PEFT leaves out the factor of Falcon H1's embeddings, `embedding_multiplier`; this service always
multiplies the embeddings of tokens by it, and never those of the prompt.

## Everything else

A causal model of another family runs through transformers' code with this service's cache and attention, if that code
uses transformers' attention interface (`DEPLOYMENT_FRAMEWORK` unset or `hf_transformers`). At startup, the service
computes the scores of a few tokens with and without the cache. If they differ, it refuses the model and reports the
reason. On a GPU, a model whose check fails is loaded again on the CPU. Every shard holds the whole model. Soft prompts
and adapters are not supported. Code that is part of a checkpoint runs only with `TRUST_REMOTE_CODE=true`.

`hf_transformers` and `hf_accelerate` select transformers' code for the models in the table too, on one shard.
Encoder-decoders, models with ALiBi or attention sinks, Falcon and models with a `dynamic` or `longrope` rope cannot run
through it. The service's own engine serves them, logs a warning, and supports soft prompts and adapters for them.

`hf_optimum_ort` runs a decoder-only model in ONNX form on ONNX Runtime (`pip install 'tgis-next[onnx]'`).
"""


UNREAD = """\
## Tensors that are not read

At startup, the service refuses a checkpoint that contains tensors that do not belong to the model in its `config.json`:
more layers or experts than the configuration names, or biases that it omits. The error names the first such tensor. The
service ignores only these tensors, in checkpoints of any family, and layers that predict further tokens, if
`num_nextn_predict_layers` counts them:
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
    quantized = "each format" if module.__name__.rpartition(".")[2] in EACH_FORMAT else "one format"
    return [name.rstrip("."), what.rstrip("."), types, kind, quantized]
