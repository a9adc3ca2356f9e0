"""Prints results to stdout."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from enum import Enum
from typing import Any

import click

from tgis.logs import printable
from tgis_client import CallReport, Generation, ModelInfo, Offset, Token, Tokenization

REPORT = {
    "queue_ms": "{} ms in the queue",
    "first_token_ms": "first token after {} ms",
    "total_ms": "{} ms in total",
    "cached_tokens": "{} cached input tokens",
}
"""Values of a call's report that are printed, in this order."""


def to_json(result: Generation | Tokenization | ModelInfo) -> str:
    """Format the result as one line of JSON, with the names of fmaas's fields."""
    return json.dumps(_plain(asdict(result)), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, Offset):
        return value._asdict()
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value.name if isinstance(value, Enum) else value


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as left-aligned columns, two spaces apart. All rows must have the same number of cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def print_texts(parts: Iterable[Generation]) -> None:
    try:
        for part in parts:
            # echo flushes, so a pipe also receives the text as it arrives.
            click.echo(part.text, nl=False)
    finally:
        click.echo()


def print_details(generation: Generation) -> None:
    head = ["token", "logprob", "rank", "likeliest"]
    rows = [
        [printable(token.text), f"{token.logprob:.4f}", str(token.rank), _format_top_tokens(token)]
        for token in generation.tokens
    ]
    counts = f"{generation.input_token_count} input tokens, {generation.generated_token_count} generated"
    click.echo(f"\n{generation.stop_reason.name}: {counts}, seed {generation.seed}")
    click.echo(format_table([head, *rows]))


def _format_top_tokens(token: Token) -> str:
    return "  ".join(f"{printable(top.text)} {top.logprob:.4f}" for top in token.top_tokens)


def print_report(report: CallReport) -> None:
    """Print the times and counts that the service sent, if there are any."""
    values = {name: getattr(report, name) for name in REPORT}
    parts = [text.format(values[name]) for name, text in REPORT.items() if values[name] is not None]
    if parts:
        click.echo(f"\n{', '.join(parts)}")


def print_tokens(tokenization: Tokenization) -> None:
    """Print the token count and the tokens, with byte offsets (UTF-8) if there are any."""
    click.echo(f"{tokenization.token_count} tokens")
    offsets = [[str(at.start), str(at.end)] for at in tokenization.offsets] or [
        [] for _ in tokenization.tokens
    ]
    spans = zip(tokenization.tokens, offsets, strict=True)
    click.echo(format_table([[printable(token), *at] for token, at in spans]))
