"""Implements `tgis client`. Answers go to stdout; a failed call prints one line on stderr, status 1."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import grpc
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from tgis.cli.command import OneLineGroup, command
from tgis.config.option import option
from tgis.errors import OperatorError
from tgis.logs import printable
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Connection:
    target: str = option("Host and port of the service.", "localhost:8033", env=False)
    timeout: float | None = option("Seconds a call may take; unset: no limit.", None, env=False, minimum=0)
    tls: bool = option("Use TLS; without --ca-cert the system's authorities are trusted.", False, env=False)
    ca_cert: str | None = option("PEM file of the authorities to trust; implies --tls.", None, env=False)
    cert: str | None = option("PEM file of the client's certificate; needs --key.", None, env=False)
    key: str | None = option("PEM file of the client's private key; needs --cert.", None, env=False)
    token: str | None = option(
        "Bearer token. Other users of this machine can read flags: use the variable or --token-path.",
        None,
        env="TGIS_TOKEN",
    )
    token_path: str | None = option(
        "File whose first line is the bearer token; used instead of --token.", None, env=False
    )


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options of a generation. The service decides the unset ones; any sampling option turns sampling on."""

    max_new_tokens: int | None = option(
        "Most tokens to generate.", None, env=False, minimum=0, maximum=MAX_UINT32
    )
    min_new_tokens: int | None = option(
        "Fewest tokens to generate.", None, env=False, minimum=0, maximum=MAX_UINT32
    )
    temperature: float | None = option("Sample with this temperature.", None, env=False)
    top_k: int | None = option(
        "Sample among the K likeliest tokens.", None, env=False, minimum=0, maximum=MAX_UINT32
    )
    top_p: float | None = option(
        "Sample among the likeliest tokens that together reach this probability.", None, env=False
    )
    typical_p: float | None = option(
        "Sample among the most typical tokens that together reach this probability.", None, env=False
    )
    seed: int | None = option("Sample with this seed.", None, env=False, minimum=0, maximum=MAX_UINT64)
    stop: tuple[str, ...] = option("Stop after this text; may be given more than once.", (), env=False)
    regex: str | None = option("Generate what this regular expression matches.", None, env=False)
    json_schema: str | None = option("Generate what this JSON Schema describes.", None, env=False)
    grammar: str | None = option("Generate what this grammar, Lark or GBNF, describes.", None, env=False)
    choice: tuple[str, ...] = option(
        "Generate this text; may be given more than once, for one of several.", (), env=False
    )
    truncate_input_tokens: int | None = option(
        "Keep only the last N tokens of an input; unset or 0: all.",
        None,
        env=False,
        minimum=0,
        maximum=MAX_UINT32,
    )
    prefix_id: str | None = option("Tuned soft prompt to put before the input.", None, env=False)
    adapter_id: str | None = option("LoRA adapter to generate with.", None, env=False)
    details: bool = option(
        "Also print a table of the tokens: log-probability, rank, likeliest tokens.", False, env=False
    )
    top_n: int = option(
        "Likeliest tokens per position in the table.", 3, env=False, minimum=0, maximum=MAX_UINT32
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    json: bool = option("Print the service's messages as JSON, one per line.", False, env=False)


class CallError(OperatorError):
    """Error when the service cannot be reached or answers with an error."""


@contextmanager
def connect(connection: Connection) -> Iterator[GenerationServiceStub]:
    """Yield a stub that is open inside the block. Raises CallError if a call in the block fails."""
    with _open_channel(connection) as channel:
        try:
            yield GenerationServiceStub(channel)
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call):
                raise
            raise CallError(f"{error.code().name}: {error.details() or 'no details'}") from error


def generate(
    connection: Connection, options: GenerationOptions, output: OutputOptions, inputs: Sequence[str]
) -> None:
    """Print one answer per input, in order. Raises CallError."""
    request = pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text=text) for text in inputs],
        params=build_parameters(options),
        prefix_id=options.prefix_id,
        adapter_id=options.adapter_id,
    )
    with connect(connection) as stub:
        responses = stub.Generate(request, **_call_options(connection)).responses
    for text, response in zip(inputs, responses, strict=True):
        if output.json:
            click.echo(to_json(response))
            continue
        if len(inputs) > 1:
            click.echo(f"--- {printable(text)}")
        click.echo(response.text)
        if options.details:
            _print_details(response, response.tokens)


def stream(connection: Connection, options: GenerationOptions, output: OutputOptions, text: str) -> None:
    """Print the answer as it arrives. Raises CallError, also in the middle of an answer."""
    request = pb.SingleGenerationRequest(
        request=pb.GenerationRequest(text=text),
        params=build_parameters(options),
        prefix_id=options.prefix_id,
        adapter_id=options.adapter_id,
    )
    with connect(connection) as stub:
        messages = stub.GenerateStream(request, **_call_options(connection))
        if output.json:
            for message in messages:
                click.echo(to_json(message))
        else:
            _print_stream(messages, options.details)


