"""Defines the commands that check and convert soft prompts and LoRA adapters; a failure prints one line."""

from pathlib import Path
from typing import Any

import click

from tgis.cli.command import OneLine
from tgis.cli.models import cache_root, told_in_one_line
from tgis.cli.parameters import parameter
from tgis.config.option import declared
from tgis.config.processes import ShardConfig
from tgis.hub.cache import find_model

# Shard options that decide if a prompt or adapter fits.
DECISIVE = (
    "dtype",
    "max_sequence_length",
    "max_prompt_prefix_length",
    "prompt_cache_size_mb",
    "adapter_cache_size_mb",
)


def _check_prompt(path: Path, model: str | None, revision: str | None, **decisive: Any) -> None:
    with told_in_one_line():
        directory = None if model is None else find_model(model, revision, cache_root())
        from tgis.cli import prompt_check

        config = None
        if directory is not None:
            config = ShardConfig(model_path=str(directory), prefix_store_path=str(path), **decisive)
        click.echo("\n".join(prompt_check.describe(path, config)))


check_prompt = OneLine(
    "check-prompt",
    callback=_check_prompt,
    help="Tell whether PATH, a directory or one of its files, is a good soft prompt or LoRA adapter.",
    params=[
        click.Argument(["path"], type=click.Path(path_type=Path)),
        click.Option(["--model"], help="Also whether it fits this model, a directory or in the hub cache."),
        click.Option(["--revision"], help="Revision of the model in the hub cache."),
        *(
            parameter(f, option, hint, False)
            for f, option, hint in declared(ShardConfig)
            if f.name in DECISIVE
        ),
    ],
    context_settings={"show_default": True},
)


@click.command("convert-prompt", cls=OneLine)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--with-decoder",
    is_flag=True,
    help="Of PEFT's files for an encoder-decoder, also the decoder's half, which PEFT itself never uses.",
)
@click.option("--overwrite", is_flag=True, help="Replace the prompt that TARGET holds.")
def convert_prompt(source: Path, target: Path, with_decoder: bool, overwrite: bool) -> None:
    """Write the soft prompt in the directory SOURCE to TARGET, in the other layout: decoder.pt, encoder.pt or
    both, or PEFT's files."""
    with told_in_one_line():
        from tgis.convert import soft_prompts

        click.echo(soft_prompts.convert_prompt(source, target, with_decoder, overwrite))


COMMANDS = (check_prompt, convert_prompt)
