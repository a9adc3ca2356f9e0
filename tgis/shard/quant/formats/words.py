"""Unpacks integers of 2, 3, 4 or 8 bits from words of 32 bits. They are packed without gaps, the first in the
lowest bits of the first word. Integers of 3 bits may extend over two words."""

from collections.abc import Callable, Sequence
from math import gcd, prod

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = (2, 3, 4, 8)


def count_words(num_values: int, bits: int) -> int:
    return -(-num_values * bits // 32)


def read_values(read: Callable[[range], Tensor], bits: int, part: range, order: Sequence[int] = ()) -> Tensor:
    """Return the values in the range `part`, uint8 [num_rows, num_values]. `read` returns a range of words,
    int32 [num_rows, num_words]."""
    period = 32 // gcd(32, bits)  # number of values after which one begins at a word
    first = part.start // period
    last = -(-part.stop // period)
    words = read(range(first * bits * period // 32, last * bits * period // 32))
    values = unpack(words, bits, order)
    return values[:, part.start - first * period :][:, : len(part)]


def unpack(words: Tensor, bits: int, order: Sequence[int] = ()) -> Tensor:
    """Unpack words, int32 [num_rows, num_words], to values, uint8 [num_rows, num_values]. With `order`, value
    i of a word is at position `order[i]`."""
    num_bytes = 4 if order else bits // gcd(bits, 8)  # number of bytes after which a value begins at a byte
    # All supported processors are little-endian.
    rows = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    padding = -rows.shape[1] % num_bytes
    units = F.pad(rows, (0, padding)).view(len(rows), (rows.shape[1] + padding) // num_bytes, num_bytes)
    places = order or range(num_bytes * 8 // bits)
    values = [_extract(units, place * bits, bits) for place in places]
    return torch.stack(values, 2).flatten(1)


def count_weights(
    name: str, shape: tuple[int, ...], words: str, others: tuple[str, ...], bits: int
) -> int | None:
    """Return the number of weights in a tensor of a packed format: 0 if its suffix is in `others`, None if
    the tensor does not belong to the format. `words` is the suffix of tensors with values."""
    end = name.rpartition(".")[2]
    if end == words:
        return prod(shape) * 32 // bits
    return 0 if end in others else None


def _extract(units: Tensor, first_bit: int, bits: int) -> Tensor:
    """Return the value at `first_bit` of each unit, uint8 [num_rows, num_units, num_bytes]."""
    index, shift = divmod(first_bit, 8)
    value = units[:, :, index] >> shift
    if shift + bits > 8:
        value |= units[:, :, index + 1] << (8 - shift)
    return value & ((1 << bits) - 1)
