"""Lists the service's targets: ratios whose two values are measured in one run. A figure without a target for
a shape is reported without a verdict."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.contest import Spread


@dataclass(frozen=True)
class Target:
    key: str
    """Section's name of the figure."""
    section: str
    name: str
    how: str
    bound: float
    at_most: bool = False
    """True if the figure must stay below the target instead of above."""
    shapes: Mapping[str, float | None] = field(default_factory=dict)
    """Targets of shapes that differ; None: no target."""

    def bound_of(self, shape: str) -> float | None:
        return self.shapes.get(shape, self.bound)

    def is_met(self, value: float, shape: str) -> bool | None:
        bound = self.bound_of(shape)
        if bound is None:
            return None
        return value <= bound if self.at_most else value >= bound


@dataclass(frozen=True)
class Figure:
    """Measured value of a target."""

    key: str
    spread: Spread
    detail: str
    """The two values of the ratio, with their units."""


LIMIT, TRANSFORMERS, OPENVINO = "of the limit", "× transformers float32", "× OpenVINO GenAI"
HALVES, EIGHTS = "of float16's rate", "of int8's rate"
LLAMA_CPP = "× llama.cpp"
OPENVINO_CHOICE, OPENVINO_INT8 = "× OpenVINO GenAI, its own arithmetic", "× OpenVINO GenAI int8"
ONLY_135M: dict[str, float | None] = {"15m": None, "500m": None, "1b": None}
ONLY_1B: dict[str, float | None] = {"15m": None, "135m": None, "500m": None}
FROM_500M: dict[str, float | None] = {"15m": None, "135m": None}
PREFILLS = (512, 1024, 2048)


def _against_transformers(count: int, bound: float) -> Target:
    name = f"decode, {count} client{'s' * (count > 1)}"
    return Target(f"transformers {count}", "transformers", name, TRANSFORMERS, bound, shapes=ONLY_135M)


INT4_PEERS = (("openvino-int4", "OpenVINO GenAI int4"), ("llama-cpp", "llama.cpp q4_0"))


def _against_int4(peer: str, title: str, count: int) -> Target:
    name = f"int4 with int8 activations, {count} client{'s' * (count > 1)}"
    return Target(f"{peer} {count}", "peers", name, f"× {title}", 1.1)


