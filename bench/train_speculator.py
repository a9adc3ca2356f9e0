"""Trains an MLP speculator, Medusa heads and an EAGLE-3 head for a model on its own greedy answers, to
measure speculation on real text. The prompts are about sections of this repository's documentation; every
tenth is held out. The heads learn the model's probabilities of each next token, not only the chosen one."""

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from bench.eagle3_training import Eagle3Head, TappedText, measure_eagle3, train_eagle3
from bench.real_model import FILE, convert_real_model
from bench.service import launch
from bench.speculator_files import cross_entropy, report, write
from tgis.shard.attention.interface import Attention, StepLayout
from tgis.shard.attention.layered import open_attention
from tgis.shard.collectives import ProcessGroup
from tgis.shard.memory.layered_cache import allocate_cache
from tgis.shard.models import registry
from tgis.shard.models.decoder import Decoder
from tgis.shard.models.interface import StepInputs
from tgis.shard.speculators.eagle3 import find_layers
from tgis.shard.startup.platforms.cpu import has_fast_bfloat16, on_cpu
from tgis.shard.startup.platforms.host_runner import HostRunners
from tgis.shard.startup.platforms.requirements import CpuProducts
from tgis_client import Client, Parameters

ALONE = ProcessGroup(0, 1)
BLOCK_SIZE = 16
NUM_ROWS = 8  # texts whose states are computed at once
NUM_CLIENTS = 64
NEW_TOKENS = 160
MAX_PROMPT_TOKENS = 300
KINDS = ("mlp", "medusa", "eagle3")
HELD_OUT = 10  # every tenth prompt
NUM_TOKENS = 3
BATCH = 1024  # training examples
LEARNING_RATE = 2e-3
EPS = 1e-6
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TASKS = (  # after the text, so that prompts about the same text share a prefix
    "{}\n\nExplain this text in simple words.",
    "{}\n\nSummarize this text.",
    "{}\n\nList the important points of this text.",
    "{}\n\nWrite a short introduction for an article about this topic.",
    "{}\n\nWhat questions could a reader ask about this text? Answer them.",
)


@dataclass(frozen=True)
class Example:
    """Prompt and answer, with the model's final states."""

    token_ids: Tensor  # int64 [num_tokens]
    states: Tensor  # float16 [num_tokens, width]
    inner: Tensor  # float16 [num_tokens, 3 * width], inputs of the layers that an EAGLE-3 head reads
    prompt_len: int

    @property
    def tapped(self) -> TappedText:
        return TappedText(self.token_ids, self.inner, self.states, self.prompt_len)


class Runner:
    """Model that computes the states of texts, with the weights and the arithmetic of the service that
    generates the answers."""

    def __init__(self, directory: Path) -> None:
        settings = json.loads((directory / "config.json").read_text())
        arithmetic = "bfloat16" if has_fast_bfloat16(may_use_amx=True) else "float32"
        platform = on_cpu(CpuProducts(arithmetic, allows_amx=True))
        self.model: Any = registry.load(directory, settings, ALONE, torch.bfloat16, platform.kernels)
        assert isinstance(self.model, Decoder)
        assert isinstance(platform.make_runner, HostRunners)
        self._num_blocks = -(-(MAX_PROMPT_TOKENS + 2 * NEW_TOKENS) // BLOCK_SIZE)
        dtype = platform.cache_dtype or torch.float32
        cache = allocate_cache(self.model.spec, ALONE, NUM_ROWS * self._num_blocks, BLOCK_SIZE, dtype)
        self._attention: Attention = open_attention(cache, platform.make_runner.attention)
        self.layers = find_layers({}, self.model.spec.num_layers)
        self._inner: list[Tensor] = []
        self._taps = dict.fromkeys(self.layers, self._record)

    def _record(self, x: Tensor) -> Tensor:
        self._inner.append(x.clone())
        return x.clone()

    @torch.inference_mode()
    def compute(self, texts: Sequence[list[int]]) -> list[tuple[Tensor, Tensor]]:
        """Return the final states of each text, [num_tokens, width], and the inner ones, [num_tokens,
        3 * width]. At most NUM_ROWS texts."""
        lengths = [len(ids) for ids in texts]
        tables = [range(row * self._num_blocks, (row + 1) * self._num_blocks) for row in range(len(texts))]
        layout = StepLayout(
            torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            torch.cat([torch.arange(length) for length in lengths]),
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor([*map(list, tables)], dtype=torch.int32),
        )
        ids = torch.tensor([token for text in texts for token in text])
        inputs = StepInputs(ids, layout.positions, layout, self._attention.plan(layout, "self"))
        self._inner.clear()
        x, _ = self.model.forward_tapped(inputs, self._attention, self._taps)
        states: Tensor = self.model.final_states(x)
        inner = torch.cat(self._inner, 1)
        return [*zip(states.half().split(lengths), inner.half().split(lengths), strict=True)]


def make_prompts(first_task: int = 0) -> list[str]:
    """Return a prompt about each paragraph of the documentation, with the tasks in turn."""
    paragraphs = [
        paragraph.replace("\n", " ")
        for path in sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
        for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))
        if len(paragraph) > 150 and paragraph[0].isalpha() and "|" not in paragraph
    ]
    return [
        CHAT.format(TASKS[(i + first_task) % len(TASKS)].format(text[:900]))
        for i, text in enumerate(paragraphs)
    ]


