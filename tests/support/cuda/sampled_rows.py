"""Rows that the CPU's sampler and a GPU's `sample` continue in parallel."""

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.plain_sampling import single
from tests.support.shard.messages import GREEDY, NOTHING, SAMPLE, floats, integers, make_bias, open_row
from tgis.pb import shard_pb2 as pb
from tgis.sampling_parameters import SHARED
from tgis.shard.kernels.cuda.step_state import MAX_BIASES, MAX_STOP_IDS, Flag, RowState, Wanted, Word
from tgis.shard.runner.row_table import RowLimits, RowTable
from tgis.shard.sampling import sampler

CPU = torch.device("cpu")
Sample = Callable[[Tensor, RowState, Tensor, Tensor], None]
INT32_MAX = 2**31 - 1
POISON = -7


class SampledRows:
    """Rows with their state on both sides. Rows that are not open, and unused entries, are poisoned."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.vocab_size, self.guided = vocab_size, dict[int, tuple[Tensor, bool]]()
        limits = RowLimits(max_sequence_length=4096, block_size=16, vocab_size=vocab_size)
        self.table = RowTable(num_rows, limits, CPU, NOTHING)
        self.state = make_state(num_rows, vocab_size)
        self.messages: dict[int, pb.OpenRow] = {}

    def open(self, message: pb.OpenRow) -> None:
        assert self.table.open(message) is None
        self.messages[message.row] = message
        write_row(self.state, message)

    def guide(self, row: int, allowed: Tensor, must_end: bool) -> None:
        """Limit the next tokens to `allowed`, bool [vocab_size]."""
        self.guided[row] = allowed, must_end
        bits = np.packbits(allowed.numpy(), bitorder="little")
        packed = np.zeros(4 * self.state.masks.shape[1], np.uint8)
        packed[: len(bits)] = bits
        self.state.masks[row] = torch.from_numpy(packed.view(np.int32))
        self.state.words[row, Word.IS_GUIDED] = 1
        self.state.words[row, Word.MUST_END] = int(must_end)

    def step_on_cpu(self, logits: Tensor, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return the answers that the rows must give, and append them to the table."""
        answers = [(0, 0)] * len(rows)
        live = [i for i, row in enumerate(rows) if row in self.messages and not self.has_ended(row)]
        index, scores = np.array([rows[i] for i in live], np.int64), logits[live].clone()
        must_end = np.zeros(len(live), np.bool_)
        for i, row in enumerate(index.tolist()):
            if row in self.guided:
                allowed, must_end[i] = self.guided[row]
                scores[i] = scores[i].masked_fill(~allowed, -torch.inf)
        if not live:
            return answers
        batch = self.table.sampling_batch(index, np.zeros(len(live), np.bool_), must_end)
        chosen, usable = sampler.sample(scores, batch, self.table.seen)
        self.table.fail(index[~usable])
        token_ids = chosen.numpy().astype(np.int32)
        ended = np.zeros(len(live), np.bool_)
        if usable.any():
            ended[usable] = self.table.append(index[usable], token_ids[usable])
        for i, token_id, is_usable, has_ended in zip(live, token_ids.tolist(), usable, ended, strict=True):
            flags = Flag.SAMPLED + has_ended * Flag.ENDED
            answers[i] = (token_id, int(flags)) if is_usable else (0, int(Flag.UNUSABLE))
        return answers

    def has_ended(self, row: int) -> bool:
        return bool(self.table.rows["ended"][row])

    def step(self, sample: Sample, logits: Tensor, rows: Sequence[int]) -> list[tuple[int, int]]:
        answers = torch.full((len(rows), 2), POISON, dtype=torch.int32)
        sample(logits.clone(), self.state, torch.tensor(rows, dtype=torch.int32), answers)
        return [(token_id, flags) for token_id, flags in answers.tolist()]


