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

This page lists what changes for operators of DJL's LMI containers (large model inference), which SageMaker runs. A folder
or a manifest for them can stay as it is: `serving.properties`, variables, and [requests](../lmi.md).

```shell
text-generation-launcher --compat lmi --properties /opt/ml/model/serving.properties
```

`--compat lmi` (`COMPAT=lmi`) reads the names below beside [our own](../configuration.md). `tgis env --compat lmi` starts
nothing; after its report it prints each name that is set, its source and the option that it sets. It does not stop at
names that the launcher refuses.

## Sources

In order of precedence:

1. our own flags;
2. our own variables, except those that LMI has too: `MAX_BATCH_SIZE`, `MAX_CONCURRENT_REQUESTS` and
   `CUDA_MEMORY_FRACTION` mean what they mean in LMI;
3. `--properties FILE`, else `serving.properties` in the folder of `OPTION_MODEL_DIR`, else in `/opt/ml/model`, if it is
   there;
4. variables `OPTION_MAX_MODEL_LEN` for `option.max_model_len`, and so on, and `SERVING_JOB_QUEUE_SIZE` for
   `job_queue_size`; `OPTION_ENGINE` is `engine`, `OPTION_ENTRYPOINT` is `option.entryPoint`, and blank ones are not given;
5. the [simple names](#simple-names), in the order of the table;
6. LMI's defaults.

Two names of one source for one option must agree; otherwise the start fails and names both. The log has a line for
each name with its value, its source, and the option that it sets; values of tokens and of unknown names are hidden.

The file is read as Java reads it, in UTF-8: `=`, `:` or blanks after the key, comments with `#` and `!`, lines continued
by `\\`, escapes such as `\\u0041`; if a key is repeated, the last line wins. An error names the line. Booleans may
be written in any case. An invalid number is refused, where LMI continues with its default.

An unknown name causes a warning with the closest known name, or an error with `--strict-config`. The same applies to names
with `option.` that LMI reads only without it, such as `option.max_batch_delay`, and the reverse. LMI ignores all of these
silently.

## What is different at once

Options that are not given have LMI's values:

{defaults}
The rest keeps the defaults of this service:

- `option.max_rolling_batch_size` is 256, as for LMI's vLLM.
- The model is `option.model_id`, else the folder of `option.model_dir`, else that of the file, else `/opt/ml/model`. An id
  on the hub is downloaded at the start; `s3://` is refused: mount the bucket.
- The model is served once, over all its shards. LMI starts copies on the GPUs that `tensor_parallel_degree` leaves free:
  start several services instead.
- The limit of 64 MiB for a request holds for gRPC too, which is served on port 8033: `--grpc-port` moves it.
- Probes may stay (`/ping` on the same port); `health-probe` needs `--port 8080`.
- `--startup-timeout` counts from the start of the shards, after a download; when it is over, the launcher ends with one
  line and code 1, where LMI counts a failed worker.
- `predict_timeout` limits the time to the first token, with the time in the queue, and `chunked_read_timeout` the time to
  each further one. Shards that hang are [started again](../reliability.md).

## Names

A name begins with `option.` where LMI reads it with the prefix.

"""
WITHOUT = """\
### Without effect

Each is accepted with a line of warning.

"""
REFUSALS = """\
### Refused

Values that are refused are named in the tables above.

"""
PASSED = """\
### Passed on to vLLM in LMI

With `option.` in front, arguments of vLLM's engine mean what [the page on vLLM](vllm.md#flags-and-variables) says of its
flags: {names}.

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
            f"`{DEFAULT_QUEUE}` that wait, and `--max-batch-size` beside them",
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