TARGETS = (
    Target("decode 1", "decode", "decode, 1 client, float16", LIMIT, 0.75, shapes={"1b": 0.9}),
    Target("decode 32", "decode", "decode, 32 clients, float16", LIMIT, 0.70),
    *(Target(f"prefill {n}", "prefill", f"prefill, {n:,} tokens, float16", LIMIT, 0.8) for n in PREFILLS),
    Target("int8 1", "int8", "int8, 1 client", HALVES, 1.4, shapes=ONLY_1B),
    Target("int8 8", "int8", "int8, 8 clients", HALVES, 1.2),
    Target("int8 32", "int8", "int8, 32 clients", HALVES, 1.2),
    Target("int8 prefill", "int8", "int8, prefill, 512 tokens", HALVES, 1.2),
    Target("int8 prefill limit", "int8", "int8, prefill, 512 tokens", "of VNNI's rate", 0.7),
    Target(
        "bfloat16 prefill limit",
        "bfloat16",
        "bfloat16 arithmetic, prefill, 512 tokens",
        "of AVX512_BF16's rate",
        0.9,
    ),
    Target("int4 1", "int4", "int4, 1 client", HALVES, 2.2, shapes=FROM_500M),
    Target("int4 32", "int4", "int4, 32 clients", HALVES, 0.95, shapes=FROM_500M),
    Target("int4 to int8 1", "int4", "int4, 1 client", EIGHTS, 1.2, shapes=FROM_500M),
    Target("w4a8 to int8 32", "w4a8", "int4 with int8 activations, 32 clients", EIGHTS, 0.9),
    Target("context", "context", "decode, 32 clients, context 1,024", "of the rate at 128", 0.6),
    Target(
        "fp8-cache at 1024",
        "fp8-cache",
        "fp8 cache, 32 clients, context 1,024",
        "of the 16-bit cache's rate",
        1.2,
    ),
    Target("long", "long", "decode, 1 client, context 32k", LIMIT, 0.7, shapes=ONLY_135M),
    _against_transformers(1, 5),
    _against_transformers(8, 3.2),
    _against_transformers(32, 3.2),
    Target("engine 1", "engine", "the service, 1 client", "of its engine alone", 0.95),
    Target("engine 32", "engine", "the service, 32 clients", "of its engine alone", 0.90),
    Target("prefix", "prefix", "first token after a shared prefix of 1,000", "× sooner on a hit", 10),
    Target(
        "interruption",
        "interruption",
        "p99 between tokens, a prompt of 2,048 comes",
        "× undisturbed",
        3,
        True,
    ),
    Target("engine loss", "engine-loss", "pause of 64 streams, engine process killed", "s", 3, True),
    Target(
        "overload", "overload", "answered while thrice as many arrive", "of what it answers when full", 0.8
    ),
    Target(
        "flood median", "flood", "median of small requests beside refused 4 MB texts", "ms more", 50, True
    ),
    Target("flood worst", "flood", "slowest small request beside refused 4 MB texts", "s", 1, True),
    Target("flood memory", "flood", "router's memory after refused 4 MB texts", "MiB more", 100, True),
    Target("startup", "startup", "ready, kernels compiled before", "s beyond reading weights", 5, True),
    Target("memory", "memory", "most memory while loading", "× the weights", 1.2, True, shapes=ONLY_1B),
    Target("router", "router", "router's step, 256 sequences", "ms", 2, True),
    Target("router growth", "router", "router's step, 256 sequences", "of four times that of 64", 1.25, True),
    Target("engine process 256", "router", "engine process's step, 256 sequences", "ms", 1.5, True),
    Target("engine process 512", "router", "engine process's step, 512 sequences", "ms", 3, True),
    Target("speculation", "speculation", "repetitive text, --speculate, 1 client", "× without", 1.8),
    Target("speculation other", "speculation", "other text, --speculate, 1 client", "× without", 0.95),
    Target("openvino 1", "peers", "decode, 1 client", OPENVINO, 1.4),
    Target("openvino 8", "peers", "decode, 8 clients", OPENVINO, 1.25),
    Target("openvino 32", "peers", "decode, 32 clients", OPENVINO, 1.1),
    Target("vllm-server 8", "peers", "decode, 8 clients, over HTTP", "× vLLM's own server", 3),
    Target("openvino prefill 512", "peers", "prefill, 512 tokens", OPENVINO, 1.1),
    Target("openvino prefill 1024", "peers", "prefill, 1,024 tokens", OPENVINO, 1.1),
    Target("openvino-default 1", "peers", "bfloat16 arithmetic, 1 client", OPENVINO_CHOICE, 1.45),
    Target("openvino-default 8", "peers", "bfloat16 arithmetic, 8 clients", OPENVINO_CHOICE, 1.3),
    Target("openvino-default 32", "peers", "bfloat16 arithmetic, 32 clients", OPENVINO_CHOICE, 1.15),
    Target(
        "openvino-default prefill 512",
        "peers",
        "bfloat16 arithmetic, prefill, 512 tokens",
        OPENVINO_CHOICE,
        1.0,
    ),
    Target("openvino-int8 prefill 512", "peers", "int8, prefill, 512 tokens", OPENVINO_INT8, 1.2),
    *(_against_int4(peer, title, count) for peer, title in INT4_PEERS for count in (1, 8)),
)
# Targets of runs on GGUF files.
GGUF_TARGETS = (
    Target("gguf decode 1", "gguf", "GGUF file, 1 client", LLAMA_CPP, 1.0),
    Target("gguf decode 8", "gguf", "GGUF file, 8 clients", LLAMA_CPP, 1.5),
    Target("gguf decode 32", "gguf", "GGUF file, 32 clients", LLAMA_CPP, 2.0),
    Target("gguf prefill 512", "gguf", "GGUF file, prefill, 512 tokens", LLAMA_CPP, 1.2),
    Target("gguf start", "gguf", "GGUF file, from the command to an answer", "× llama.cpp's time", 1.0, True),
)
DEFAULTS = (
    ("openvino", "OpenVINO GenAI"),
    ("vllm", "vLLM"),
    ("llama-cpp", "llama.cpp"),
    ("transformers", "transformers"),
)


def _with_defaults(peer: str, title: str) -> tuple[Target, ...]:
    decode = (
        Target(
            f"{peer} defaults {count}",
            "defaults",
            f"decode, {count} client{'s' * (count > 1)}",
            f"× {title}",
            1.3,
        )
        for count in (1, 8, 32)
    )
    prefill = Target(f"{peer} defaults prefill 512", "defaults", "prefill, 512 tokens", f"× {title}", 1.0)
    return (*decode, prefill)


# Targets of runs in which all have their defaults.
DEFAULT_TARGETS = tuple(target for peer, title in DEFAULTS for target in _with_defaults(peer, title))
ALL_TARGETS = (*TARGETS, *GGUF_TARGETS, *DEFAULT_TARGETS)
