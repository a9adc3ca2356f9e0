"""Trains a small Llama on the documentation that Python ships, to have a model to serve without a model hub.

The model recites its training text. Training again on the same machine gives the same bytes."""

import itertools
import json
import logging
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from tgis.cli.demo_text import PROMPT, read_documents, train_tokenizer
from tgis.errors import OperatorError

logger = logging.getLogger(__name__)

NUM_STEPS = 400
MAX_LENGTH = 512
ROWS = 12
ROW_TOKENS = 96
LONG_ROW_EVERY = 4
LONG_ROW_FACTOR = 3
NUM_THREADS = 2
LOG_EVERY_S = 10.0


class DemoModelError(OperatorError):
    """Error when the model cannot be written; the text is one line with the reason."""


def write_demo_model(directory: Path, num_steps: int = NUM_STEPS) -> None:
    """Train the model and write it in Hugging Face layout; `directory` is complete or absent.

    Raises DemoModelError before training if the directory cannot be written."""
    with _appearing(directory) as fresh:
        documents = read_documents()
        tokenizer = train_tokenizer(documents)
        logger.info("training on %d characters, about a minute", sum(map(len, documents)))
        model, _ = train_model(documents, tokenizer, num_steps)
        _save(model, tokenizer, fresh)
    logger.info("wrote %s; try the prompt: %s", directory, PROMPT)


@contextmanager
def _appearing(directory: Path) -> Iterator[Path]:
    """Yield a new sibling directory, renamed to `directory` if the block succeeds and removed if it fails."""
    directory = directory.absolute()
    fresh = directory.with_name(f".{directory.name}.{uuid4().hex}")
    try:
        if directory.exists() and any(directory.iterdir()):
            raise DemoModelError(f"{directory} exists already")
        fresh.mkdir(parents=True)
    except OSError as error:
        raise DemoModelError(f"cannot write {directory}: {error.strerror}") from error
    try:
        yield fresh
        fresh.rename(directory)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def train_model(
    documents: list[str], tokenizer: Tokenizer, num_steps: int
) -> tuple[LlamaForCausalLM, list[float]]:
    """Return the trained model and the loss of each step."""
    with _repeatable(), ThreadPoolExecutor(NUM_THREADS) as pool:
        model = LlamaForCausalLM(_model_config(tokenizer.get_vocab_size()))
        parameters = list(model.parameters())
        update = _make_optimizer(model, pool)
        losses: list[float] = []
        progress = _Progress(num_steps)
        for tokens in itertools.islice(_draw_rows(documents, tokenizer), num_steps):  # [rows, row_tokens + 1]
            # Each thread computes a share of the rows. Unlike OpenMP's threads, these do not spin while they
            # wait for each other, which would waste time when the cores have other work too.
            compute = partial(_compute_gradients, model, parameters)
            part_losses, part_gradients = zip(*pool.map(compute, tokens.chunk(NUM_THREADS)), strict=True)
            for parameter, *gradients in zip(parameters, *part_gradients, strict=True):
                parameter.grad = torch.stack(gradients).mean(0)
            update(_learning_rate(len(losses), num_steps))
            losses.append(fmean(part_losses))
            progress.log(len(losses), losses[-1])
    return model.eval(), losses


def _compute_gradients(
    model: LlamaForCausalLM, parameters: list[torch.nn.Parameter], tokens: torch.Tensor
) -> tuple[float, tuple[torch.Tensor, ...]]:
    """Return the mean loss over `tokens`, [rows, row_tokens + 1], and its gradients."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # [rows, row_tokens, vocab]
    loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return loss.item(), torch.autograd.grad(loss, parameters)


class _Progress:
    """Progress log: one line at most every LOG_EVERY_S seconds."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.start = self.logged = time.monotonic()

    def log(self, step: int, loss: float) -> None:
        now = time.monotonic()
        if now - self.logged >= LOG_EVERY_S:
            self.logged = now
            left = (now - self.start) / step * (self.num_steps - step)
            logger.info("step %d of %d, loss %.2f, %.0f s left", step, self.num_steps, loss, left)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Make torch compute the same numbers on any number of cores; restore its settings after the block."""
    num_threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]):
        # Each computing thread gets one OpenMP thread: splitting a product among threads changes its last
        # bits.
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)
            torch.use_deterministic_algorithms(strict)


def _draw_rows(documents: list[str], tokenizer: Tokenizer) -> Iterator[torch.Tensor]:
    """Yield batches [rows, row_tokens + 1] without end.

    Each row begins with <s>, as a prompt does, and its text starts at a sentence or at any word. Every
    LONG_ROW_EVERY steps the batch has LONG_ROW_FACTOR times fewer and longer rows."""
    text = "".join(document + "</s><s>" for document in documents)
    words = [match.start() for match in re.finditer(r"(?<![^\s>])[^\s<]", text)]
    sentences = [match.start() for match in re.finditer(r"(?:(?<=[.:] )|(?<=\n)|(?<=>)|^)[A-Z]", text)]
    source = random.Random(1)
    pools = [_shuffle_forever(sentences, source), _shuffle_forever(words, source)]
    step = 0
    while True:
        shrink = LONG_ROW_FACTOR if step % LONG_ROW_EVERY == 0 else 1
        length = ROW_TOKENS * shrink + 1
        starts = [next(source.choice(pools)) for _ in range(ROWS // shrink)]
        # 16 characters per token are more than enough; the text wraps around at its end.
        pieces = [(text[start:] + text)[: length * 16] for start in starts]
        yield torch.tensor([encoding.ids[:length] for encoding in tokenizer.encode_batch(pieces)])
        step += 1


def _shuffle_forever(values: list[int], source: random.Random) -> Iterator[int]:
    """Yield all values once in random order, then all again in a new order, without end."""
    while True:
        yield from source.sample(values, len(values))


def _model_config(vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )


def _learning_rate(step: int, num_steps: int) -> float:
    """Return the learning rate as a share of the largest: a short linear warm-up, then a long decay to 0."""
    done = (step + 1) / (num_steps + 1)
    return min(1.0, done / 0.03, (1.0 - done) / 0.7)


def _make_optimizer(model: LlamaForCausalLM, pool: Executor) -> Callable[[float], None]:
    """Return a function that makes one optimizer step, at a given share of the largest learning rate."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    rest = torch.optim.AdamW(
        [p for p in model.parameters() if id(p) not in inside], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0
    )
    momenta = [torch.zeros_like(p) for p in matrices]

    def update(share: float) -> None:
        for group in rest.param_groups:
            group["lr"] = 3e-3 * share
        rest.step()
        list(pool.map(partial(_update_orthogonally, 0.02 * share), matrices, momenta))

    return update


@torch.no_grad()
def _update_orthogonally(rate: float, matrix: torch.Tensor, momentum: torch.Tensor) -> None:
    """Update `matrix` with one Muon step, along the orthogonal matrix nearest to the momentum.

    Newton-Schulz iterations approximate that matrix. Muon needs a third of the steps that AdamW needs.
    torch's own Muon works in bfloat16, which is slow on processors without instructions for it."""
    assert matrix.grad is not None
    momentum.lerp_(matrix.grad, 0.05)  # [out, in]
    x = matrix.grad.lerp(momentum, 0.95)  # [out, in]
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(4):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
    matrix.add_(x if wide else x.T, alpha=-rate * scale)


def _save(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    weights = directory / "model.safetensors"
    save_file(model.state_dict(), weights, metadata={"format": "pt"})
    # save_file makes the file readable for its owner alone, whatever the umask.
    weights.chmod((directory / "config.json").stat().st_mode)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
