"""Words of rows that are no sampling parameters, and functions shared by the kernels of sampling. The kernels
that use a parameter declare its word."""

import triton
import triton.language as tl

from tgis.shard.kernels.cuda.step_state import Word

NUM_WORDS = tl.constexpr(len(Word))
LENGTH, LIMIT, PROMPT_LEN = tl.constexpr(Word.LENGTH), tl.constexpr(Word.LIMIT), tl.constexpr(Word.PROMPT_LEN)
ENDED, LAST_TOKEN = tl.constexpr(Word.ENDED), tl.constexpr(Word.LAST_TOKEN)
NUM_STOP_IDS, NUM_BIASES = tl.constexpr(Word.NUM_STOP_IDS), tl.constexpr(Word.NUM_BIASES)
SEED_LOW, SEED_HIGH = tl.constexpr(Word.SEED_LOW), tl.constexpr(Word.SEED_HIGH)
IS_GUIDED, MUST_END = tl.constexpr(Word.IS_GUIDED), tl.constexpr(Word.MUST_END)

INF = tl.constexpr(float("inf"))

# Views into larger tensors, whose alignment varies. Kernels must not be specialised on it.
STAGED = ["sampled_rows", "answers"]


@triton.jit
def load_float(word):
    return tl.load(word).to(tl.float32, bitcast=True)


@triton.jit
def find_highest(highest, NUM_BLOCKS: tl.constexpr, PADDED_BLOCKS: tl.constexpr):
    """Return the highest value of a sample's blocks (NaN if there is one) and the first block that has it."""
    block = tl.arange(0, PADDED_BLOCKS)
    values = tl.load(highest + block, mask=block < NUM_BLOCKS, other=-INF)
    is_nan = values != values
    value, place = tl.max(tl.where(is_nan, -INF, values), 0, return_indices=True)
    return tl.where(tl.max(is_nan.to(tl.int32), 0) != 0, float("nan"), value), place
