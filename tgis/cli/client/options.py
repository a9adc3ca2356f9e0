"""Declares the options of `tgis client`, and builds a call's parameters and arguments from them."""

import os
from dataclasses import dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Any

import click

from tgis.config.option import option
from tgis.config.serving import MIN_PRIORITY
from tgis.sampling_parameters import PARAMETERS, SHARED, Parameter
from tgis_client import CallArguments, LengthPenalty, Parameters, Prompt

MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Connection:
    target: str = option("Host and port of the service; without a port, 8033.", "localhost:8033", env=False)
    timeout: float | None = option(
        "Maximum duration of a call, in seconds; unset: no limit.", None, env=False, minimum=0
    )
    retries: int = option(
        "Maximum number of retries of a call that the service could not take.", 3, env=False, minimum=0
    )
    wait: float | None = option(
        "Time, in seconds, to wait until the service is ready; unset: do not wait.",
        None,
        env=False,
        minimum=0,
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
    time_limit_millis: int | None = option(
        "End the text after this time, in milliseconds.", None, env=False, minimum=0, maximum=MAX_UINT32
    )
    repetition_penalty: float | None = option(
        "Make tokens that have occurred less likely by this factor.", None, env=False
    )
    length_penalty: str | None = option(
        "START:FACTOR: make the end more likely by FACTOR with each token after START tokens.",
        None,
        env=False,
    )
    logit_bias: tuple[str, ...] = option(
        "ID:BIAS: add BIAS to the logit of token ID; may be repeated.", (), env=False
    )
    watermark: bool = option("Mark the text with the service's watermark.", False, env=False)
    stop: tuple[str, ...] = option("Stop after this text; may be repeated.", (), env=False)
    include_stop: bool = option("Keep the text of --stop at the end of the text.", False, env=False)
    stop_token_id: tuple[int, ...] = option(
        "Stop at this token id; may be repeated.", (), env=False, minimum=0, maximum=MAX_UINT32
    )
    ignore_eos: bool = option("Continue after the model's end-of-sequence token.", False, env=False)
    regex: str | None = option("Generate text that matches this regular expression.", None, env=False)
    json_schema: str | None = option("Generate JSON that matches this JSON Schema.", None, env=False)
    grammar: str | None = option("Generate text that matches this grammar, in Lark or GBNF.", None, env=False)
    choice: tuple[str, ...] = option("Generate one of these texts; repeat for each text.", (), env=False)
    json_object: bool = option("Generate any JSON object.", False, env=False)
    input_text: bool = option("Print the input before its text.", False, env=False)
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
    json: bool = option("Print results as JSON, one per line.", False, env=False)


def build_parameters(options: GenerationOptions) -> Parameters:
    """Return the client's parameters. Raises click.UsageError."""
    given = {each.name: getattr(options, each.name) for each in _SAMPLING}
    known = {each.name for each in fields(Parameters)}
    is_random = any(each.random_only and given[each.name] is not None for each in _SAMPLING)
    constraints = (options.regex, options.json_schema, options.grammar, options.choice or None)
    if sum(one is not None for one in constraints) + options.json_object > 1:
        raise click.UsageError(
            "--regex, --json-schema, --grammar, --choice and --json-object exclude each other"
        )
    return Parameters(
        **{name: value for name, value in given.items() if name in known},
        sample=is_random or None,
        max_new_tokens=options.max_new_tokens,
        min_new_tokens=options.min_new_tokens,
        time_limit_millis=options.time_limit_millis,
        repetition_penalty=options.repetition_penalty,
        length_penalty=_read_length_penalty(options.length_penalty),
        logit_bias=dict(map(_read_bias, options.logit_bias)),
        watermark=options.watermark,
        stop_sequences=options.stop,
        include_stop_sequence=options.include_stop or None,
        stop_token_ids=options.stop_token_id,
        ignore_eos=options.ignore_eos,
        regex=options.regex,
        json_schema=options.json_schema,
        grammar=options.grammar,
        choices=options.choice,
        json_object=options.json_object,
        input_text=options.input_text,
        truncate_input_tokens=options.truncate_input_tokens,
        tokens=options.details,
        logprobs=options.details,
        ranks=options.details,
        top_n_tokens=options.top_n if options.details else 0,
    )


def build_arguments(options: GenerationOptions, ids: TokenIdOptions) -> CallArguments:
    """Return the call's other arguments. Sampling parameters that the client does not know are metadata."""
    known = {each.name for each in fields(Parameters)}
    unknown = [each for each in SHARED if each.name not in known]
    given = ((each.metadata_key, getattr(options, each.name)) for each in unknown)
    return {
        "prefix_id": options.prefix_id,
        "adapter_id": options.adapter_id,
        "priority": options.priority,
        "cache_salt": None if options.cache_salt is None else os.fsencode(options.cache_salt),
        "token_ids": ids.token_ids,
        "metadata": [(key, str(value)) for key, value in given if value is not None],
    }


def read_prompt(text: str, options: TokenIdOptions) -> Prompt:
    """Return the text, or its token ids. Raises click.UsageError."""
    if not options.input_ids:
        return text
    try:
        return [int(word) for word in text.split()]
    except ValueError as error:
        raise click.UsageError("with --input-ids, TEXT must be decimal numbers, for example '5 6'") from error


def _read_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError as error:
        raise click.UsageError("--logit-bias must be ID:BIAS, for example 17:-100") from error


def _read_length_penalty(text: str | None) -> LengthPenalty | None:
    if text is None:
        return None
    start, _, factor = text.partition(":")
    try:
        return LengthPenalty(int(start), float(factor))
    except ValueError as error:
        raise click.UsageError("--length-penalty must be START:FACTOR, for example 20:1.05") from error
