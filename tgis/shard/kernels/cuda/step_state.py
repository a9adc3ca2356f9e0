"""Memory of a GPU that a step's kernels share: the state of rows, and the step's own tensors.

The last row of every table is idle: it has ended, and its blocks are the cache's last block, the dummy block,
which belongs to no sequence. Captured steps fill up with it."""

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import NamedTuple

import torch
from torch import Tensor

# Sequences are attended to in segments that the kernel computes independently. A segment's length depends on
# its own sequence's length only, so other sequences cannot change the order of sums.
SEGMENT_LEN = 256
MAX_SEGMENTS = 32  # of one sequence; longer ones have longer segments

# The most stop token ids and logit biases of a row; rows with more sample on the host.
MAX_STOP_IDS, MAX_BIASES = 32, 1024
MAX_COUNT = (1 << 15) - 1  # of `RowState.token_counts`, where counting ends


class Word(IntEnum):
    """Words of a row's state. Those marked float hold the bits of a float32."""

    LENGTH = 0  # number of prompt and generated tokens, which is the next token's position
    LIMIT = auto()  # length at which the row ends
    PROMPT_LEN = auto()
    ENDED = auto()
    LAST_TOKEN = auto()
    ENCODER_LEN = auto()
    IS_LONG = auto()  # the sequence is past the model's rope_switch_len
    NUM_STOP_IDS = auto()
    NUM_BIASES = auto()
    GREEDY = auto()
    SEED_LOW = auto()
    SEED_HIGH = auto()
    TEMPERATURE = auto()  # float
    TOP_K = auto()  # 0, or the vocabulary's size and more: off
    TOP_P = auto()  # float; 1: off
    MIN_P = auto()  # float; 0: off
    TYPICAL_P = auto()  # float; 1: off
    REPETITION_PENALTY = auto()  # float; 1: off
    PRESENCE_PENALTY = auto()  # float; 0: off
    FREQUENCY_PENALTY = auto()  # float; 0: off
    LENGTH_PENALTY_START = auto()
    LENGTH_PENALTY_FACTOR = auto()  # float; 1: off
    MIN_NEW_TOKENS = auto()
    IS_GUIDED = auto()  # `RowState.masks` limits the next token
    MUST_END = auto()  # the grammar allows nothing but the end


class Flag(IntEnum):
    """Bits of an answer."""

    SAMPLED = 1
    ENDED = 2  # with this token
    UNUSABLE = 4  # the logits have no finite maximum; the row has ended without a token


@dataclass(frozen=True)
class RowState:
    """State of rows. Rows of `words` are `Word`s; other tables have `num_rows` + 1 rows too."""

    words: Tensor  # int32 [num_rows + 1, len(Word)]
    block_tables: Tensor  # int32 [num_rows + 1, max_blocks]
    cross_tables: Tensor  # int32 [num_rows + 1, max_cross_blocks]
    stop_ids: Tensor  # int32 [num_rows + 1, MAX_STOP_IDS], -1 past a row's number
    bias_token_ids: Tensor  # int32 [num_rows + 1, MAX_BIASES], each once, -1 past a row's number
    biases: Tensor  # float32 [num_rows + 1, MAX_BIASES]
    token_counts: Tensor  # int16 [num_rows + 1, vocab_size]: 15 bits, times generated; sign, in the prompt
    masks: Tensor  # int32 [num_rows + 1, ceil(vocab_size / 32)], bit i % 32 of word i / 32: i is allowed
    dummy_slot: int  # first slot of the dummy block

    @property
    def idle_row(self) -> int:
        return len(self.words) - 1


class StagedStep(NamedTuple):
    """Work of a step as the host describes it, int32, in memory of the device.

    Sequences with a single new token come first, and their tokens are the first ones. Captured steps have
    nothing else, and fill up with the idle row (end 0, token 0 at position 0 of the dummy block)."""

    seq_rows: Tensor  # [num_seqs]
    seq_ends: Tensor  # [num_seqs], number of cached and new tokens
    token_rows: Tensor  # [num_tokens]
    token_ids: Tensor  # [num_tokens]; -1: the row's last token, which the host does not know yet
    positions: Tensor  # [num_tokens]
    slots: Tensor  # [num_tokens], block * block_size + offset
    new_blocks: Tensor  # [num_new_blocks, 3]: row, index in its block table, block. The idle row pads them
    tiles: Tensor  # [num_tiles, 5], see attend_tiles
    cross_tiles: Tensor  # [num_cross_tiles, 5]
    sampled_rows: Tensor  # [num_sampled]
    sampled_x: Tensor  # [num_sampled], index of the token before each sample


class StepTensors(NamedTuple):
    """Inputs of the model, which begin_step writes."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]; slots of ended rows are the dummy block's first one
    is_long: Tensor  # bool [num_tokens]
    seq_lens: Tensor  # int32 [num_seqs]; 0 for ended rows
    work_starts: Tensor  # int32 [num_single + 1], numbers of segments of all sequences before
    cross_lens: Tensor  # int32 [num_seqs], tokens of the encoder; 0 for ended rows
    cross_work_starts: Tensor  # int32 [num_single + 1]

    @classmethod
    def empty(cls, num_tokens: int, num_seqs: int, num_single: int, device: torch.device) -> "StepTensors":
        def tensor(size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        return cls(
            token_ids=tensor(num_tokens, torch.int64),
            positions=tensor(num_tokens, torch.int64),
            slot_mapping=tensor(num_tokens, torch.int64),
            is_long=tensor(num_tokens, torch.bool),
            seq_lens=tensor(num_seqs, torch.int32),
            work_starts=tensor(num_single + 1, torch.int32),
            cross_lens=tensor(num_seqs, torch.int32),
            cross_work_starts=tensor(num_single + 1, torch.int32),
        )


class Segments(NamedTuple):
    """Sequences of which one query each attends in segments."""

    rows: Tensor  # int32 [num_seqs], in the block tables
    seq_lens: Tensor  # int32 [num_seqs]; 0: the result is zeros
    work_starts: Tensor  # int32 [num_seqs + 1]


def segment_lengths(seq_lens: Tensor) -> Tensor:
    """Return the segment length of each sequence, int32 [num_seqs]: a multiple of SEGMENT_LEN."""
    longest = SEGMENT_LEN * MAX_SEGMENTS
    return SEGMENT_LEN * ((seq_lens + longest - 1) // longest).clamp(min=1)


def count_segments(seq_lens: Tensor) -> Tensor:
    """Return the number of segments of each sequence, int32 [num_seqs]: at most MAX_SEGMENTS."""
    lengths = segment_lengths(seq_lens)
    return (seq_lens + lengths - 1) // lengths


def as_float(words: Tensor) -> Tensor:
    """Return float32 of the bits of words, int32 [n]."""
    return words.contiguous().view(torch.float32)