def answer(prompts: Sequence[str], seconds: float) -> list[tuple[str, str]]:
    """Return prompts and greedy answers of a service with its defaults: as many as it generates in a time."""
    end = time.monotonic() + seconds
    log = Path(".cache/bench/train-speculator.log")
    with launch(FILE, log, []) as (target, _), Client(target) as client:

        def ask(prompt: str) -> tuple[str, str]:
            if time.monotonic() > end:
                return prompt, ""
            return prompt, client.generate(prompt, Parameters(max_new_tokens=NEW_TOKENS)).text

        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            return [pair for pair in threads.map(ask, prompts) if pair[1]]


def compute_examples(runner: Runner, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[Example]:
    """Return the states of prompts with their answers. Texts of similar lengths are computed together."""
    texts = []
    for prompt, text in pairs:
        start = tokenizer.encode(prompt).ids[-MAX_PROMPT_TOKENS:]
        added = tokenizer.encode(text, add_special_tokens=False).ids[: 2 * NEW_TOKENS]
        texts.append((start + added, len(start)))
    texts.sort(key=lambda each: len(each[0]))
    examples = []
    for first in range(0, len(texts), NUM_ROWS):
        some = texts[first : first + NUM_ROWS]
        computed = runner.compute([ids for ids, _ in some])
        examples += [
            Example(torch.tensor(ids), states, inner, length)
            for (ids, length), (states, inner) in zip(some, computed, strict=True)
        ]
    return examples


def index_tokens(known: Tensor, vocab_size: int) -> Tensor:
    """Return the index of each token in `known`, and their number for other tokens."""
    index = torch.full((vocab_size,), len(known))
    index[known] = torch.arange(len(known))
    return index


class MLPHeads(nn.Module):
    """Trainable MLP speculator. Embeddings and heads have rows for the tokens `known` only; the others stay
    zero. They begin with the model's own head, in as many dimensions as there are."""

    def __init__(self, head: Tensor, vocab_size: int, inner_dim: int, known: Tensor) -> None:
        """`head` has the rows of the known tokens."""
        super().__init__()
        width = head.shape[1]
        self.inner_dim, self.vocab_size, self.width, self.known = inner_dim, vocab_size, width, known
        self.index = index_tokens(known, vocab_size)
        vectors, sizes, axes = torch.linalg.svd(head, full_matrices=False)
        inner = vectors[:, :inner_dim] * sizes[:inner_dim]  # the tokens in the head's largest directions
        inner /= inner.std()
        scale = inner_dim**-0.5
        embeddings = F.pad(inner * scale, (0, 0, 0, 1))  # the last row is for all other tokens
        self.emb = nn.ParameterList(embeddings.clone() for _ in range(NUM_TOKENS))
        first = axes[:inner_dim] * width**-0.5
        self.proj = nn.ParameterList([first.clone(), *(torch.eye(inner_dim) for _ in range(NUM_TOKENS - 1))])
        self.ln = nn.ParameterList(torch.ones(inner_dim) for _ in range(NUM_TOKENS))
        self.shift = nn.ParameterList(torch.zeros(inner_dim) for _ in range(NUM_TOKENS))
        self.head = nn.ParameterList(inner * scale for _ in range(NUM_TOKENS))
        self.state_weight = 0.5 ** (0.5 / NUM_TOKENS)
        self.emb_weight = math.sqrt((1 - self.state_weight**2) * inner_dim / 2)

    def run(self, states: Tensor, token_at: Callable[[int, Tensor | None], Tensor]) -> Iterator[Tensor]:
        """Yield the scores of each stage. `token_at` returns the token before a stage, given the scores of
        the stage before."""
        scores: Tensor | None = None
        for stage in range(NUM_TOKENS):
            embedded = F.embedding(self.index[token_at(stage, scores)], self.emb[stage])
            mixed = states @ self.proj[stage].T * self.state_weight + embedded * self.emb_weight
            mixed = mixed * torch.rsqrt(mixed.pow(2).mean(-1, keepdim=True) + EPS)
            states = F.gelu(mixed * self.ln[stage] + self.shift[stage])
            scores = states @ self.head[stage].T
            yield scores

    def save(self, directory: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for i in range(NUM_TOKENS):
            head = torch.zeros(self.vocab_size, self.inner_dim)
            head[self.known] = self.head[i].detach()
            tensors[f"speculator.emb.{i}.weight"] = self.emb[i].detach()[self.index]
            tensors[f"speculator.proj.{i}.weight"] = self.proj[i].detach()
            tensors[f"speculator.ln.{i}.weight"] = self.ln[i].detach()
            tensors[f"speculator.ln.{i}.bias"] = self.shift[i].detach()
            tensors[f"speculator.head.{i}.weight"] = head
        config = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "n_predict": NUM_TOKENS,
            "inner_dim": self.inner_dim,
            "emb_dim": self.width,
            "vocab_size": self.vocab_size,
            "tie_weights": False,
            "scale_input": False,
            "top_k_tokens_per_head": [1] * NUM_TOKENS,
        }
        write(directory, config, {name: x.half() for name, x in tensors.items()}, "model.safetensors")


class MedusaHeads(nn.Module):
    """Trainable Medusa heads that use the model's own head."""

    def __init__(self, width: int, head: Tensor) -> None:
        super().__init__()
        self.linear = nn.ParameterList(torch.zeros(width, width) for _ in range(NUM_TOKENS))
        self.bias = nn.ParameterList(torch.zeros(width) for _ in range(NUM_TOKENS))
        self._head = head  # rows of the known tokens

    def run(self, states: Tensor, token_at: Callable[[int, Tensor | None], Tensor]) -> Iterator[Tensor]:
        for weight, bias in zip(self.linear, self.bias, strict=True):
            yield (states + F.silu(states @ weight.T + bias)) @ self._head.T

    def save(self, directory: Path) -> None:
        tensors = {f"{i}.0.linear.weight": each.detach().half() for i, each in enumerate(self.linear)}
        tensors |= {f"{i}.0.linear.bias": each.detach().half() for i, each in enumerate(self.bias)}
        config = {"medusa_num_heads": NUM_TOKENS, "medusa_num_layers": 1}
        write(directory, config, tensors, "medusa_lm_head.safetensors")


Heads = MLPHeads | MedusaHeads


@dataclass(frozen=True)
class Batches:
    """Places in answers, with the states from there on and the tokens after them."""

    states: Tensor  # float16 [n, NUM_TOKENS + 1, width]
    token_ids: Tensor  # int64 [n, NUM_TOKENS + 1], the last token and its successors

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "Batches":
        states, windows = [], []
        for example in examples:
            first = example.prompt_len - 1
            count = len(example.token_ids) - NUM_TOKENS - 1 - first
            if count > 0:
                windows_of = example.states[first:].unfold(0, NUM_TOKENS + 1, 1)[:count]
                states.append(windows_of.transpose(1, 2))
                windows.append(example.token_ids[first + 1 :].unfold(0, NUM_TOKENS + 1, 1)[:count])
        return cls(torch.cat(states), torch.cat(windows))


def train(heads: Heads, batches: Batches, head: Tensor, seconds: float) -> None:
    """Train for a time, with a learning rate that falls to zero. The targets are the model's probabilities of
    the tokens of `head`."""
    optimizer = torch.optim.AdamW(heads.parameters(), LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    began = last = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * elapsed / seconds))
        at = torch.randint(len(batches.states), (BATCH,))
        states, ids = batches.states[at].float(), batches.token_ids[at]
        with torch.autocast("cpu", torch.bfloat16):
            losses = [
                cross_entropy(scores, states[:, stage + 1] @ head.T)
                for stage, scores in enumerate(heads.run(states[:, 0], lambda i, _, ids=ids: ids[:, i]))
            ]
            loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if time.monotonic() - last > 20:
            last = time.monotonic()
            report(f"{elapsed:.0f} s: losses {', '.join(f'{each.item():.2f}' for each in losses)}")


