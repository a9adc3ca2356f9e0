"""Lists the precisions that are measured."""

from dataclasses import dataclass
from typing import Literal

Table = Literal["loading", "command", "gguf"]

CALIBRATED = ("--samples", "32", "--seqlen", "256")
FLOAT32_ARITHMETIC = ("--cpu-arithmetic", "float32")  # whatever the processor's default is
HALF = ("--dtype", "float16", *FLOAT32_ARITHMETIC)


@dataclass(frozen=True)
class Variant:
    name: str
    """Name in the data file and on the command line."""
    label: str
    """Name in the pages."""
    table: Table
    flags: tuple[str, ...] = HALF
    """Options of the launcher."""
    command: tuple[str, ...] | None = None
    """Options of `text-generation-server quantize`; None: the model's own weights are served."""
    llama_cpp: str | None = None
    """Type of file that llama.cpp's quantizer writes from the file that `command` writes."""


REFERENCE = Variant("float32", "`float32`", "loading", ("--dtype", "float32"))
INT8_ACTIVATIONS = ("--activations", "int8")


def _loading(name: str, *flags: str, dtype: str = "float16") -> Variant:
    label = " ".join(flags) or f"--dtype {dtype}"
    return Variant(name, f"`{label}`", "loading", ("--dtype", dtype, *FLOAT32_ARITHMETIC, *flags))


def _command(name: str, *command: str, activations: bool = False) -> Variant:
    label = f"`{' '.join(command)}`" + (", served with `--activations int8`" if activations else "")
    is_gptq = "gptq" in command
    flags = HALF + INT8_ACTIVATIONS * activations
    return Variant(name, label, "command", flags, (*command, *(CALIBRATED if is_gptq else ())))


def _gguf(kind: str) -> Variant:
    command = ("--method", "gguf", "--gguf-type", kind)
    return Variant(f"gguf-{kind}", f"`{' '.join(command)}`", "gguf", HALF, command)


def _gguf_bfloat16(kind: str) -> Variant:
    flags = ("--cpu-arithmetic", "bfloat16")
    label = f"`--method gguf --gguf-type {kind}`, served with `{' '.join(flags)}`"
    return Variant(f"gguf-{kind}-bfloat16", label, "gguf", flags, ("--method", "gguf", "--gguf-type", kind))


def _llama_cpp(kind: str) -> Variant:
    return Variant(
        f"llama-cpp-{kind.lower()}",
        f"llama.cpp's own {kind}",
        "gguf",
        HALF,
        ("--method", "gguf", "--gguf-type", "q8_0"),
        kind,
    )


# `eetq` rounds like `bitsandbytes`, so only one of them is measured. In the order of measurement.
VARIANTS = (
    REFERENCE,
    _loading("int8", "--quantize", "int8"),
    _loading("int4", "--quantize", "int4"),
    _loading("int8-cache", "--kv-cache-dtype", "int8"),
    _loading("fp8-e4m3-cache", "--kv-cache-dtype", "fp8_e4m3"),
    _command("gptq", "--method", "gptq"),
    _llama_cpp("Q4_0"),
    _llama_cpp("Q4_K_M"),
    _loading("float16"),
    _loading("bitsandbytes", "--quantize", "bitsandbytes"),
    _loading("nf4", "--quantize", "bitsandbytes-nf4"),
    _loading("bitsandbytes-a8", "--quantize", "bitsandbytes", *INT8_ACTIVATIONS),
    _command("gptq-sym", "--method", "gptq", "--sym"),
    _loading("fp8", "--quantize", "fp8"),
    _loading("int4-a8", "--quantize", "int4", *INT8_ACTIVATIONS),
    *(_gguf(kind) for kind in ("q8_0", "q4_0", "q4_1")),
    _gguf_bfloat16("q4_1"),
    *(_command(f"command-{method}", "--method", method) for method in ("int8", "fp8")),
    _loading("fp8-e5m2-cache", "--kv-cache-dtype", "fp8_e5m2"),
    _loading("bfloat16", dtype="bfloat16"),
    _loading("bfloat16-arithmetic", "--cpu-arithmetic", "bfloat16"),
    _loading("int8-bfloat16", "--quantize", "int8", "--cpu-arithmetic", "bfloat16"),
    _loading("fp4", "--quantize", "bitsandbytes-fp4"),
    _command("gptq-a8", "--method", "gptq", activations=True),
    _command("gptq-128", "--method", "gptq", "--groupsize", "128"),
    _command("gptq-act-order", "--method", "gptq", "--act-order"),
)