def tokenize(connection: Connection, output: OutputOptions, inputs: Sequence[str]) -> None:
    """Print each input's token count and tokens, with their offsets in UTF-8 bytes. Raises CallError."""
    request = pb.BatchedTokenizeRequest(
        requests=[pb.TokenizeRequest(text=text) for text in inputs], return_tokens=True, return_offsets=True
    )
    with connect(connection) as stub:
        responses = stub.Tokenize(request, **_call_options(connection)).responses
    for response in responses:
        if output.json:
            click.echo(to_json(response))
            continue
        click.echo(f"{response.token_count} tokens")
        spans = zip(response.tokens, response.offsets, strict=True)
        click.echo(format_table([[printable(token), str(at.start), str(at.end)] for token, at in spans]))


def info(connection: Connection, output: OutputOptions) -> None:
    """Print the model's kind and limits. Raises CallError."""
    with connect(connection) as stub:
        response = stub.ModelInfo(pb.ModelInfoRequest(), **_call_options(connection))
    if output.json:
        click.echo(to_json(response))
        return
    kind = pb.ModelInfoResponse.ModelKind.Name(response.model_kind)
    limits = [[name, str(getattr(response, name))] for name in ("max_sequence_length", "max_new_tokens")]
    click.echo(format_table([["model_kind", kind], *limits]))


def build_parameters(options: GenerationOptions) -> pb.Parameters:
    chosen = (
        options.temperature,
        options.top_k,
        options.top_p,
        options.typical_p,
        options.seed,
    )
    return pb.Parameters(
        method=pb.SAMPLE if any(value is not None for value in chosen) else pb.GREEDY,
        sampling=pb.SamplingParameters(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            typical_p=options.typical_p,
            seed=options.seed,
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


def to_json(message: Message) -> str:
    """Format the message as one line of JSON, with the proto's field names and with default values."""
    return MessageToJson(
        message,
        indent=None,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
        ensure_ascii=False,
    )


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as left-aligned columns, two spaces apart. All rows must have the same number of cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _open_channel(connection: Connection) -> grpc.Channel:
    # The token details of long inputs exceed gRPC's default limit of 4 MiB.
    options = [("grpc.max_receive_message_length", -1)]
    files = (connection.ca_cert, connection.key, connection.cert)
    if not connection.tls and not any(files):
        return grpc.insecure_channel(connection.target, options)
    if (connection.cert is None) != (connection.key is None):
        raise click.UsageError("--cert and --key must be given together")
    credentials = grpc.ssl_channel_credentials(*(_read(path) if path else None for path in files))
    return grpc.secure_channel(connection.target, credentials, options)


def _call_options(connection: Connection) -> dict[str, Any]:
    """Return the time limit and the metadata of every call. Raises click.ClickException."""
    token = connection.token
    if connection.token_path:
        first, *_ = _read(connection.token_path).splitlines() or [b""]
        token = first.decode(errors="replace").strip()
    if token is None:
        return {"timeout": connection.timeout}
    if not token or not token.isascii() or not token.isprintable():
        raise click.UsageError("the token must be a line of printable ASCII characters")
    return {"timeout": connection.timeout, "metadata": [("authorization", f"Bearer {token}")]}


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise click.FileError(path, error.strerror) from error


def _print_stream(messages: Iterable[pb.GenerationResponse], details: bool) -> None:
    tokens: list[pb.TokenInfo] = []
    summary = pb.GenerationResponse()
    try:
        for message in messages:
            # echo flushes, so a pipe also receives the text as it arrives.
            click.echo(message.text, nl=False)
            tokens.extend(message.tokens)
            # Only some messages carry the counts and the stop reason; the last value wins.
            summary.MergeFrom(message)
    finally:
        click.echo()
    if details:
        _print_details(summary, tokens)


def _print_details(response: pb.GenerationResponse, tokens: Iterable[pb.TokenInfo]) -> None:
    head = ["token", "logprob", "rank", "likeliest"]
    rows = [
        [printable(token.text), f"{token.logprob:.4f}", str(token.rank), _format_top_tokens(token)]
        for token in tokens
    ]
    counts = f"{response.input_token_count} input tokens, {response.generated_token_count} generated"
    click.echo(f"\n{pb.StopReason.Name(response.stop_reason)}: {counts}, seed {response.seed}")
    click.echo(format_table([head, *rows]))


def _format_top_tokens(token: pb.TokenInfo) -> str:
    return "  ".join(f"{printable(top.text)} {top.logprob:.4f}" for top in token.top_tokens)


_CALLING, _GENERATING = (Connection, OutputOptions), (Connection, GenerationOptions, OutputOptions)
_text = click.Argument(["text"], metavar="TEXT")
_texts = click.Argument(["inputs"], nargs=-1, required=True, metavar="TEXT...")

client = OneLineGroup(
    "client",
    help="Call a running service.",
    commands=[
        command("generate", generate, "Generate text for one or more inputs.", *_GENERATING, extra=[_texts]),
        command(
            "stream", stream, "Print text for one input as it is generated.", *_GENERATING, extra=[_text]
        ),
        command("tokenize", tokenize, "Count and list the tokens of texts.", *_CALLING, extra=[_texts]),
        command("info", info, "Print the model's kind and limits.", *_CALLING),
    ],
)
