"""Declares the options of `tgis client`, and builds a call's parameters and metadata from them."""

import os
from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any

import click

from tgis.config.option import option
from tgis.config.serving import MIN_PRIORITY
from tgis.pb import generation_pb2 as pb
from tgis.sampling_parameters import PARAMETERS, SHARED, Parameter

MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1

Metadata = list[tuple[str, str | bytes]]


@dataclass(frozen=True, kw_only=True)
class Connection:
    target: str = option("Host and port of the service.", "localhost:8033", env=False)
    timeout: float | None = option(
        "Maximum duration of a call, in seconds; unset: no limit.", None, env=False, minimum=0
    )
    tls: bool = option("Use TLS; without --ca-cert, the system's CAs are trusted.", False, env=False)
    ca_cert: str | None = option("PEM file of the CAs to trust; implies --tls.", None, env=False)
    cert: str | None = option("PEM file of the client's certificate; needs --key.", None, env=False)
    key: str | None = option("PEM file of the client's private key; needs --cert.", None, env=False)
    token: str | None = option(
        "Bearer token; unset: none. Other users of this machine can read flags: prefer the variable or "
        "--token-path.",
        None,
        env="TGIS_TOKEN",
    )
    token_path: str | None = option(
        "File whose first line is the bearer token; it overrides --token.", None, env=False
    )


_SAMPLING = sorted((each for each in PARAMETERS if each.help), key=lambda each: each in SHARED)


def _sampling_option(parameter: Parameter) -> tuple[str, Any, Any]:
    """Return the field of a sampling parameter's option. The service checks its range."""
    if isinstance(parameter.off, float):
        return parameter.name, float | None, option(f"{parameter.help}.", None, env=False)
    maximum = MAX_UINT64 if parameter.dtype == "u8" else MAX_UINT32
    declared = option(f"{parameter.help}.", None, env=False, minimum=0, maximum=maximum)
    return parameter.name, int | None, declared


if TYPE_CHECKING:
    SamplingOptions = object
else:
    SamplingOptions = make_dataclass(
        "SamplingOptions", map(_sampling_option, _SAMPLING), frozen=True, kw_only=True
    )


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(SamplingOptions):
    """Options of a generation. Unset ones get the service's defaults; a sampling option turns sampling on."""

    max_new_tokens: int | None = option(
        "Maximum number of tokens to generate.", None, env=False, minimum=0, maximum=MAX_UINT32
    )
    min_new_tokens: int | None = option(
        "Minimum number of tokens to generate.", None, env=False, minimum=0, maximum=MAX_UINT32
    )
    logit_bias: tuple[str, ...] = option(
        "ID:BIAS: add BIAS to the logit of token ID; may be repeated.", (), env=False
    )
    watermark: bool = option("Mark the text with the service's watermark.", False, env=False)
    stop: tuple[str, ...] = option("Stop after this text; may be repeated.", (), env=False)
    stop_token_id: tuple[int, ...] = option(
        "Stop at this token id; may be repeated.", (), env=False, minimum=0, maximum=MAX_UINT32
    )
    ignore_eos: bool = option("Continue after the model's end-of-sequence token.", False, env=False)
    regex: str | None = option("Generate text that matches this regular expression.", None, env=False)
    json_schema: str | None = option("Generate JSON that matches this JSON Schema.", None, env=False)
    grammar: str | None = option("Generate text that matches this grammar, in Lark or GBNF.", None, env=False)
    choice: tuple[str, ...] = option("Generate one of these texts; repeat for each text.", (), env=False)
    truncate_input_tokens: int | None = option(
        "Keep only the last N tokens of an input; unset or 0: all.",
        None,
        env=False,
        minimum=0,
        maximum=MAX_UINT32,
    )
    prefix_id: str | None = option("Id of the tuned soft prompt to put before the input.", None, env=False)
    adapter_id: str | None = option("Id of the LoRA adapter to generate with.", None, env=False)
    cache_salt: str | None = option(
        "Share cached prompts only with calls that have the same salt.", None, env=False
    )
    priority: int | None = option(
        "Start before calls with a larger number, as far as the service allows; unset: 0.",
        None,
        env=False,
        minimum=MIN_PRIORITY,
    )
    details: bool = option(
        "Also print a table of the tokens (log-probability, rank, likeliest tokens) and the call's timings.",
        False,
        env=False,
    )
    top_n: int = option(
        "Number of most likely tokens per position in the table.",
        3,
        env=False,
        minimum=0,
        maximum=MAX_UINT32,
    )


