"""Lists the service's other precisions, which the benchmarks measure beside float16 weights with float32
arithmetic."""

from collections.abc import Collection
from dataclasses import dataclass

OURS = "ours"
OURS_FLAGS = ("--cpu-arithmetic", "float32")  # on every processor, so that figures can be compared
INT8, BFLOAT16 = "ours int8", "ours bfloat16"
INT4, W4A8 = "ours int4", "ours w4a8"
INT8_CACHE, FLOAT8_CACHE = "ours int8 cache", "ours fp8 cache"


@dataclass(frozen=True)
class Variant:
    name: str
    """Name of the contender."""
    section: str
    """Prefix of its figures."""
    title: str
    flags: tuple[str, ...]
    """Options of the launcher."""
    beside: tuple[str, ...] = ()
    """Other variants that its section compares it with."""
    is_for_context: bool = False
    """True if only reading the cache differs, so that only long contexts are compared."""


VARIANTS = (
    Variant(INT8, "int8", "int8 weights", ("--quantize", "int8")),
    Variant(BFLOAT16, "bfloat16", "bfloat16 arithmetic", ("--cpu-arithmetic", "bfloat16")),
    Variant(INT4, "int4", "int4 weights", ("--quantize", "int4"), (INT8,)),
    Variant(
        W4A8,
        "w4a8",
        "int4 weights, int8 activations",
        ("--quantize", "int4", "--activations", "int8"),
        (INT8,),
    ),
    Variant(INT8_CACHE, "int8-cache", "int8 cache", ("--kv-cache-dtype", "int8"), is_for_context=True),
    Variant(FLOAT8_CACHE, "fp8-cache", "fp8 cache", ("--kv-cache-dtype", "fp8_e4m3"), is_for_context=True),
)
SECTIONS = tuple(variant.section for variant in VARIANTS)


def find_wanted(sections: Collection[str]) -> dict[Variant, list[str]]:
    """Return the variants that the sections measure or compare with, each with these sections."""
    wanted = {
        variant: [
            each.section
            for each in VARIANTS
            if each.section in sections and variant.name in (each.name, *each.beside)
        ]
        for variant in VARIANTS
    }
    return {variant: names for variant, names in wanted.items() if names}
