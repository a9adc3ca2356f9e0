"""Trains a small Llama on the documentation that Python ships, to have a model to serve without a model hub.

It recites its training text. Training again on the same machine gives the same bytes."""

import logging
import multiprocessing
import random
import re
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count, islice
from pathlib import Path
from pydoc_data.topics import topics
from uuid import uuid4

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tgis.config.processes import ShardConfig
from tgis.errors import OperatorError

logger = logging.getLogger(__name__)

PROMPT = "The with statement is used to"
"""Beginning of a sentence in the training text, with which every batch has a row."""

VOCAB_SIZE = 1536

# The fixed order keeps training independent of a dictionary's order.
TOPICS = (
    "if while for try with class return raise pass break continue del assert lambda yield context-managers "
    "numbers booleans truth lists dict"
).split()

NOT_PROSE = re.compile(r"::=|>>>|->|\\|\[\d+\]|^\W+$|^ ", re.MULTILINE)
ASIDES = re.compile(r"(Changed|New|Added|Deprecated|See also|Notes?|Prior|In Python)\b")

NUM_STEPS = 120
MAX_LENGTH = 512
NUM_ROWS, ROW_TOKENS = 16, 48
LONG_ROW_EVERY, LONG_ROW_FACTOR = 4, 4
NUM_THREADS = 2  # fixed, because splitting a product among more threads changes its last bits
LOG_EVERY = 30  # steps
ADAM_RATE, MUON_RATE, MOMENTUM = 1e-2, 0.04, 0.95


class DemoModelError(OperatorError):
    """Error when the model cannot be written; the text is one line with the reason."""


def write_demo_model(
    directory: Path,
    num_steps: int = NUM_STEPS,
    *,
    compile_kernels: bool = False,
    cache_home: str | None = None,
) -> None:
    """Train the model and write it in Hugging Face layout; `directory` is complete or absent.

    Raises DemoModelError before training if the directory cannot be written."""
    with _appearing(directory) as fresh:
        documents = read_documents()
        tokenizer = train_tokenizer(documents)
        model = make_model(tokenizer)
        _save(model, tokenizer, fresh)
        with _compiling(fresh, cache_home) if compile_kernels else nullcontext():
            train(model, documents, tokenizer, num_steps)
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


@contextmanager
def _compiling(directory: Path, cache_home: str | None) -> Iterator[None]:
    """Compile the kernels that serve the model, in another process beside the block."""
    process = multiprocessing.get_context("spawn").Process(
        target=_compile_kernels, args=(directory, cache_home)
    )
    process.start()
    try:
        yield
        process.join()
        if process.exitcode:
            logger.warning("the kernels were not compiled; the first start will compile them")
    finally:
        process.kill()
        process.join()


def _compile_kernels(directory: Path, cache_home: str | None) -> None:
    from tgis.shard.startup.load import load

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process ends this one
    path, most = str(directory), MAX_LENGTH
    load(ShardConfig(model_path=path, max_batch_size=1, kv_cache_tokens=most, cache_home=cache_home))


def make_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Return an untrained model, the same one every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return LlamaForCausalLM(_model_config(tokenizer.get_vocab_size()))


def train(model: LlamaForCausalLM, documents: list[str], tokenizer: Tokenizer, num_steps: int) -> list[float]:
    """Train the model and return the loss of each step."""
    logger.info("training on %d characters, less than half a minute", sum(map(len, documents)))
    losses: list[float] = []
    with _repeatable():
        update = _Optimizer(model)
        for tokens in islice(_draw_rows(documents, tokenizer), num_steps):  # [rows, row_tokens + 1]
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # [rows, row_tokens, vocab]
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            update.step(_learning_rate(len(losses), num_steps))
            losses.append(loss.item())
            if len(losses) % LOG_EVERY == 0:
                logger.info("step %d of %d, loss %.2f", len(losses), num_steps, losses[-1])
    model.eval()
    return losses


@contextmanager
def _repeatable() -> Iterator[None]:
    """Make torch compute the same numbers on any number of cores; restore its settings after the block."""
    num_threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(strict)


