"""Generates `docs/wire.md` from the public proto and the service's defaults and limits."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill

from scripts.configuration_page import table
from tgis.config.network import PortOptions
from tgis.router.api.fmaas.call_metadata import KEYS
from tgis.router.api.fmaas.rules import FMAAS
from tgis.router.api.fmaas.trailing_metadata import TRAILING_KEYS
from tgis.router.grammar.compiler import MAX_CHOICES
from tgis.router.requests.api_rules import MAX_STOP_SEQUENCES
from tgis.router.requests.validation import (
    MAX_STOP_SEQUENCE_BYTES,
)
from tgis.sampling_parameters import RANGES, SHARED

PROTO = Path(__file__).resolve().parent.parent / "protos" / "generation.proto"
WIDTH = 120
BLOCK = re.compile(r"(message|enum|service|oneof) (\w+) \{")
FIELD = re.compile(r"(?:(optional|repeated) )?([\w.]+) (\w+) = (\d+);(?:\s*// (.*))?")
VALUE = re.compile(r"([A-Z_]+) = (\d+);(?:\s*// (.*))?")
CALL = re.compile(r"rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\)")

INTRODUCTION = f"""\
# gRPC API

This page describes the gRPC API: calls, the order of a stream, metadata, and every message and field.
The service provides `fmaas.GenerationService` on port 8033; `protos/generation.proto` defines it. Names, numbers and
types are those of TGIS, with the additions of vllm-tgis-adapter, and do not change. The port also serves gRPC health
(`""` and `fmaas.GenerationService`), reflection, and [reports of the load](observability.md#load-for-balancers). The maximum
size of a request is {PortOptions.max_message_bytes >> 20} MiB (`--max-message-bytes`).
"""
STREAM = """\
## Messages of a stream

1. The header, sent immediately: `input_token_count`, the seed, and the text of the input if it was requested.
2. If `input_tokens` were requested, a message that contains only the input tokens and their count.
3. Messages with text, tokens or both; `generated_token_count` grows. A message without text is sent only if tokens were
   requested. A message contains one token, or several if the client or the service is slow: at most 256 token entries,
   including alternatives (`top_n_tokens`). The end of the text so far is
   [held back](openai.md#held-back-text) until no later token can change or remove it.
4. The last message, with `stop_reason`, the seed again, and `stop_sequence` if that was the reason.

A unary response contains all of this in one message per input, in the order of the inputs.
"""
METADATA = """\
## Metadata of a call

Parameters that the messages lack are sent as call metadata; they apply to all inputs of the call. In every method, an
unknown `tgis-*` key, a duplicate key or an invalid value causes INVALID_ARGUMENT, and the error message names the key.
Other keys are ignored. The metadata of a call may take up to {max_bytes} KiB in total (`--max-metadata-bytes`).

"""
SHARED_NAMES = (
    "In OpenAI's and LMI's APIs, {names} are JSON fields; in `tgis client`, they are options: {options}."
)
SAMPLING = """\
Logits are changed in this order ([step 7](how-it-works.md#a-request-in-eight-steps)): grammar mask, logit bias,
watermark, `min_new_tokens`, length penalty, repetition penalty, presence and frequency penalties, temperature, `top_k`,
`top_p`, min_p, `typical_p`. Token details of generated tokens are computed from the logits after all of these steps.

Token ids must be smaller than the vocabulary size of the model. If a client sends the ids that `Tokenize` returns with
`tgis-tokens: ids` as input, the answer is the same as for the text, and `input_text` returns the ids unchanged.
Truncation keeps the last ids and adds none in front. A cache salt is never logged or returned, and no salt gives a call
access to the cache of another [tenant](tls.md#tenants).

```python
import grpc
from tgis_client.pb import generation_pb2 as pb

name = "/fmaas.GenerationService/Generate"
forms = (pb.BatchedGenerationRequest.SerializeToString, pb.BatchedGenerationResponse.FromString)
with grpc.insecure_channel("localhost:8033") as channel:
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="The sea is")])
    metadata = [("tgis-logit-bias", "17:-100,42:1.5"), ("tgis-tokens", "ids")]
    print(channel.unary_unary(name, *forms)(request, metadata=metadata))
```
"""
TRAILING = """\
## Trailing metadata

A successful `Generate` or `GenerateStream` call ends with this metadata. Times are measured from the acceptance of the
slowest input, in milliseconds with three decimals. Token counts are sums over the inputs.

"""
NOTES = {
    "StopReason.EOS_TOKEN": "the model's end of sequence, or one of `tgis-stop-token-ids`",
    "SamplingParameters.temperature": f"absent: 1; 0: greedy; else at least {RANGES['temperature'].low}",
    "SamplingParameters.top_k": "0: off",
    "SamplingParameters.top_p": "0: off; else up to 1",
    "SamplingParameters.typical_p": "0: off; else up to 1",
    "SamplingParameters.seed": "absent: one is drawn, and the answer contains it",
    "StoppingCriteria.max_new_tokens": f"0: {FMAAS.default_max_new_tokens}; at most `--max-new-tokens`",
    "StoppingCriteria.min_new_tokens": "at most `max_new_tokens`",
    "StoppingCriteria.time_limit_millis": "0: none; checked after every token; an idle service always gives one token",
    "StoppingCriteria.stop_sequences": f"at most {MAX_STOP_SEQUENCES} of {MAX_STOP_SEQUENCE_BYTES} bytes",
    "StoppingCriteria.include_stop_sequence": "absent: `--default-include-stop-seqs`",
    "ResponseOptions.input_text": "the input before the answer",
    "ResponseOptions.token_logprobs": "needs generated or input tokens, as do the next two",
    "ResponseOptions.top_n_tokens": "at most `--max-top-n-tokens`; ties are listed too",
    "DecodingParameters.repetition_penalty": "0: 1; above 0",
    "LengthPenalty.start_index": "tokens after which the end of sequence becomes more likely",
    "LengthPenalty.decay_factor": "1 to 10",
    "DecodingParameters.format": "JSON: any object",
    "DecodingParameters.json_schema": "with `--max-guided-bytes`, as the next three",
    "DecodingParameters.regex": r"Rust's syntax, for the whole output; `\d` is a digit of ASCII",
    "DecodingParameters.grammar": "Lark or GBNF",
    "StringChoices.choices": f"2 to {MAX_CHOICES:,}",
    "BatchedTokenizeRequest.prefix_id": "ignored, and so is the next",
    "BatchedTokenizeRequest.truncate_input_tokens": "keep the last N; 0 keeps all",
    "BatchedGenerationRequest.model_id": "named in traces, else ignored, here and in the other requests",
}


@dataclass
class Block:
    kind: str
    name: str
    rows: list[tuple[str, ...]] = field(default_factory=list)


def render() -> str:
    blocks = list(_blocks(PROTO.read_text()))
    known = {f"{block.name}.{row[0].strip('`')}" for block in blocks for row in block.rows}
    if unknown := NOTES.keys() - known:
        raise SystemExit(f"no field {', '.join(sorted(unknown))} in {PROTO.name}")
    service = next(block for block in blocks if block.kind == "service")
    parts = [INTRODUCTION, "## Calls\n", table(("call", "request", "answer", ""), service.rows), STREAM]
    parts += [METADATA.format(max_bytes=PortOptions.max_metadata_bytes >> 10) + _metadata(), SAMPLING]
    parts.append(
        TRAILING + table(("key", ""), [(f"`{name}`", key.help) for name, key in TRAILING_KEYS.items()])
    )
    messages = [block for block in blocks if block.kind == "message" and block.rows]
    parts += ["## Messages\n", *(_section(block, ("field", "type", "number", "")) for block in messages)]
    enums = [block for block in blocks if block.kind == "enum"]
    parts += ["## Enumerations\n", *(_section(block, ("name", "number", "")) for block in enums)]
    return "\n".join(parts)


def _metadata() -> str:
    rows = [(f"`{name}`", key.allowed, key.help) for name, key in KEYS.items()]
    names = [f"`{each.name}`" for each in SHARED]
    options = [f"`--{each.name.replace('_', '-')}`" for each in SHARED]
    shared = SHARED_NAMES.format(names=_and(names), options=_and(options))
    return table(("key", "value", ""), rows) + "\n" + fill(shared, WIDTH, break_on_hyphens=False) + "\n"


def _and(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _blocks(text: str) -> Iterator[Block]:
    """Return the messages in the order in which they end, nested ones first; fields of a oneof belong to its
    message."""
    open_blocks: list[Block] = []
    comment = ""
    for line in map(str.strip, text.splitlines()):
        if begin := BLOCK.match(line):
            open_blocks.append(Block(begin[1], begin[2]))
        elif line == "}":
            block = open_blocks.pop()
            if block.kind == "oneof":
                open_blocks[-1].rows += [(*row[:3], _join("one of these", row[3])) for row in block.rows]
            else:
                yield block
        elif open_blocks:
            _add(line, open_blocks, comment)
        comment = line.removeprefix("// ") if line.startswith("//") else ""


def _add(line: str, open_blocks: list[Block], comment: str) -> None:
    block = open_blocks[-1]
    owner = next(one.name for one in reversed(open_blocks) if one.kind != "oneof")
    if call := CALL.match(line):
        answer = f"{call[3] or ''}{call[4]}"
        block.rows.append((f"`{call[1]}`", f"`{call[2]}`", f"`{answer}`", comment))
    elif block.kind == "enum" and (value := VALUE.match(line)):
        note = _join(value[3] or "", NOTES.get(f"{owner}.{value[1]}", ""))
        block.rows.append((f"`{value[1]}`", value[2], note))
    elif match := FIELD.match(line):
        type_ = f"{match[1]} {match[2]}" if match[1] else match[2]
        note = _join(match[5] or "", NOTES.get(f"{owner}.{match[3]}", ""))
        block.rows.append((f"`{match[3]}`", type_, match[4], note))


def _join(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


def _section(block: Block, titles: tuple[str, ...]) -> str:
    return f"### `{block.name}`\n\n" + table(titles, block.rows)
