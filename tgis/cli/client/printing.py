"""Prints responses to stdout."""

from collections.abc import Iterable, Sequence

import click
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from tgis.logs import printable
from tgis.pb import generation_pb2 as pb

TRAILERS = {
    "tgis-queue-ms": "{} ms in the queue",
    "tgis-first-token-ms": "first token after {} ms",
    "tgis-total-ms": "{} ms in total",
    "tgis-cached-tokens": "{} cached input tokens",
}
"""Keys of trailing metadata that are printed, in this order."""


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


def print_stream(messages: Iterable[pb.GenerationResponse], details: bool) -> None:
    tokens: list[pb.TokenInfo] = []
    summary = pb.GenerationResponse()
    try:
        for message in messages:
            # echo flushes, so a pipe also receives the text as it arrives.
            click.echo(message.text, nl=False)
            tokens.extend(message.tokens)
            # Only some messages contain the counts and the stop reason; the last value is kept.
            summary.MergeFrom(message)
    finally:
        click.echo()
    if details:
        print_details(summary, tokens)


def print_details(response: pb.GenerationResponse, tokens: Iterable[pb.TokenInfo]) -> None:
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


def print_trailers(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Print the timings and counts in a call's trailing metadata, if there are any."""
    values = dict(metadata)
    parts = [text.format(values[key]) for key, text in TRAILERS.items() if key in values]
    if parts:
        click.echo(f"\n{', '.join(parts)}")


def print_tokens(response: pb.TokenizeResponse) -> None:
    """Print the token count and the tokens, with byte offsets (UTF-8) if the response has them."""
    click.echo(f"{response.token_count} tokens")
    offsets = [[str(at.start), str(at.end)] for at in response.offsets] or [[] for _ in response.tokens]
    spans = zip(response.tokens, offsets, strict=True)
    click.echo(format_table([[printable(token), *at] for token, at in spans]))