@dataclass(frozen=True, kw_only=True)
class TokenIdOptions:
    input_ids: bool = option(
        "Read each TEXT as token ids: decimal numbers separated by single spaces.", False, env=False
    )
    token_ids: bool = option("Show token ids instead of token texts.", False, env=False)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    json: bool = option("Print the service's messages as JSON, one per line.", False, env=False)


def build_parameters(options: GenerationOptions) -> pb.Parameters:
    """Return the parameters that have a field in fmaas's messages. Raises click.UsageError."""
    given = [each for each in _SAMPLING if getattr(options, each.name) is not None]
    return pb.Parameters(
        method=pb.SAMPLE if any(each.random_only for each in given) else pb.GREEDY,
        sampling=pb.SamplingParameters(
            **{each.name: getattr(options, each.name) for each in given if each not in SHARED}
        ),
        stopping=pb.StoppingCriteria(
            max_new_tokens=options.max_new_tokens,
            min_new_tokens=options.min_new_tokens,
            stop_sequences=options.stop,
        ),
        decoding=_build_decoding(options),
        response=pb.ResponseOptions(
            generated_tokens=options.details,
            token_logprobs=options.details,
            token_ranks=options.details,
            top_n_tokens=options.top_n if options.details else 0,
        ),
        truncate_input_tokens=options.truncate_input_tokens,
    )


def _build_decoding(options: GenerationOptions) -> pb.DecodingParameters:
    constraints = (options.regex, options.json_schema, options.grammar, options.choice or None)
    if sum(one is not None for one in constraints) > 1:
        raise click.UsageError("--regex, --json-schema, --grammar and --choice exclude each other")
    choices = pb.DecodingParameters.StringChoices(choices=options.choice) if options.choice else None
    return pb.DecodingParameters(
        regex=options.regex,
        json_schema=options.json_schema,
        grammar=options.grammar,
        choice=choices,
    )


def build_metadata(options: GenerationOptions) -> Metadata:
    """Return the parameters that have no field in fmaas's messages, as metadata. Raises click.UsageError."""
    texts = {
        "tgis-logit-bias": ",".join(map(_format_bias, options.logit_bias)),
        **{each.metadata_key: _format_number(getattr(options, each.name)) for each in SHARED},
        "tgis-stop-token-ids": ",".join(map(str, options.stop_token_id)),
        "tgis-ignore-eos": "true" if options.ignore_eos else "",
        "tgis-watermark": "true" if options.watermark else "",
        "tgis-priority": "" if options.priority is None else str(options.priority),
    }
    metadata: Metadata = [(key, text) for key, text in texts.items() if text]
    if options.cache_salt is not None:
        # Unlike tgis-cache-salt, this key accepts any bytes.
        metadata.append(("tgis-cache-salt-bin", os.fsencode(options.cache_salt)))
    return metadata


def build_token_id_metadata(options: TokenIdOptions) -> Metadata:
    switches = {"tgis-input": options.input_ids, "tgis-tokens": options.token_ids}
    return [(key, "ids") for key, is_on in switches.items() if is_on]


def _format_bias(text: str) -> str:
    token_id, _, bias = text.partition(":")
    try:
        return f"{int(token_id)}:{float(bias)}"
    except ValueError as error:
        raise click.UsageError("--logit-bias must be ID:BIAS, for example 17:-100") from error


def _format_number(value: float | None) -> str:
    return "" if value is None else str(value)
