"""Defines the command `client` and its subcommands."""

import click

from tgis.cli.client.calls import generate, info, stream, tokenize
from tgis.cli.client.options import Connection, GenerationOptions, OutputOptions, TokenIdOptions
from tgis.cli.command import OneLineGroup
from tgis.cli.command import command as build_command

_GENERATING = (Connection, GenerationOptions, TokenIdOptions, OutputOptions)
_text = click.Argument(["text"], metavar="TEXT")
_texts = click.Argument(["inputs"], nargs=-1, required=True, metavar="TEXT...")

command = OneLineGroup(
    "client",
    help="Call a running service.",
    commands=[
        build_command(
            "generate", generate, "Generate text for one or more inputs.", *_GENERATING, extra=[_texts]
        ),
        build_command(
            "stream", stream, "Print text for one input as it is generated.", *_GENERATING, extra=[_text]
        ),
        build_command(
            "tokenize",
            tokenize,
            "Count and list the tokens of texts.",
            Connection,
            TokenIdOptions,
            OutputOptions,
            extra=[_texts],
        ),
        build_command("info", info, "Print the model's kind and limits.", Connection, OutputOptions),
    ],
)
