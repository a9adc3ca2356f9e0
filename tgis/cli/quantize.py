"""Defines the command that quantizes models."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from tgis.cli.command import FileCommand
from tgis.cli.models import cache_root, find_files, revision_option
from tgis.errors import OperatorError

if TYPE_CHECKING:
    from tgis.shard.quantize.gguf.output import GgufKind
    from tgis.shard.quantize.settings import Method, QuantizeSettings


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """Options of the command, as click reads them."""

    method: str
    gguf_type: str | None
    bits: str
    sensitive_bits: str | None
    groupsize: int | None
    act_order: bool
    sym: bool
    percdamp: float
    calibration: Path | None
    samples: int
    seqlen: int
    seed: int
    trust_remote_code: bool
    upload_to_model_id: str | None

    def check(self, output: Path) -> None:
        """Raise an error for options that are not supported, or do not fit together."""
        if self.upload_to_model_id:
            text = f"hf upload {self.upload_to_model_id} {output}"
            raise OperatorError(f"--upload-to-model-id is not supported: quantize without it, then: {text}")
        if self.groupsize == 0:
            raise click.BadParameter("0 is neither -1 nor a number of columns.", param_hint="--groupsize")
        if self.gguf_type is not None and self.method != "gguf":
            raise click.UsageError("--gguf-type is for --method gguf only.")

    def to_settings(self) -> "QuantizeSettings":
        from tgis.shard.quantize.settings import QuantizeSettings

        return QuantizeSettings(
            method=cast("Method", self.method),
            bits=int(self.bits),
            sensitive_bits=None if self.sensitive_bits is None else int(self.sensitive_bits),
            group_size=self.groupsize,
            act_order=self.act_order,
            sym=self.sym,
            percdamp=self.percdamp,
            samples=self.samples,
            seqlen=self.seqlen,
            seed=self.seed,
        )


@click.command("quantize", cls=FileCommand)
@click.argument("model_name")
@click.argument("output", type=click.Path(path_type=Path))
@revision_option
@click.option(
    "--method",
    type=click.Choice(["gptq", "fp8", "int8", "gguf"]),
    default="gptq",
    help="Quantization method. fp8 and int8 use one scale per row; gguf writes a file, also for llama.cpp.",
)
@click.option(
    "--gguf-type", type=click.Choice(["q8_0", "q4_0", "q4_1"]), help="GGUF: type of the weights; unset: q8_0."
)
@click.option("--bits", type=click.Choice(["2", "3", "4", "8"]), default="4", help="GPTQ: bits per weight.")
@click.option(
    "--sensitive-bits",
    type=click.Choice(["2", "3", "4", "8"]),
    help="GPTQ: bits per weight of the last layer and of queries, keys and values; unset: 8 if --bits is 4 "
    "and the model has less than 1 billion weights, else --bits.",
)
@click.option(
    "--groupsize",
    type=click.IntRange(-1),
    help="GPTQ: columns per scale; -1: all columns; unset: 32 for models below 1 billion weights, else 128.",
)
@click.option(
    "--act-order/--no-act-order",
    default=False,
    help="GPTQ: quantize columns in the order of their activations, largest first.",
)
@click.option("--sym/--no-sym", default=False, help="GPTQ: use codes symmetric around zero.")
@click.option(
    "--percdamp",
    type=click.FloatRange(0, min_open=True),
    default=0.01,
    help="GPTQ: damping, as a share of the Hessian's mean diagonal.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help='Calibration data: a text file, or a .jsonl file of objects with a "text"; unset: wikitext-2 if it '
    "is in the hub cache.",
)
@click.option("--samples", type=click.IntRange(1), default=128, help="Number of calibration windows.")
@click.option(
    "--seqlen",
    type=click.IntRange(8),
    default=2048,
    help="Tokens per calibration window, limited to the model's length.",
)
@click.option("--seed", type=int, default=0, help="Seed that chooses the windows in the calibration data.")
@click.option(
    "--trust-remote-code/--no-trust-remote-code", default=False, help="No effect: no model code is run."
)
@click.option("--upload-to-model-id", help="Refused: use `hf upload` to upload OUTPUT.")
def quantize(model_name: str, output: Path, revision: str | None, **values: Any) -> None:
    """Quantize MODEL_NAME, a directory or a model in the hub cache, and write it to the directory OUTPUT, or
    to the GGUF file OUTPUT. An interrupted run resumes when it is started again, except for GGUF."""
    options = QuantizeOptions(**values)
    options.check(output)
    root = cache_root()
    directory = find_files(model_name, revision, root)
    from tgis.process.control_groups import count_cores
    from tgis.shard.startup.platforms.interface import configure_torch

    configure_torch(count_cores())
    if options.method == "gguf":
        from tgis.shard.quantize.gguf.output import write_gguf

        click.echo(write_gguf(directory, output, cast("GgufKind", options.gguf_type or "q8_0")))
    else:
        from tgis.shard.quantize import run

        click.echo(run.quantize(directory, output, options.to_settings(), options.calibration, root))
