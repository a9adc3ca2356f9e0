"""GPU memory shared by the kernels of a step: the state of rows, and the step's tensors.

The last row of every table is idle. It has ended, and all its blocks are the cache's last block, the dummy
block, which no sequence uses. Captured steps are padded with it."""

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from tgis.sampling_parameters import PARAMETERS
from tgis.shard.sampling.logprobs import MAX_TIES

# The kernel computes segments of a sequence's keys independently. The length of a segment depends only on the
# length of its sequence, so other sequences cannot change the order of sums.
SEGMENT_LEN = 256
MAX_SEGMENTS = 32  # maximum per sequence; longer sequences have longer segments

# Number of tokens by which the sums of recurrent layers advance: the smallest size of tensor-core products.
STATE_CHUNK = 16

# Maximum stop token ids, logit biases and top tokens of a row. Rows with more are sampled on the host.
MAX_STOP_IDS, MAX_BIASES, MAX_TOP_N = 128, 1024, 20
MAX_TOPS = MAX_TIES * MAX_TOP_N  # maximum length of a list of top tokens, including ties
MAX_COUNT = (1 << 15) - 1  # saturation value of `RowState.token_counts`


class Word(IntEnum):
    """Words of a row's state: those below, and one for each sampling parameter, `Word["TOP_P"]`. The words of
    parameters of type float hold the bits of a float32. The seed has two words."""

    _ignore_ = "_name"

    LENGTH = 0  # number of prompt and generated tokens, which is the next token's position
    LIMIT = auto()  # length at which the row ends
    PROMPT_LEN = auto()
    ENDED = auto()
    LAST_TOKEN = auto()
    ENCODER_LEN = auto()
    IS_LONG = auto()  # the sequence is longer than the model's rope_switch_len
    NUM_STOP_IDS = auto()
    NUM_BIASES = auto()
    IS_GUIDED = auto()  # `RowState.masks` restricts the next token
    MUST_END = auto()  # the grammar allows only the end
    DETAILS = auto()  # a `Wanted`
    TOP_N = auto()  # number of top tokens to report
    SEED_LOW = auto()
    SEED_HIGH = auto()
    for _name in (each.name.upper() for each in PARAMETERS if each.name != "seed"):
        vars()[_name] = auto()


OFF_WORDS = {Word[each.name.upper()]: each.off for each in PARAMETERS if isinstance(each.off, float)}
"""Off values of parameters of type float. Those of other types are 0, except for GREEDY."""


class Wanted(IntEnum):
    """Scores from which the details of a row's sampled tokens are computed."""

    NOTHING = 0
    FINAL = 1  # those from which the token is chosen
    RAW = 2  # the model's own logits


class Flag(IntEnum):
    """Bits of an answer."""

    SAMPLED = 1
    ENDED = 2  # with this token
    UNUSABLE = 4  # the logits have no finite maximum; the row has ended without a token


@dataclass(frozen=True)
class RowState:
    """State of rows. A row of `words` consists of `Word`s. All tables have `num_rows` + 1 rows."""

    words: Tensor  # int32 [num_rows + 1, len(Word)]
    block_tables: Tensor  # int32 [num_rows + 1, max_blocks]
    cross_tables: Tensor  # int32 [num_rows + 1, max_cross_blocks]
    stop_ids: Tensor  # int32 [num_rows + 1, MAX_STOP_IDS], padded with -1
    bias_token_ids: Tensor  # int32 [num_rows + 1, MAX_BIASES], distinct, padded with -1
    biases: Tensor  # float32 [num_rows + 1, MAX_BIASES]
    token_counts: Tensor  # int16 [num_rows + 1, vocab_size]: lower 15 bits count generated; sign: in prompt
    masks: Tensor  # int32 [num_rows + 1, ceil(vocab_size / 32)]; bit i % 32 of word i / 32: token i allowed
    greens: Tensor  # int32, as `masks`: token i is green, see `sampling.watermark`
    dummy_slot: int  # first slot of the dummy block

    @property
    def idle_row(self) -> int:
        return len(self.words) - 1


NO_SPANS = torch.empty((3, 0), dtype=torch.int32)


