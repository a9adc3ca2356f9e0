"""Registry of schemes, by the value of `--quantize`, and of the formats of quantized checkpoints, by the
`quant_method` of config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from tgis.shard.checkpoint.format import Format
from tgis.shard.quant.formats.bitsandbytes import BitsAndBytes
from tgis.shard.quant.formats.fp8 import Fp8
from tgis.shard.quant.interface import Scheme
from tgis.shard.quant.schemes.int8 import Int8
from tgis.shard.quant.schemes.none import UNQUANTIZED
from tgis.shard.quant.schemes.weight_only import WEIGHT_ONLY

SCHEMES: dict[str, Scheme] = {"none": UNQUANTIZED, "int8": Int8(), **WEIGHT_ONLY}

# Each makes a format from `quantization_config`.
FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "bitsandbytes": BitsAndBytes,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
}


def find_scheme(quantize: str | None) -> Scheme:
    """Return the scheme of an option's value. Values that are never supported are refused earlier."""
    return SCHEMES[quantize or "none"]


def find_format(config: Mapping[str, Any]) -> Format | None:
    """Return the format of a checkpoint's quantized weights by its config.json, or None if it is unknown."""
    settings = config.get("quantization_config")
    make = FORMATS.get(settings.get("quant_method", "")) if isinstance(settings, dict) else None
    return make(settings) if make and isinstance(settings, dict) else None