def make_state(num_rows: int, vocab_size: int) -> RowState:
    def table(width: int, value: float = POISON, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((num_rows + 1, width), value, dtype=dtype)

    state = RowState(
        words=table(len(Word)),
        block_tables=table(3),
        cross_tables=table(3),
        stop_ids=table(MAX_STOP_IDS, 1),
        bias_token_ids=table(MAX_BIASES, 1),
        biases=table(MAX_BIASES, torch.nan, torch.float32),
        token_counts=table(vocab_size, dtype=torch.int16),
        masks=table(-(-vocab_size // 32), 0),
        greens=table(-(-vocab_size // 32), 0),
        dummy_slot=POISON,
    )
    state.words[-1, Word.ENDED] = 1
    return state


def write_row(state: RowState, message: pb.OpenRow) -> None:
    """Write a message's row. Entries after its stop ids and biases have values left by other rows."""
    row, sampling, token_ids = message.row, message.sampling, integers(message.token_ids)
    stop_ids, bias_ids = integers(message.eos_token_ids), integers(sampling.bias_token_ids)
    limit = message.prompt_len + message.max_new_tokens
    words = {
        Word.LENGTH: len(token_ids),
        Word.LIMIT: limit,
        Word.PROMPT_LEN: message.prompt_len,
        Word.ENDED: int(len(token_ids) >= limit),
        Word.NUM_STOP_IDS: len(stop_ids),
        Word.NUM_BIASES: len(bias_ids),
        Word.GREEDY: int(sampling.greedy),
        Word.SEED_LOW: signed(sampling.seed & 0xFFFFFFFF),
        Word.SEED_HIGH: signed(sampling.seed >> 32),
        Word.TEMPERATURE: bits(1.0 if sampling.greedy else sampling.temperature),
        Word.TOP_K: 0 if sampling.greedy else min(sampling.top_k, INT32_MAX),
        Word.TOP_P: bits(1.0 if sampling.greedy else sampling.top_p),
        Word.TYPICAL_P: bits(1.0 if sampling.greedy else sampling.typical_p),
        Word.REPETITION_PENALTY: bits(sampling.repetition_penalty),
        Word.LENGTH_PENALTY_START: min(sampling.length_penalty_start, INT32_MAX),
        Word.LENGTH_PENALTY_FACTOR: bits(sampling.length_penalty_factor),
        Word.MIN_NEW_TOKENS: min(sampling.min_new_tokens, INT32_MAX),
        Word.IS_GUIDED: 0,
        Word.MUST_END: 0,
        Word.DETAILS: int(find_wanted(message)),
        Word.TOP_N: message.details.top_n,
        Word.WATERMARK_GAMMA: bits(sampling.watermark_gamma),
        Word.WATERMARK_DELTA: bits(sampling.watermark_delta),
    }
    for parameter in SHARED:
        is_off = parameter.random_only and sampling.greedy
        value = parameter.off if is_off else getattr(sampling, parameter.name)
        words[Word[parameter.name.upper()]] = bits(value)
    for word, value in words.items():
        state.words[row, word] = value
    state.stop_ids[row, : len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int32)
    state.bias_token_ids[row, : len(bias_ids)] = torch.tensor(bias_ids, dtype=torch.int32)
    state.biases[row, : len(bias_ids)] = torch.tensor(floats(sampling.biases))
    prompt, generated = token_ids[: message.prompt_len], token_ids[message.prompt_len :]
    state.token_counts[row] = torch.tensor(count(prompt, generated, state.token_counts.shape[1]))


def find_wanted(message: pb.OpenRow) -> Wanted:
    details = message.details
    if details.logprobs or details.ranks or details.top_n:
        return Wanted.RAW if details.raw else Wanted.FINAL
    return Wanted.NOTHING


def count(prompt: Sequence[int], generated: Sequence[int], vocab_size: int) -> list[int]:
    """Return token counts in the form of `RowState`."""
    counts = [0] * vocab_size
    for i in generated:
        counts[i] = min(counts[i] + 1, 2**15 - 1)
    for i in set(prompt):
        counts[i] -= 2**15
    return counts


def bits(value: float) -> int:
    number: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return number


def signed(word: int) -> int:
    return word - 2**32 if word >> 31 else word


class Cases:
    """Random rows of one vocabulary, and logits that sampling parameters can easily reorder: a few tokens
    lead, which are also those in prompts, biases and stops."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.rng, self.vocab_size = random.Random(seed), vocab_size
        last = vocab_size - 1
        self.hot = [0, last, *self.rng.sample(range(1, last), min(12, vocab_size - 2))]

    def message(self, row: int) -> pb.OpenRow:
        rng, hot = self.rng, self.hot
        prompt = [rng.choice(hot) for _ in range(rng.randint(1, 9))]
        generated = [rng.choice(hot) for _ in range(rng.choice([0, 0, 1, 7, 20]))]
        stop_ids = rng.sample(hot, rng.choice([0, 1, 1, 3])) + rng.choice([[], [self.vocab_size + 5]])
        return open_row(
            row,
            prompt + generated,
            prompt_len=len(prompt),
            max_new_tokens=len(generated) + rng.choice([1, 2, 3, 100]),
            eos=stop_ids,
            sampling=self.sampling(),
        )

    def sampling(self) -> dict[str, Any]:
        rng = self.rng
        sampling = dict(GREEDY if rng.random() < 0.3 else SAMPLE)
        if rng.random() < 0.2:
            return sampling if sampling["greedy"] else {**sampling, "seed": rng.getrandbits(64)}
        sampling |= {
            "repetition_penalty": single(rng.choice([1.0, 1.0, 0.5, 1.25, 1e-38, 3e38])),
            "presence_penalty": single(rng.choice([0.0, 0.0, 0.6, -2.0])),
            "frequency_penalty": single(rng.choice([0.0, 0.0, 0.1, -1.3])),
            "min_new_tokens": rng.choice([0, 0, 1, 8, 2**32 - 1]),
            "length_penalty_start": rng.choice([0, 3, 2**32 - 1]),
            "length_penalty_factor": single(rng.choice([1.0, 1.0, 1.01, 1.5, 10.0])),
        }
        if rng.random() < 0.4:
            biased = rng.sample(self.hot, rng.randint(1, len(self.hot)))
            sampling |= make_bias({i: rng.choice([3.0, -100.0, rng.gauss(0, 3)]) for i in biased})
        if not sampling["greedy"]:
            sampling |= {
                "seed": rng.getrandbits(64),
                "temperature": single(rng.choice([1.0, 0.5, 2.0, 0.05, 1000.0])),
                "min_p": single(rng.choice([0.0, 0.0, 1e-9, 0.02, 0.3, 1.0])),
            }
        return sampling

    def logits(self, num_rows: int) -> Tensor:
        logits = torch.tensor([self._row_logits() for _ in range(num_rows)])
        logits[:, self.hot] += 2.5
        logits += torch.tensor([[self.rng.choice([0.0, -20.0])] for _ in range(num_rows)])
        return logits

    def _row_logits(self) -> list[float]:
        kind = self.rng.choice(["normal", "flat", "ties", "excluded"])
        values = [self.rng.gauss(0, 0.01 if kind == "flat" else 2.0) for _ in range(self.vocab_size)]
        if kind == "ties":
            return [float(round(x)) for x in values]
        if kind == "excluded":
            return [x if self.rng.random() < 0.5 else -torch.inf for x in values]
        return values

    def allowed(self) -> Tensor:
        """Return a mask that allows some tokens, and not only the most likely ones."""
        allowed = torch.tensor([self.rng.random() < 0.4 for _ in range(self.vocab_size)])
        allowed[self.rng.randrange(self.vocab_size)] = True
        return allowed


class FilteredCases(Cases):
    """Random rows with random sampling, most of them with filters and no other change of their logits."""

    def sampling(self) -> dict[str, Any]:
        rng, vocab_size = self.rng, self.vocab_size
        top_ks = [0, 0, 1, 2, 5, 50, vocab_size - 1, vocab_size, vocab_size + 1, INT32_MAX]
        return {
            **SAMPLE,
            "seed": rng.getrandbits(64),
            "temperature": single(rng.choice([1.0, 0.5, 2.0])),
            "top_k": rng.choice(top_ks),
            "top_p": single(rng.choice([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.999, rng.random()])),
            "min_p": single(rng.choice([0.0, 0.0, 0.0, 1e-9, 0.02, 0.3])),
            "typical_p": single(rng.choice([1.0, 1.0, 1.0, 1e-6, 0.05, 0.5, 0.95])),
        }
