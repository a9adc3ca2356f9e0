"""Measures the accuracy of a precision: log-probabilities of a text's tokens, compared with float32.

`python -m bench.accuracy [MODEL]` prints Markdown. The default model is SmolLM2-135M-Instruct, which `make
.cache/models/SmolLM2-135M-Instruct.gguf` downloads."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.real_model import convert_real_model, read_prose
from tgis.hub import model_files
from tgis.shard.attention.interface import StepLayout
from tgis.shard.collectives import ProcessGroup
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.models import registry
from tgis.shard.models.decoder import Decoder
from tgis.shard.models.interface import StepInputs
from tgis.shard.quant.registry import find_scheme
from tgis.shard.startup.cache_type import FLOAT8
from tgis.shard.startup.cpu_platform import on_cpu
from tgis.shard.startup.host_runner import HostRunners

BLOCK_SIZE = 16
WINDOW = 256  # tokens of a text
NUM_WINDOWS = 16


@dataclass(frozen=True)
class Precision:
    name: str
    dtype: torch.dtype
    """Type of the weights that are not quantized."""
    quantize: str | None = None
    arithmetic: str = "float32"
    rounds_activations: bool = False
    cache_type: str | None = None
    """Value of `--kv-cache-dtype`; None: the type of `dtype`."""


# Some schemes with equal results have two names; only one of them is measured.
SCHEMES = ("int8", "bitsandbytes", "fp8", "bitsandbytes-nf4", "bitsandbytes-fp4", "int4")
PRECISIONS = (
    Precision("float16", torch.float16),
    Precision("bfloat16", torch.bfloat16),
    Precision("bfloat16 arithmetic", torch.float16, arithmetic="bfloat16"),
    *(Precision(name, torch.float16, name) for name in SCHEMES),
    Precision("int8, bfloat16 arithmetic", torch.float16, "int8", arithmetic="bfloat16"),
    *(
        Precision(f"{name}, --activations int8", torch.float16, name, rounds_activations=True)
        for name in ("bitsandbytes", "int4")
    ),
    *(Precision(f"{name} cache", torch.float16, cache_type=name) for name in FLOAT8),
)


@dataclass(frozen=True)
class Cost:
    """Absolute differences of the log-probabilities of the text's own tokens, in nats."""

    name: str
    mean_difference: float
    max_difference: float
    greedy_agreement: float
    """Share of the positions with the same likeliest token."""
    perplexity: float
    num_tokens: int


def measure(model: Path, precisions: Sequence[Precision] = PRECISIONS) -> list[Cost]:
    """Yield the results for a decoder-only model in a directory with a tokenizer.json; float32 comes
    first."""
    windows, costs = list(islice(_read_windows(model), NUM_WINDOWS)), list[Cost]()
    expected, best = torch.empty(0), torch.empty(0)
    for precision in (Precision("float32", torch.float32), *precisions):
        scores, chosen = _score(model, precision, windows)
        if not costs:
            expected, best = scores, chosen
        difference, agreement = (scores - expected).abs(), (chosen == best)
        figures = difference.mean(), difference.max(), agreement.double().mean(), (-scores.mean()).exp()
        costs.append(Cost(precision.name, *map(float, figures), len(scores)))
    return costs


def format_costs(costs: Sequence[Cost]) -> str:
    head = (
        "precision",
        "perplexity",
        "of float32's",
        "mean difference",
        "max difference",
        "greedy agreement",
    )
    rows = [_format_cost(cost, costs[0]) for cost in costs]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows))


def _format_cost(cost: Cost, exact: Cost) -> tuple[str, ...]:
    ratio, agreement = f"{cost.perplexity / exact.perplexity:.3f}", f"{100 * cost.greedy_agreement:.1f} %"
    differences = f"{cost.mean_difference:.1e}", f"{cost.max_difference:.1e}"
    return cost.name, f"{cost.perplexity:.2f}", ratio, *differences, agreement


def _read_windows(model: Path) -> Iterator[Tensor]:
    """Return the beginnings of texts, int64 [WINDOW]."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for text in read_prose():
        ids = tokenizer.encode(text).ids
        if len(ids) >= WINDOW:
            yield torch.tensor(ids[:WINDOW])


def _score(model: Path, precision: Precision, windows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the windows' tokens, except the first of each window, and the likeliest
    tokens at these positions; float64 and int64 [num_tokens]."""
    alone, dtype = ProcessGroup(0, 1), precision.dtype
    settings = model_files.read_json(model, "config.json")
    on = on_cpu(None, precision.arithmetic, precision.rounds_activations)
    scheme = find_scheme(precision.quantize)
    decoder = registry.load(model, settings, alone, dtype, on.kernels, scheme)
    assert isinstance(decoder, Decoder)
    spec, num_blocks = decoder.spec, -(-WINDOW // BLOCK_SIZE)
    cache_dtype = FLOAT8[precision.cache_type] if precision.cache_type else on.cache_dtype or dtype
    sizes = (spec.num_layers, num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    assert isinstance(on.make_runner, HostRunners)
    attention = on.make_runner.attention(KVCache(*sizes, cache_dtype))
    layout = _describe_one(WINDOW, num_blocks)
    scores, chosen = [], []
    for ids in windows:
        inputs = StepInputs(ids, layout.positions, layout, attention.plan(layout, "self"))
        logits = decoder.logits(decoder.forward(inputs, attention))[:-1]  # [WINDOW - 1, vocab_size]
        logprobs = logits.double().log_softmax(-1)
        scores.append(logprobs.gather(1, ids[1:].unsqueeze(1)).squeeze(1))
        chosen.append(logprobs.argmax(-1))
    return torch.cat(scores), torch.cat(chosen)


def _describe_one(length: int, num_blocks: int) -> StepLayout:
    """Return a prompt of this length whose blocks are not shared."""
    return StepLayout(
        cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32),
        positions=torch.arange(length),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
    )


def main() -> None:
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else convert_real_model()
    print(format_costs(measure(model)))


if __name__ == "__main__":
    main()
