"""Registry of schemes by the value of `--quantize`, and of formats of quantized checkpoints by
`quant_method`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tgis.shard.checkpoint.format import Format
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.quant.formats.awq import Awq
from tgis.shard.quant.formats.bitsandbytes import BitsAndBytes
from tgis.shard.quant.formats.compressed_tensors import CompressedTensors
from tgis.shard.quant.formats.fp8 import Fp8
from tgis.shard.quant.formats.gptq import Gptq
from tgis.shard.quant.formats.marlin import Marlin
from tgis.shard.quant.formats.mxfp4 import Mxfp4
from tgis.shard.quant.formats.settings import SERVED, QuantizationSettings, read_settings
from tgis.shard.quant.interface import Scheme
from tgis.shard.quant.schemes.int8 import Int8
from tgis.shard.quant.schemes.none import UNQUANTIZED
from tgis.shard.quant.schemes.weight_only import WEIGHT_ONLY

SCHEMES: dict[str, Scheme] = {"none": UNQUANTIZED, "int8": Int8(), **WEIGHT_ONLY}

FORMATS: dict[str, Callable[[QuantizationSettings], Format]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "marlin": Marlin,
    "mxfp4": Mxfp4,
}

# Value of `--quantize` that names a format -> `quant_method` of its checkpoints. Some values also name a
# scheme, which applies to checkpoints that are not quantized.
METHODS_OF = {
    "gptq": ("gptq", "marlin"),
    "marlin": ("gptq", "marlin"),
    "awq": ("awq",),
    "compressed-tensors": ("compressed-tensors",),
    "mxfp4": ("mxfp4",),
    "fp8": ("fp8", "fbgemm_fp8"),
    "bitsandbytes": ("bitsandbytes",),
    "bitsandbytes-nf4": ("bitsandbytes",),
    "bitsandbytes-fp4": ("bitsandbytes",),
}


def find_scheme(quantize: str | None) -> Scheme:
    """Return the scheme of a value of `--quantize` that configuration has validated."""
    return SCHEMES[quantize or "none"]


def find_scheme_name(quantize: str | None, settings: QuantizationSettings | None) -> str | None:
    """Return the scheme that `--quantize` selects for a checkpoint, or None if the option names the format in
    which the checkpoint is stored. Raises WeightsError if it names another format."""
    methods = METHODS_OF.get(quantize or "", ())
    if settings is None and methods and quantize not in SCHEMES:
        raise WeightsError(
            f"--quantize {quantize} is for quantized checkpoints, and this one is not quantized: leave the "
            "option out, or round the weights with --quantize int8"
        )
    if settings is None or not methods:
        return quantize
    if settings.method not in methods:
        raise WeightsError(
            f"--quantize {quantize} contradicts {settings.place}, which says {settings.method}: leave the "
            "option out, and the checkpoint is served by its own settings"
        )
    return None


def find_format(config: Mapping[str, Any], directory: Path) -> Format | None:
    """Return the format of the quantized checkpoint in `directory`, or None if it is not quantized.

    Raises ModelNotFoundError and WeightsError."""
    settings = read_settings(config, directory)
    if settings is None:
        return None
    if settings.method not in FORMATS:
        named = f"{settings.method} checkpoints" if settings.method else "quantized checkpoints of no method"
        settings.refuse(f"{named} are not served: {SERVED}")
    return FORMATS[settings.method](settings)