@torch.inference_mode()
def measure(heads: Heads, batches: Batches, known: Tensor) -> list[float]:
    """Return the share of places at which the first proposal is right, the first two are, and so on."""
    states, ids = batches.states[:, 0].float(), batches.token_ids
    right = torch.ones(len(ids), dtype=torch.bool)
    rates = []

    def token_at(stage: int, scores: Tensor | None) -> Tensor:
        return ids[:, 0] if scores is None else known[scores.argmax(-1)]

    for stage, scores in enumerate(heads.run(states, token_at)):
        right &= known[scores.argmax(-1)] == ids[:, stage + 1]
        rates.append(right.float().mean().item())
    return rates


def collect(runner: Runner, directory: Path, seconds: float) -> tuple[list[Example], list[Example]]:
    """Return examples to train on and held-out ones, whose answers are generated in a time."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompts = [make_prompts(first) for first in range(len(TASKS))]
    held_out = prompts[0][::HELD_OUT]
    others = [prompt for each in prompts for i, prompt in enumerate(each) if i % HELD_OUT]
    pairs = answer([*held_out, *others], seconds)
    report(f"{len(pairs)} answers")
    began = time.monotonic()
    examples = compute_examples(runner, tokenizer, pairs[len(held_out) :])
    report(f"{time.monotonic() - began:.0f} s for their states")
    return examples, compute_examples(runner, tokenizer, pairs[: len(held_out)])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.train_speculator", description="Trains a speculator for SmolLM2-135M-Instruct."
    )
    parser.add_argument("output", type=Path, help="directory; each kind gets a folder in it")
    parser.add_argument(
        "--generate-s", type=float, default=330, help="time for answers (default %(default)s)"
    )
    parser.add_argument(
        "--train-s",
        type=float,
        default=150,
        help="time for each kind, and three times as long for EAGLE-3 (default %(default)s)",
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="default: all")
    parser.add_argument("--inner-dim", type=int, default=192, help="of the MLP (default %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    directory = convert_real_model()
    runner = Runner(directory)
    examples, held_out = collect(runner, directory, options.generate_s)
    train_on, test_on = Batches.of(examples), Batches.of(held_out)
    known = train_on.token_ids.unique()
    report(f"{len(train_on.states)} places to train on, {len(known)} different tokens")
    model = runner.model
    width, vocab_size = model.prompt_width, model.spec.vocab_size
    head = model.scores(torch.eye(width)).T[known].contiguous()
    kinds: dict[str, Heads] = {
        "mlp": MLPHeads(head, vocab_size, options.inner_dim, known),
        "medusa": MedusaHeads(width, head),
    }
    rates: dict[str, list[float]] = {}
    for name, heads in kinds.items():
        if name in options.kinds:
            train(heads, train_on, head, options.train_s)
            heads.save(options.output / name)
            rates[name] = measure(heads, test_on, known)
    if "eagle3" in options.kinds:
        eagle3 = make_eagle3(directory, runner, head, known)
        index = index_tokens(known, vocab_size)
        train_eagle3(eagle3, [each.tapped for each in examples], head, 3 * options.train_s)
        eagle3.save(options.output / "eagle3")
        rates["eagle3"] = measure_eagle3(eagle3, [each.tapped for each in held_out], index)
    figures = {name: {"right": each, "tokens_per_step": 1 + sum(each)} for name, each in rates.items()}
    print(json.dumps(figures, indent=1))


def make_eagle3(directory: Path, runner: Runner, head: Tensor, known: Tensor) -> Eagle3Head:
    """Return an untrained head with the sizes of the model's layers."""
    settings = json.loads((directory / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {name: settings[name] for name in names}
    sizes["head_dim"] = settings.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    embedding = runner.model.embed_tokens(torch.arange(runner.model.spec.vocab_size)).clone()
    return Eagle3Head(sizes, embedding, head, known, runner.layers)


if __name__ == "__main__":
    main()