def _draw_rows(documents: list[str], tokenizer: Tokenizer) -> Iterator[torch.Tensor]:
    """Yield batches [rows, row_tokens + 1] without end; every LONG_ROW_EVERY-th has fewer and longer rows.

    Each row begins with <s>, as a prompt does, and goes on at PROMPT (the first), a sentence or any word."""
    text = "".join(document + "</s><s>" for document in documents)
    words = [match.start() for match in re.finditer(r"(?<![^\s>])[^\s<]", text)]
    sentences = [match.start() for match in re.finditer(r"(?:(?<=[.:] )|(?<=\n)|(?<=>)|^)[A-Z]", text)]
    source = random.Random(1)
    for step in count():
        shrink = LONG_ROW_FACTOR if step % LONG_ROW_EVERY == 0 else 1
        length = ROW_TOKENS * shrink + 1
        num_others = NUM_ROWS // shrink - 1
        num_sentences = num_others // 2
        starts = source.sample(sentences, num_sentences) + source.sample(words, num_others - num_sentences)
        # 16 characters per token are more than enough; the text wraps around at its end.
        pieces = [(text[start:] + text)[: length * 16] for start in [text.index(PROMPT), *starts]]
        yield torch.tensor([encoding.ids[:length] for encoding in tokenizer.encode_batch(pieces)])


def _model_config(vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
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


class _Optimizer:
    """Muon (Keller Jordan, 2024) for the matrices of the layers, AdamW for the other parameters.

    Muon needs a third of the steps that AdamW needs alone. torch's own Muon works in bfloat16, which takes 20
    times as long on processors without instructions for it."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._matrices = {p: torch.zeros_like(p) for p in model.model.layers.parameters() if p.ndim == 2}
        others = [p for p in model.parameters() if p not in self._matrices]
        self._adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Update the parameters at a share of the largest learning rates, and clear the gradients."""
        for group in self._adam.param_groups:
            group["lr"] = ADAM_RATE * share
        self._adam.step()
        self._adam.zero_grad()
        for matrix, momentum in self._matrices.items():
            assert matrix.grad is not None
            momentum.lerp_(matrix.grad, 1 - MOMENTUM)
            direction = _orthogonalize(matrix.grad.lerp(momentum, MOMENTUM))  # [out, in]
            scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            matrix.add_(direction, alpha=-MUON_RATE * share * scale)
            matrix.grad = None


def _orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return about the nearest orthogonal matrix, by Newton-Schulz iterations."""
    is_wide = matrix.shape[0] <= matrix.shape[1]
    x: torch.Tensor = (matrix if is_wide else matrix.T) / (matrix.norm() + 1e-7)
    for _ in range(4):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if is_wide else x.T


def _save(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    model.save_pretrained(directory)
    # save_pretrained makes the weights readable for their owner alone, whatever the umask.
    (directory / "model.safetensors").chmod((directory / "config.json").stat().st_mode)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
        add_bos_token=True,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    ).save_pretrained(directory)


def read_documents(names: Iterable[str] = TOPICS) -> list[str]:
    """Return one text of plain prose per topic, without markup and code, with one line per paragraph."""
    known: set[str] = set()
    documents = []
    for name in names:
        # Python releases add and remove topics.
        paragraphs = re.split(r"\n\s*\n", topics.get(name, "").strip())
        prose = [_strip_markup(paragraph) for paragraph in paragraphs if _is_prose(paragraph)]
        unique = [paragraph for paragraph in prose if paragraph not in known]
        known.update(unique)
        if unique:
            documents.append("\n\n".join(unique))
    return documents


def train_tokenizer(documents: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer that begins every text with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def _is_prose(paragraph: str) -> bool:
    return (
        len(paragraph) > 40
        and paragraph[-1] in ".:"
        and (paragraph[0].isupper() or paragraph[0] in '"*')
        and not NOT_PROSE.search(paragraph)
        and not ASIDES.match(paragraph)
    )


def _strip_markup(paragraph: str) -> str:
    # Quotation marks would need escapes in a shell.
    joined = re.sub(r"\s+", " ", paragraph.replace("-\n", "-")).replace('"', "")
    return re.sub(r"\*(\S[^*]*?\S|\S)\*", r"\1", joined)
