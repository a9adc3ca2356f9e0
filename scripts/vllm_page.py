"""Generates `docs/migrating/vllm.md`: the changes for users of vLLM, from the names that are accepted under
`--compat vllm`."""

from collections.abc import Callable, Iterable

from scripts.configuration_page import code, own_name, table
from tgis.config.aliases.alias import Alias
from tgis.router.api.vllm.options.names import DEFAULTS, MAPPED, REFUSED, WITHOUT_EFFECT

INTRODUCTION = """\
# Coming from vLLM

This page lists what changes for clients and operators of vLLM's server. Clients need no change:
[OpenAI's API](../openai.md) has vLLM's routes and fields, and its page lists the fields that are refused. Command lines
need no change either:

```shell
text-generation-launcher org/model --compat vllm --tensor-parallel-size 2 --max-model-len 8K
```

With `--compat vllm` (`COMPAT=vllm`) the launcher reads the flags and variables below beside ours. In a pod that ran
`vllm serve`, change the image and set `COMPAT=vllm`, and keep the arguments. Without `--compat`, a flag that only vLLM
has is reported as such in a usage error. A flag that is in no table is a usage error too; nothing is ignored silently.

As in vLLM, flags may have underscores instead of hyphens, the model may be an argument before all flags, switches may
have a value or the prefix `no` (`--no-trust-remote-code`), and several values may follow `--served-model-name` and
`--lora-modules`. The YAML file of `vllm serve` (`--config`) and flags with dots (`--speculative-config.method`) are not
read.

## What is different at once

Under `--compat vllm`, options that are not given have vLLM's values:
{defaults}.
Everything else keeps the defaults of this service:

- There is no default model: a start without a model is a usage error.
- A model that is neither a directory nor in the hub cache is downloaded before anything else is started, as
  [for TGI](tgi.md#models-of-the-hub). `HF_HUB_OFFLINE=1` disables downloads.
- A model in a folder has the folder's name, without its path. If your clients send the whole path, as vLLM expects,
  set `--served-model-name`.
- Probes need no change (`/health` on the same port); `health-probe` needs `--port 8000`.
- gRPC is served too, on port 8033; `--grpc-port` changes the port.
- `--max-concurrent-requests`, 512, limits the number of running and waiting requests; further requests get 429. vLLM's
  queue is unlimited.
- A request without a seed gets a random one. Other sampling fields that a request does not set have the values
  of the model's `generation_config.json`, as in vLLM, but its `max_new_tokens` is not read, and `"do_sample": false` in it
  means temperature 0.
- Browsers may call the API from other origins only if `--allowed-origins` names them; vLLM allows all.
- Keys are required for gRPC and for every route except `/health`, `/live` and `/metrics`; vLLM requires them for `/v1`
  only. Prefer keys in a file (`--auth-tokens-path`), which may change while the service runs; other processes can read a
  command line.
- Without `--gpu-memory-utilization` the cache uses all memory that remains after the model, not 0.9 of it.
- Metrics have [this service's names](../metrics.md), and [vLLM's](../metrics.md#under-vllms-names) too.

## Adapters

| vLLM | here |
| --- | --- |
| `--enable-lora`, `--max-loras`, `--max-lora-rank` | not needed: a batch may have adapters of any number and rank that fit into `--adapter-cache-size-mb` |
| `--lora-modules sql=/adapters/sql` | loaded at the start, never evicted, `model="sql"` |
| `VLLM_ALLOW_RUNTIME_LORA_UPDATING=true` | `--runtime-adapters` |
| `POST /v1/load_lora_adapter`, `POST /v1/unload_lora_adapter` | the same, with a token; `lora_path` is an adapter's id, or its folder below `--adapter-cache` or `--prefix-store-path` |
| `VLLM_PLUGINS=lora_filesystem_resolver`, `VLLM_LORA_RESOLVER_CACHE_DIR` | `--adapter-cache`; requests can name every adapter in it by its id, without loading it first |

Other paths are refused, so that clients cannot make the service read other folders. Hub ids are refused too, so that
clients cannot make the service download anything. [Names at run time](../openai.md#names-at-run-time) has the rules.

## Flags and variables

vLLM reads no variables named after its flags, so this service does not read them either. It reads its
[own variables](../configuration.md).

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

`--port`, `--revision`, `--dtype`, `--kv-cache-dtype`, `--device`, `--served-model-name`, `--trust-remote-code`,
`--block-size`, `--chat-template`, `--tool-call-parser`, `--reasoning-parser`, `--nnodes`, `--node-rank`, `--master-addr`,
`--master-port`, `--headless`, `--generation-config` and `--override-generation-config` have the meaning of this service's options.
`--dtype` also accepts `auto`, `half` and `float`. `--generation-config vllm` means `none`. `--override-generation-config`
does not accept `max_new_tokens`. `--chat-template` must be a file, not a template in one line. With several machines,
links need certificates ([Deployment](../deployment.md)).
"""


def render() -> str:
    defaults = [f"`--{name.replace('_', '-')} {value}`" for name, value in DEFAULTS.items()]
    meanings = _names(MAPPED, lambda one: own_name(one.means or "") + _aside(one.why))
    return "\n".join(
        [
            INTRODUCTION.format(defaults=f"{', '.join(defaults[:-1])} and {defaults[-1]}")
            + table(("name", "means"), meanings),
            WITHOUT + table(("name", "because"), _names(WITHOUT_EFFECT, lambda one: one.why)),
            REFUSALS + table(("name", "instead"), _names(REFUSED, lambda one: one.why)),
            SHARED,
        ]
    )


def _names(names: Iterable[Alias], say: Callable[[Alias], str]) -> list[tuple[str, ...]]:
    return [(code(_spellings(one)), say(one)) for one in names]


def _spellings(one: Alias) -> list[str]:
    flags = [one.flag_name, *([one.short] if one.short else [])] if one.flag else []
    return flags + ([one.variable_name] if one.variable else [])


def _aside(text: str) -> str:
    return f"; {text}" if text else ""
