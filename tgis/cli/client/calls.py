"""Calls the service and prints results to stdout; a failed call raises ServiceCallError."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from tgis.cli.client import printing
from tgis.cli.client.options import (
    Connection,
    GenerationOptions,
    OutputOptions,
    TokenIdOptions,
    build_arguments,
    build_parameters,
    read_prompt,
)
from tgis.errors import OperatorError
from tgis.logs import printable
from tgis_client import CallError, Client, RetryPolicy, SettingsError, Tls, UnavailableError


class ServiceCallError(OperatorError):
    """Error when the service cannot be reached or returns an error."""


@contextmanager
def connect(connection: Connection) -> Iterator[Client]:
    """Yield a client. Raises ServiceCallError if a call in the block fails, and click.UsageError."""
    try:
        with _open_client(connection) as client:
            if connection.wait is not None:
                client.wait_until_healthy(connection.wait)
            yield client
    except CallError as error:
        is_refused = isinstance(error, UnavailableError) and error.is_refused
        advice = f"; start the service at {connection.target}, or set --target"
        raise ServiceCallError(f"{error}{advice if is_refused else ''}") from error
    except SettingsError as error:
        raise click.UsageError(str(error)) from error


def _open_client(connection: Connection) -> Client:
    files = (connection.ca_cert, connection.cert, connection.key)
    if (connection.cert is None) != (connection.key is None):
        raise click.UsageError("--cert and --key must be given together")
    tls = None
    if connection.tls or any(files):
        tls = Tls(ca_cert=connection.ca_cert, cert=connection.cert, key=connection.key)
    return Client(
        connection.target,
        tls=tls,
        token=connection.token,
        token_path=connection.token_path,
        timeout=connection.timeout,
        retry=RetryPolicy(max_attempts=1 + connection.retries),
    )


def generate(
    connection: Connection,
    options: GenerationOptions,
    ids: TokenIdOptions,
    output: OutputOptions,
    inputs: Sequence[str],
) -> None:
    """Print one text per input, in order."""
    parameters = build_parameters(options)
    prompts = [read_prompt(text, ids) for text in inputs]
    with connect(connection) as client:
        generations = client.generate_batch(prompts, parameters, **build_arguments(options, ids))
    if output.json:
        for generation in generations:
            click.echo(printing.to_json(generation))
        return
    for text, generation in zip(inputs, generations, strict=True):
        if len(inputs) > 1:
            click.echo(f"--- {printable(text)}")
        click.echo(generation.text)
        if options.details:
            printing.print_details(generation)
    if options.details:
        printing.print_report(generations[0].report)


def stream(
    connection: Connection,
    options: GenerationOptions,
    ids: TokenIdOptions,
    output: OutputOptions,
    text: str,
) -> None:
    """Print the text as it arrives. An error may occur in the middle of it."""
    parameters = build_parameters(options)
    prompt = read_prompt(text, ids)
    with connect(connection) as client:
        with client.stream(prompt, parameters, **build_arguments(options, ids)) as parts:
            if output.json:
                for part in parts:
                    click.echo(printing.to_json(part))
                return
            printing.print_texts(parts)
            if options.details:
                printing.print_details(parts.result)
                printing.print_report(parts.result.report)


def tokenize(
    connection: Connection, ids: TokenIdOptions, output: OutputOptions, inputs: Sequence[str]
) -> None:
    """Print each input's token count and tokens, with offsets if the input is text."""
    prompts = [read_prompt(text, ids) for text in inputs]
    with connect(connection) as client:
        results = client.tokenize(prompts, offsets=not ids.input_ids, token_ids=ids.token_ids)
    for tokenization in results:
        if output.json:
            click.echo(printing.to_json(tokenization))
        else:
            printing.print_tokens(tokenization)


def info(connection: Connection, output: OutputOptions) -> None:
    """Print the model's kind and limits."""
    with connect(connection) as client:
        model = client.model_info()
    if output.json:
        click.echo(printing.to_json(model))
        return
    limits = [[name, str(getattr(model, name))] for name in ("max_sequence_length", "max_new_tokens")]
    click.echo(printing.format_table([["model_kind", model.model_kind.name], *limits]))
