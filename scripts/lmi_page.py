"""Generates `docs/migrating/lmi.md`: the changes for users of DJL's LMI containers, from the names that are
accepted under `--compat lmi`."""

from collections.abc import Callable, Iterable

from scripts.configuration_page import code, own_name, table
from tgis.config.aliases.alias import Alias
from tgis.router.api.lmi.options.names import (
    DEFAULT_QUEUE,
    DEFAULTS,
    MAPPED,
    PASSED_ON,
    PREFIX,
    REFUSED,
    SIMPLE_NAMES,
    WITHOUT_EFFECT,
)

INTRODUCTION = """\
# Coming from LMI

This page lists what changes for operators of DJL's LMI containers (large model inference), which SageMaker runs. Model
folders and manifests need no change, and neither do `serving.properties`, variables and [requests](../lmi.md).

```shell
text-generation-launcher --compat lmi --properties /opt/ml/model/serving.properties
```

With `--compat lmi` (`COMPAT=lmi`) the launcher reads the names below beside [our own](../configuration.md).
`tgis env --compat lmi` starts nothing; after its report it prints each name that is set, its source and the option that
it sets. It also prints names that the launcher would refuse.

## Sources

In order of precedence:

1. our own flags;
2. our own variables, except for names that LMI has too: `MAX_BATCH_SIZE`, `MAX_CONCURRENT_REQUESTS` and
   `CUDA_MEMORY_FRACTION` have LMI's meaning;
3. `--properties FILE`, else `serving.properties` in the folder of `OPTION_MODEL_DIR`, else in `/opt/ml/model`, if the
   file exists;
4. variables such as `OPTION_MAX_MODEL_LEN` for `option.max_model_len` and `SERVING_JOB_QUEUE_SIZE` for
   `job_queue_size`; `OPTION_ENGINE` is `engine`, `OPTION_ENTRYPOINT` is `option.entryPoint`, and blank variables count as
   unset;
5. the [simple names](#simple-names), in the order of the table;
6. LMI's defaults.

If one source sets one option by two names, the values must agree; otherwise startup fails with an error that has both
names. The log has a line for each name with its value, its source, and the option that it sets; values of tokens and of
unknown names are hidden.

The file is parsed as Java does, in UTF-8: `=`, `:` or blanks after the key, comments with `#` and `!`, lines continued
by `\\`, escapes such as `\\u0041`. If a key is repeated, the last line takes effect. An error has the line's number.
Booleans may be written in any case. An invalid number is refused; LMI continues with its default.

An unknown name causes a warning with the closest known name, or an error with `--strict-config`. The same applies to names
with `option.` that LMI reads only without this prefix, such as `option.max_batch_delay`, and the reverse. LMI ignores all
of these names silently.

## What is different at once

Options that are not given have LMI's values:

{defaults}
All other options keep the defaults of this service:

- `option.max_rolling_batch_size` is 256, as for LMI's vLLM.
- The model is `option.model_id`, else the folder of `option.model_dir`, else the folder of the file, else
  `/opt/ml/model`. A model named by a hub id is downloaded at startup; `s3://` is refused: mount the bucket.
- The model is served once, by all its shards together. LMI starts copies on the GPUs that `tensor_parallel_degree` does
  not use: start several services instead.
- The limit of 64 MiB for a request applies to gRPC too, which is served on port 8033; `--grpc-port` changes the port.
- Probes need no change (`/ping` on the same port); `health-probe` needs `--port 8080`.
- `--startup-timeout` begins when the shards start, after a download. When it expires, the launcher exits with one line
  and code 1; LMI counts a failed worker.
- `predict_timeout` limits the time to the first token, including the time in the queue, and `chunked_read_timeout` the
  time to each later token. Shards that hang are [restarted](../reliability.md).

## Names

A name begins with `option.` if LMI reads it with this prefix.

"""
WITHOUT = """\
### Without effect

Each is accepted with a line of warning.

"""
REFUSALS = """\
### Refused

The tables above list the values that are refused.

"""
PASSED = """\
### Passed on to vLLM in LMI

Arguments of vLLM's engine, with the prefix `option.`, have the same meaning as
[vLLM's flags](vllm.md#flags-and-variables):
{names}.

"""
SIMPLE = """\
### Simple names

| variable | is read as |
| --- | --- |
"""


def render() -> str:
    defaults = [(own_name(name), f"`{_number(value)}`") for name, value in DEFAULTS.items()]
    defaults += [
        (
            own_name("max_concurrent_requests"),
            f"`{DEFAULT_QUEUE}` waiting requests, plus `--max-batch-size`",
        ),
        (own_name("num_shard"), "the number of visible GPUs, or 1"),
    ]
    passed = [f"`{name.removeprefix(PREFIX)}`" for name in sorted(PASSED_ON)]
    simple = "".join(f"| `{name}` | `{key}` |\n" for name, key in SIMPLE_NAMES.items())
    meanings = _names(MAPPED, lambda one: own_name(one.means or "") + (f"; {one.why}" if one.why else ""))
    introduction = INTRODUCTION.format(defaults=table(("option", "value"), defaults))
    return "\n".join(
        [
            introduction + table(("name", "means"), meanings),
            WITHOUT + table(("name", "because"), _names(WITHOUT_EFFECT, lambda one: one.why)),
            REFUSALS + table(("name", "instead"), _names(REFUSED, lambda one: one.why)),
            PASSED.format(names=", ".join(passed)) + SIMPLE + simple,
        ]
    )


def _names(names: Iterable[Alias], say: Callable[[Alias], str]) -> list[tuple[str, ...]]:
    return [(code([one.name]), say(one)) for one in names]


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
