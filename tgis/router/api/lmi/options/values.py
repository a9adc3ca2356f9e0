"""Converts values of LMI's options to texts for the service's options. Converters raise ValueError."""

from collections.abc import Callable

from tgis.config.serving import GENERATION_CONFIG_NONE

DTYPES = {
    "auto": "",
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "float32", "float"), "float32"),
}
SCHEMES = {
    "bitsandbytes4": "bitsandbytes-nf4",
    "bitsandbytes8": "bitsandbytes",
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
}
SCHEMES_NOT_SERVED = ("dynamic_int8", "smoothquant")
MIB = 1 << 20
MAX_DIGITS = 100  # int() refuses texts of more than 4,300 digits


def to_truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("it must be true or false")
    return text.lower() == "true"


def to_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError("it must be a whole number")
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it has more than {MAX_DIGITS} digits")
    return int(text)


def switch(on: str = "true", off: str = "") -> Callable[[str], str]:
    """Return a converter from a truth value to `on` or `off`. An empty text leaves the option unset."""
    return lambda text: on if to_truth(text) else off


def to_dtype(text: str) -> str:
    if text.lower() == "int8":
        raise ValueError("use option.quantize=bitsandbytes8 to quantize weights to 8 bits")
    if text.lower() not in DTYPES:
        raise ValueError("use fp16, bf16, fp32 or auto")
    return DTYPES[text.lower()]


def to_generation_config(text: str) -> str:
    return GENERATION_CONFIG_NONE if text == "vllm" else text


def to_scheme(text: str) -> str:
    if text in SCHEMES_NOT_SERVED:
        raise ValueError("use bitsandbytes8, or fp8, or a quantized checkpoint")
    return SCHEMES.get(text, text)


def to_model(text: str) -> str:
    if "://" in text:
        raise ValueError("mount the model and set its folder, or set its id on the hub")
    return text


def to_bytes(text: str) -> str:
    """Convert MiB to bytes."""
    return str(to_count(text) * MIB)


def to_reservation(text: str) -> str:
    """Return "true" for the scheduling policy that reserves blocks for a request's maximum length."""
    if text not in ("guaranteed_no_evict", "max_utilization"):
        raise ValueError("use guaranteed_no_evict or max_utilization")
    return "true" if text == "guaranteed_no_evict" else ""


def only(allowed: str, advice: str) -> Callable[[str], str | None]:
    """Return a check that refuses values not in `allowed`, separated by `|`. `x*` allows a prefix."""

    def refuse(text: str) -> str | None:
        for one in allowed.split("|"):
            if text == one or (one.endswith("*") and text.startswith(one[:-1])):
                return None
        return advice

    return refuse
