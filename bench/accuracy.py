"""What a precision costs: log-probabilities of a text's tokens, against those in float32.

`python -m bench.accuracy [MODEL]` prints Markdown; without a model, of the demo model, made where there is
none."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tgis.cli.demo_model import read_documents, write_demo_model
from tgis.hub import model_files
from tgis.shard.attention.interface import StepLayout
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.models import registry
from tgis.shard.models.decoder import Decoder
from tgis.shard.models.interface import StepInputs
from tgis.shard.quant.registry import find_scheme

DEMO_MODEL = Path(".cache/demo-model")
BLOCK_SIZE = 16
WINDOW = 256  # tokens of a text
NUM_WINDOWS = 16


@dataclass(frozen=True)
class Precision:
    name: str
    dtype: torch.dtype
    """Of the cache, and of the weights that are not quantized."""
    quantize: str | None = None


PRECISIONS = (
    Precision("float16", torch.float16),
    Precision("bfloat16", torch.bfloat16),
    Precision("int8", torch.float16, "int8"),
)


@dataclass(frozen=True)
class Cost:
    """Differences are absolute, of the log-probabilities of the text's own tokens, in nats."""

    name: str
    mean_difference: float
    max_difference: float
    greedy_agreement: float
    """Share of the positions whose likeliest token is the same."""
    loss: float
    num_tokens: int


def measure(model: Path, precisions: Sequence[Precision] = PRECISIONS) -> list[Cost]:
    """Of a decoder-only model in a directory with a tokenizer.json; float32 comes first."""
    windows = list(_read_windows(model))
    exact, best = _score(model, Precision("float32", torch.float32), windows)
    costs = [Cost("float32", 0.0, 0.0, 1.0, -exact.mean().item(), len(exact))]
    for precision in precisions:
        scores, chosen = _score(model, precision, windows)
        difference = (scores - exact).abs()
        agreement = (chosen == best).double().mean().item()
        figures = (difference.mean().item(), difference.max().item(), agreement, -scores.mean().item())
        costs.append(Cost(precision.name, *figures, len(exact)))
    return costs


def format_costs(costs: Sequence[Cost]) -> str:
    head = ("precision", "mean difference", "max difference", "greedy agreement", "loss")
    lines = [head, ("---",) * len(head), *map(_format_cost, costs)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _format_cost(cost: Cost) -> tuple[str, ...]:
    agreement = f"{100 * cost.greedy_agreement:.1f} %"
    differences = (f"{cost.mean_difference:.1e}", f"{cost.max_difference:.1e}")
    return cost.name, *differences, agreement, f"{cost.loss:.4f}"


def _read_windows(model: Path) -> Iterator[Tensor]:
    """int64 [WINDOW], beginnings of texts."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    encoded = (tokenizer.encode(document).ids for document in read_documents())
    long = [torch.tensor(ids[:WINDOW]) for ids in encoded if len(ids) >= WINDOW]
    yield from long[:NUM_WINDOWS]


def _score(model: Path, precision: Precision, windows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the windows' tokens, all but the firsts, and the likeliest tokens in their place;
    float64 and int64 [num_tokens]."""
    alone, dtype = ProcessGroup(0, 1), precision.dtype
    settings = model_files.read_json(model, "config.json")
    decoder = registry.load(model, settings, alone, dtype, scheme=find_scheme(precision.quantize))
    assert isinstance(decoder, Decoder)
    spec, num_blocks = decoder.spec, -(-WINDOW // BLOCK_SIZE)
    cache = KVCache(spec.num_layers, num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, dtype)
    attention, layout = CpuAttention(cache), _describe_one(WINDOW, num_blocks)
    scores, chosen = [], []
    for ids in windows:
        inputs = StepInputs(ids, layout.positions, layout, attention.plan(layout, "self"))
        logits = decoder.logits(decoder.forward(inputs, attention))[:-1]  # [WINDOW - 1, vocab_size]
        logprobs = logits.double().log_softmax(-1)
        scores.append(logprobs.gather(1, ids[1:].unsqueeze(1)).squeeze(1))
        chosen.append(logprobs.argmax(-1))
    return torch.cat(scores), torch.cat(chosen)


def _describe_one(length: int, num_blocks: int) -> StepLayout:
    """A prompt of that length that has all blocks to itself."""
    return StepLayout(
        cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32),
        positions=torch.arange(length),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
    )


def main() -> None:
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO_MODEL
    if model == DEMO_MODEL and not model.is_dir():
        write_demo_model(model)
    print(format_costs(measure(model)))


if __name__ == "__main__":
    main()
