"""Generates `docs/migrating/tgi.md`: the changes for users of Hugging Face TGI, from the names that are
accepted under `--compat tgi`."""

from collections.abc import Callable, Iterable

from scripts.configuration_page import code, own_name, table
from tgis.config.aliases.alias import Alias
from tgis.router.api.tgi.options.names import DEFAULTS, MAPPED, REFUSED, WITHOUT_EFFECT

INTRODUCTION = """\
# Coming from Text Generation Inference

This page lists what changes for clients and operators of Hugging Face TGI. Clients need no change: [TGI's API](../tgi.md)
has the same routes, fields, error texts and statuses. Command lines and variables need no change either:

```shell
text-generation-launcher --compat tgi --model-id org/model --max-total-tokens 4096 --port 3000
```

With `--compat tgi` (`COMPAT=tgi`) the launcher reads TGI's flags and variables beside ours. In a pod that ran TGI, change
the image and set `COMPAT=tgi`. Without it, a flag that only TGI has is reported as such in a usage error, and TGI's
variables are ignored.

## What is different at once

Under `--compat tgi`, options that are not given have TGI's values:
{defaults}.
Everything else keeps the defaults of this service:

- There is no default model: a start without `--model-id` is a usage error.
- By default there is one shard, and a log line reports it; TGI uses all visible GPUs. `--num-shard` sets the number of
  shards, and `--sharded true` uses all visible GPUs, at least two.
- gRPC is served too, on port 8033; `--grpc-port` changes the port. `-g` is ambiguous: use the long flag.
- After SIGTERM, requests have 90 s to finish, as in TGI. A pod's `terminationGracePeriodSeconds` must be longer, or
  `--graceful-termination-timeout` shorter.
- Browsers may call the API from other origins only if `--cors-allow-origin` names them, once for each; TGI allows all.
- Keys are compared exactly, and are required for every route except the probes and `/metrics`, and for gRPC. Prefer keys
  in a file (`--auth-tokens-path`), which may change while the service runs; other processes can read a command line.
- `--hostname` must be an address or a name that can be resolved; TGI listens on all addresses if it is neither.
- `--lora-adapters` accepts a revision only after a hub id. A request for an unknown adapter is refused; TGI answers it
  without the adapter.
- `--rope-scaling linear` scales positions. It had no effect in TGI's last version.
- `--cuda-memory-fraction` is the fraction of a GPU that the service may use, without a further deduction.
- `--quantize` has no `exl2`; [models](../models.md) lists the formats. Unlike in TGI, `--dtype` may be given with it.

## Limits of tokens

| limit | TGI's default | here |
| --- | --- | --- |
| `--max-total-tokens` | the minimum of the cache size, the tokenizer's limit and the model's limit | the model's limit; startup fails if the cache cannot hold one request of that length |
| `--max-input-tokens` | one less than `--max-total-tokens` | the same; startup fails with a larger value |
| `--max-batch-prefill-tokens` | computed from the GPU's and the model's figures, else 4096 | `--max-step-tokens`, 2048: the number of tokens, of prompts and of running requests, that one step computes |
| `--max-batch-total-tokens` | measured with a request at startup; an explicit value has no effect on most models | measured with the largest step at startup; an explicit value is an upper bound |

A request may have as many new tokens as fit after its input. TGI counts at most 1,024 of them in this check, and
continues longer texts in slices.

## Models of the hub

If `--model-id org/model` is neither a directory nor in the hub cache, the launcher downloads it before it starts anything
else. The same applies to ids in `--lora-adapters` and `--tokenizer-name`. The log shows the progress, and an interrupted
download resumes at the next start. Only the download process receives `HF_TOKEN` and `HF_ENDPOINT`. Nothing is downloaded
with `HF_HUB_OFFLINE=1`, or without `--compat`. If the model is to be downloaded, `--trust-remote-code` needs
`--revision`. Probes are not answered during the download: give the startup probe enough time, or download the model
first with `text-generation-server download-weights org/model`.

With `--weights-cache-override DIRECTORY` the whole model, not only its weights, is read from the directory, and
`--model-id` is its name for clients. `--tokenizer-config-path` also takes precedence over the model's
`chat_template.json`, and `--chat-template` over both. The log reports which template is used.

## Flags

"""
WITHOUT = """\
### Without effect

Each is accepted with a line of warning.

"""
REFUSALS = """\
### Refused

"""
SHARED = """\
### The same name

`--port`, `--revision`, `--trust-remote-code`, `--dtype`, `--kv-cache-dtype`, `--quantize`, `--num-shard`, `--sharded`,
`--tokenizer-config-path`, `--tokenizer-name`, `--rope-scaling`, `--rope-factor`, `--max-concurrent-requests`, `--max-best-of`,
`--max-stop-sequences`, `--max-top-n-tokens`, `--max-input-tokens`, `--max-client-batch-size`, `--max-batch-size`,
`--disable-grammar-support`, `--max-waiting-tokens`, `--cuda-graphs`, `--speculate`, `--lora-adapters`, `--watermark-gamma`,
`--watermark-delta`, `--cuda-memory-fraction`, `--shard-uds-path`, `--master-addr`, `--master-port`, `--json-output`,
`--otlp-endpoint`, `--otlp-service-name`, `--cors-allow-origin`, `--compute-type`, `--env` and their variables are
[our own](../configuration.md). `DTYPE` unset is the checkpoint's own, or bfloat16 for float32 on GPUs.
"""
CLIENTS = """\
## Over gRPC

The service also offers gRPC, with batches, deadlines, soft prompts and trailing metadata. Its use is optional. The
[gRPC API](../wire.md) describes the messages, and the [quickstart](../quickstart.md) has a client in Python.

| over HTTP | over gRPC |
| --- | --- |
| `POST /generate`, `POST /` | `Generate`, one or many inputs in a call |
| `POST /generate_stream` | `GenerateStream` |
| `POST /tokenize` | `Tokenize` |
| `GET /info` | `ModelInfo`: kind and limits |
| `GET /health` | gRPC health |

| in `parameters` | over gRPC |
| --- | --- |
| `do_sample` | `method`: GREEDY (the default) or SAMPLE |
| `temperature`, `top_k`, `top_p`, `typical_p`, `seed` | `sampling`, with the same names; `top_p` 1 is allowed; a temperature of 0 means greedy, and other values below 0.05 are refused |
| `max_new_tokens` | `stopping.max_new_tokens`; the default is 20, not as many as fit |
| `stop` | `stopping.stop_sequences`, at most six of 240 bytes each; `include_stop_sequence` sets whether the answer includes the stop sequence |
| `truncate` | `truncate_input_tokens`; also keeps the last tokens |
| `repetition_penalty` | `decoding.repetition_penalty` |
| `frequency_penalty` | the metadata `tgis-frequency-penalty`, as OpenAI defines it: it counts generated tokens only |
| `grammar` | `decoding.json_schema` or `decoding.regex`; also `choice`, `grammar` and any JSON |
| `details`, `decoder_input_details` | `response.generated_tokens`, `response.input_tokens`, with `token_logprobs` and `token_ranks`; also in streams |
| `top_n_tokens` | `response.top_n_tokens` |
| `return_full_text` | `response.input_text` |
| `adapter_id` | `adapter_id`; an unknown one is refused |
| `watermark` | the metadata `tgis-watermark: true` |
| `best_of` | only available over HTTP |

The frequency penalty is OpenAI's, so values chosen for TGI have a different effect. TGI subtracts the penalty times the
token's fraction of input and output; OpenAI subtracts the penalty times the number of its occurrences in the output.

| status over HTTP | over gRPC |
| --- | --- |
| 422, `validation` | INVALID_ARGUMENT |
| 429, `overloaded` | RESOURCE_EXHAUSTED, `Model is overloaded`, with a retry delay |
| 424, `generation` | INTERNAL, with an id; the log has the cause under this id |
| `finish_reason` `length`, `eos_token`, `stop_sequence` | `stop_reason` MAX_TOKENS or TOKEN_LIMIT, EOS_TOKEN, STOP_SEQUENCE |

## Metrics

Metric names of both servers begin with `tgi_`, but they differ. This service uses TGIS's names
([metrics](../metrics.md)):

| TGI | here |
| --- | --- |
| `tgi_batch_inference_duration{method="decode"}`, and others by `method` | `method="next_token"`; `prefill` is the same |
| `tgi_request_failure{err="overloaded"}` | `err="conc_limit"` |
| `tgi_batch_current_max_tokens` | none; `tgi_kv_cache_usage_ratio` is the used fraction of the cache |
| `tgi_batch_next_size` | `tgi_batch_inference_batch_size` |
| `tgi_request_skipped_tokens` | `tgi_speculation_accepted_tokens_total`, a counter |
| `tgi_batch_concat` | `tgi_batch_concatenation_count` |
| none | `tgi_request_time_to_first_token_duration`, `tgi_request_inter_token_duration` |
"""


def render() -> str:
    meanings = _names(MAPPED, lambda one: own_name(one.means or "") + _aside(one.why))
    without = _names(WITHOUT_EFFECT, lambda one: one.why)
    refused = _names(REFUSED, lambda one: one.why)
    return "\n".join(
        [
            INTRODUCTION.format(defaults=_defaults()) + table(("flag", "variable", "means"), meanings),
            WITHOUT + table(("flag", "variable", "because"), without),
            REFUSALS + table(("flag", "variable", "instead"), refused),
            SHARED,
            CLIENTS,
        ]
    )


def _defaults() -> str:
    valued = {name.replace("_", "-"): value for name, value in DEFAULTS.items() if value is not False}
    given = [f"`--{name} {value}`" for name, value in valued.items()]
    return f"{', '.join(given[:-1])} and {given[-1]}"


def _names(names: Iterable[Alias], say: Callable[[Alias], str]) -> list[tuple[str, ...]]:
    return [
        (
            code([one.flag_name] if one.flag else []),
            code([one.variable_name] if one.variable else []),
            say(one),
        )
        for one in names
    ]


def _aside(text: str) -> str:
    return f"; {text}" if text else ""
