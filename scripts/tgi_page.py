"""`docs/migrating/tgi.md`: what a user of Hugging Face TGI has to change, from the names that are read under
`--compat tgi`."""

from collections.abc import Callable, Iterable

from scripts.configuration_page import code, own_name, table
from tgis.config.aliases.alias import Alias
from tgis.config.aliases.tgi import MAPPED, REFUSED, WITHOUT_EFFECT

INTRODUCTION = """\
# Coming from Text Generation Inference

Manifests and clients can stay as they are: `--compat tgi` reads TGI's flags, and serves [TGI's API](../tgi.md) over HTTP.

```shell
text-generation-launcher --compat tgi --model-id org/model --max-total-tokens 4096 --port 3000
```

`--compat tgi` (`COMPAT=tgi`) reads TGI's flags and variables beside ours. Without it a flag that only TGI has is a
usage error, which says so, and its variables are not looked at. The model must be on the disk: nothing is downloaded at
the start (`text-generation-server download-weights org/model`).

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

`PORT`, `DTYPE`, `QUANTIZE`, `NUM_SHARD`, `REVISION`, `TRUST_REMOTE_CODE`, `MAX_CONCURRENT_REQUESTS`,
`MAX_BATCH_SIZE`, `MAX_TOP_N_TOKENS`, `SPECULATE`, `LORA_ADAPTERS`, `WATERMARK_GAMMA`, `WATERMARK_DELTA`,
`CUDA_GRAPHS`, `CUDA_MEMORY_FRACTION`,
`SHARD_UDS_PATH`, `JSON_OUTPUT`, `OTLP_ENDPOINT` and `OTLP_SERVICE_NAME` have the meaning and default of [our own](../configuration.md). Look at four of them: `PORT` is
the port of health and metrics, and answers come from `GRPC_PORT` (8033); `MAX_CONCURRENT_REQUESTS` is 512; `DTYPE`
unset is the checkpoint's own, or bfloat16 for float32 on GPUs; `QUANTIZE` has other values of its own, and none for EXL2. `-g` must be written
out.
"""
CLIENTS = """\
## Clients

Clients over HTTP need no change. [TGI's API](../tgi.md) has the routes, the parameters and what is different on purpose. Those
that move to gRPC find the same there:

| over HTTP | here |
| --- | --- |
| `POST /generate`, `POST /` | `Generate`, one or many inputs in a call |
| `POST /generate_stream` | `GenerateStream` |
| `POST /tokenize` | `Tokenize` |
| `GET /info` | `ModelInfo`: kind and limits |
| `GET /health` | the same, on `PORT`; also `/live`, and gRPC health |
| `GET /metrics` | the same, on `PORT` |
| `/v1/chat/completions`, `/v1/completions`, chat templates, tools | the same ([OpenAI's API](../openai.md)) |
| images | none |

[The wire](../wire.md) has the messages, and the [quickstart](../quickstart.md) a client in Python.

| in `parameters` | here |
| --- | --- |
| `do_sample` | `method`: GREEDY (the default) or SAMPLE |
| `temperature`, `top_k`, `top_p`, `typical_p`, `seed` | `sampling`, with the same names; `top_p` 1 is allowed, a temperature below 0.05 is not, 0 is greedy |
| `max_new_tokens` | `stopping.max_new_tokens`; absent it is 20, not all that fits |
| `stop` | `stopping.stop_sequences`, at most six of 240 bytes; `include_stop_sequence` says whether the text stays |
| `truncate` | `truncate_input_tokens`; keeps the last ones too |
| `repetition_penalty` | `decoding.repetition_penalty` |
| `frequency_penalty` | the metadata `tgis-frequency-penalty`, as OpenAI defines it: it counts generated tokens only |
| `grammar` | `decoding.json_schema` or `decoding.regex`; also `choice`, `grammar` and any JSON |
| `details`, `decoder_input_details` | `response.generated_tokens`, `response.input_tokens`, with `token_logprobs` and `token_ranks`; also of streams |
| `top_n_tokens` | `response.top_n_tokens` |
| `return_full_text` | `response.input_text` |
| `adapter_id` | `adapter_id`; an unknown one is refused, and never answered by the bare model |
| `watermark` | the metadata `tgis-watermark: true` |
| `best_of` | none; only over HTTP |

The frequency penalty is OpenAI's, and values that were chosen for TGI mean something else: TGI subtracts the penalty
times the token's share of input and output, OpenAI the penalty times the number of its occurrences in the output.

| status there | status here |
| --- | --- |
| 422, `validation` | INVALID_ARGUMENT |
| 429, `overloaded` | RESOURCE_EXHAUSTED, `Model is overloaded`, with the time to come again |
| 424, `generation` | INTERNAL, with an id that the log explains |
| `finish_reason` `length`, `eos_token`, `stop_sequence` | `stop_reason` MAX_TOKENS or TOKEN_LIMIT, EOS_TOKEN, STOP_SEQUENCE |

## Metrics

Both have names with `tgi_` in front, and they are not the same ones. Those here are TGIS's ([metrics](../metrics.md)):

| TGI | here |
| --- | --- |
| `tgi_batch_inference_duration{method="decode"}`, and others by `method` | `method="next_token"`; `prefill` is the same |
| `tgi_request_failure{err="overloaded"}` | `err="conc_limit"` |
| `tgi_batch_current_max_tokens` | none; `tgi_kv_cache_usage_ratio` tells how full the cache is |
| `tgi_batch_next_size` | `tgi_batch_inference_batch_size` |
| `tgi_request_skipped_tokens` | `tgi_speculation_accepted_tokens`, a counter |
| `tgi_batch_concat` | `tgi_batch_concatenation_count` |
| none | `tgi_request_time_to_first_token_duration`, `tgi_request_inter_token_duration` |
"""


def render() -> str:
    meanings = _names(MAPPED, lambda one: own_name(one.means or "") + _aside(one.why))
    without = _names(WITHOUT_EFFECT, lambda one: one.why)
    refused = _names(REFUSED, lambda one: one.why)
    return "\n".join(
        [
            INTRODUCTION + table(("flag", "variable", "means"), meanings),
            WITHOUT + table(("flag", "variable", "because"), without),
            REFUSALS + table(("flag", "variable", "instead"), refused),
            SHARED,
            CLIENTS,
        ]
    )


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