class StagedStep(NamedTuple):
    """Description of a step by the host: int32 tensors in device memory.

    Sequences with a single new token come first, and so do their tokens. Captured steps have no others, and
    are padded with the idle row (end 0, token 0 at position 0 of the dummy block)."""

    seq_rows: Tensor  # [num_seqs]
    seq_ends: Tensor  # [num_seqs], numbers of cached and new tokens
    token_rows: Tensor  # [num_tokens]
    token_ids: Tensor  # [num_tokens]; -1: the row's last token, still unknown to the host
    positions: Tensor  # [num_tokens]
    slots: Tensor  # [num_tokens], block * block_size + offset
    new_blocks: Tensor  # [num_new_blocks, 3]: row, index in its block table, block; padded with the idle row
    tiles: Tensor  # [num_tiles, 5], see attend_tiles
    cross_tiles: Tensor  # [num_cross_tiles, 5]
    sampled_rows: Tensor  # [num_sampled]
    sampled_x: Tensor  # [num_sampled], index of the token whose logits are sampled
    # Slot of the state, first new token, and its position, by sequence: [3, num_spans + 1]. The last entry
    # has only the end of the tokens. Captured steps are padded with the dummy state. Models without states
    # have none.
    spans: Tensor = NO_SPANS


class StepTensors(NamedTuple):
    """Inputs of the model, written by begin_step."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]; ended rows: the first slot of the dummy block
    is_long: Tensor  # bool [num_tokens]
    seq_lens: Tensor  # int32 [num_seqs]; 0 for ended rows
    work_starts: Tensor  # int32 [num_single + 1], number of segments of all earlier sequences
    cross_lens: Tensor  # int32 [num_seqs], number of the encoder's tokens; 0 for ended rows
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


class Query(IntEnum):
    """Columns of a question for the details of a token."""

    TOKEN_ID = 0
    TOP_N = 1  # number of top tokens
    IS_ASKED = 2  # 0: the others are undefined, and there is no answer


class DetailQuestions(NamedTuple):
    """Inputs of `describe` for n tokens."""

    scores: Tensor  # float32 [n, vocab_size], -inf where excluded; undefined if the question is not asked
    queries: Tensor  # int32 [n, len(Query)]

    @classmethod
    def empty(cls, num_tokens: int, vocab_size: int, device: torch.device) -> "DetailQuestions":
        scores = torch.empty((num_tokens, vocab_size), device=device)
        return cls(scores, torch.empty((num_tokens, len(Query)), dtype=torch.int32, device=device))


class DeviceDetails(NamedTuple):
    """Details of n tokens, written by `describe`, with lists of up to `max_tops` top tokens. The lists have
    ascending token ids."""

    words: Tensor  # int32 [n, 2 + max_tops]: rank, number of top tokens, their ids
    logprobs: Tensor  # float32 [n, 1 + max_tops], of the token and of the top tokens

    @classmethod
    def empty(cls, num_tokens: int, max_tops: int, device: torch.device) -> "DeviceDetails":
        words = torch.empty((num_tokens, 2 + max_tops), dtype=torch.int32, device=device)
        return cls(words, torch.empty((num_tokens, 1 + max_tops), device=device))

    def first(self, num_tokens: int) -> "DeviceDetails":
        return DeviceDetails(self.words[:num_tokens], self.logprobs[:num_tokens])


class Segments(NamedTuple):
    """Sequences with one query each, whose attention is computed in segments."""

    rows: Tensor  # int32 [num_seqs], rows in the block tables
    seq_lens: Tensor  # int32 [num_seqs]; 0: the result is zeros
    work_starts: Tensor  # int32 [num_seqs + 1]


def segment_lengths(seq_lens: Tensor) -> Tensor:
    """Return the segment length of each sequence, int32 [num_seqs]: a multiple of SEGMENT_LEN."""
    longest = SEGMENT_LEN * MAX_SEGMENTS
    return SEGMENT_LEN * ((seq_lens + longest - 1) // longest).clamp(min=1)


def count_segments(seq_lens: Tensor) -> Tensor:
    """Return the number of segments of each sequence, int32 [num_seqs], up to MAX_SEGMENTS."""
    lengths = segment_lengths(seq_lens)
    return (seq_lens + lengths - 1) // lengths


def as_float(words: Tensor) -> Tensor:
    """Reinterpret words, int32 [n], as float32."""
    return words.contiguous().view(torch.float32)
