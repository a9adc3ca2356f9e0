"""Calls the service and prints responses to stdout; a failed call raises CallError."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import grpc

from tgis.cli.client import printing
from tgis.cli.client.options import (
    Connection,
    GenerationOptions,
    Metadata,
    OutputOptions,
    TokenIdOptions,
    build_metadata,
    build_parameters,
    build_token_id_metadata,
)
from tgis.errors import OperatorError
from tgis.logs import printable
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub


class CallError(OperatorError):
    """Error when the service cannot be reached or returns an error."""


@contextmanager
def connect(connection: Connection) -> Iterator[GenerationServiceStub]:
    """Yield a connected stub. Raises CallError if a call in the block fails."""
    with _open_channel(connection) as channel:
        try:
            yield GenerationServiceStub(channel)
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call):
                raise
            raise CallError(f"{error.code().name}: {error.details() or 'no details'}") from error


def generate(
    connection: Connection,
    options: GenerationOptions,
    ids: TokenIdOptions,
    output: OutputOptions,
    inputs: Sequence[str],
) -> None:
    """Print one response per input, in order. Raises CallError."""
    request = pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text=text) for text in inputs],
        params=build_parameters(options),
        prefix_id=options.prefix_id,
        adapter_id=options.adapter_id,
    )
    metadata = build_metadata(options) + build_token_id_metadata(ids)
    with connect(connection) as stub:
        answer, call = stub.Generate.with_call(request, **_call_options(connection, metadata))
        trailers = call.trailing_metadata()
    if output.json:
        for response in answer.responses:
            click.echo(printing.to_json(response))
        return
    for text, response in zip(inputs, answer.responses, strict=True):
        if len(inputs) > 1:
            click.echo(f"--- {printable(text)}")
        click.echo(response.text)
        if options.details:
            printing.print_details(response, response.tokens)
    if options.details:
        printing.print_trailers(trailers)


def stream(
    connection: Connection,
    options: GenerationOptions,
    ids: TokenIdOptions,
    output: OutputOptions,
    text: str,
) -> None:
    """Print the response as it arrives. Raises CallError, also in the middle of a response."""
    request = pb.SingleGenerationRequest(
        request=pb.GenerationRequest(text=text),
        params=build_parameters(options),
        prefix_id=options.prefix_id,
        adapter_id=options.adapter_id,
    )
    metadata = build_metadata(options) + build_token_id_metadata(ids)
    with connect(connection) as stub:
        messages = stub.GenerateStream(request, **_call_options(connection, metadata))
        if output.json:
            for message in messages:
                click.echo(printing.to_json(message))
            return
        printing.print_stream(messages, options.details)
        if options.details:
            printing.print_trailers(messages.trailing_metadata())


def tokenize(
    connection: Connection, ids: TokenIdOptions, output: OutputOptions, inputs: Sequence[str]
) -> None:
    """Print each input's token count and tokens, with offsets if the input is text. Raises CallError."""
    request = pb.BatchedTokenizeRequest(
        requests=[pb.TokenizeRequest(text=text) for text in inputs],
        return_tokens=True,
        return_offsets=not ids.input_ids,
    )
    with connect(connection) as stub:
        call_options = _call_options(connection, build_token_id_metadata(ids))
        responses = stub.Tokenize(request, **call_options).responses
    for response in responses:
        if output.json:
            click.echo(printing.to_json(response))
        else:
            printing.print_tokens(response)


def info(connection: Connection, output: OutputOptions) -> None:
    """Print the model's kind and limits. Raises CallError."""
    with connect(connection) as stub:
        response = stub.ModelInfo(pb.ModelInfoRequest(), **_call_options(connection, []))
    if output.json:
        click.echo(printing.to_json(response))
        return
    kind = pb.ModelInfoResponse.ModelKind.Name(response.model_kind)
    limits = [[name, str(getattr(response, name))] for name in ("max_sequence_length", "max_new_tokens")]
    click.echo(printing.format_table([["model_kind", kind], *limits]))


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


def _call_options(connection: Connection, metadata: Metadata) -> dict[str, Any]:
    """Return a call's timeout and its metadata with the bearer token. Raises click.ClickException."""
    token = connection.token
    if connection.token_path:
        first, *_ = _read(connection.token_path).splitlines() or [b""]
        token = first.decode(errors="replace").strip()
    if token is None:
        return {"timeout": connection.timeout, "metadata": metadata}
    if not token or not token.isascii() or not token.isprintable():
        raise click.UsageError("the token must be a line of printable ASCII characters")
    return {"timeout": connection.timeout, "metadata": [("authorization", f"Bearer {token}"), *metadata]}


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise click.FileError(path, error.strerror) from error
