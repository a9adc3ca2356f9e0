"""Unpacks integers of 2, 3, 4 or 8 bits from words of 32 bits. They lie one after the other from the lowest
bit of the first word on; of 3 bits, some lie across two words."""

from collections.abc import Callable, Sequence
from math import gcd, prod

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = (2, 3, 4, 8)


def count_words(num_values: int, bits: int) -> int:
    return -(-num_values * bits // 32)


def read_values(read: Callable[[range], Tensor], bits: int, part: range, order: Sequence[int] = ()) -> Tensor:
    """Return the values `part`, uint8 [num_rows, num_values]. `read` returns words, int32 [num_rows,
    num_words]."""
    period = 32 // gcd(32, bits)  # values after which a word begins
    first = part.start // period
    last = -(-part.stop // period)
    words = read(range(first * bits * period // 32, last * bits * period // 32))
    values = unpack(words, bits, order)
    return values[:, part.start - first * period :][:, : len(part)]


def unpack(words: Tensor, bits: int, order: Sequence[int] = ()) -> Tensor:
    """Unpack all values of words, int32 [num_rows, num_words] -> uint8 [num_rows, num_values]. With an order,
    value i of a word is in its place `order[i]`."""
    num_bytes = 4 if order else bits // gcd(bits, 8)  # after as many, a value begins with a byte again
    # The lowest byte comes first, on all processors that we serve on.
    rows = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    padding = -rows.shape[1] % num_bytes
    units = F.pad(rows, (0, padding)).view(len(rows), (rows.shape[1] + padding) // num_bytes, num_bytes)
    places = order or range(num_bytes * 8 // bits)
    values = [_extract(units, place * bits, bits) for place in places]
    return torch.stack(values, 2).flatten(1)


def count_weights(
    name: str, shape: tuple[int, ...], words: str, others: tuple[str, ...], bits: int
) -> int | None:
    """Return the weights in a tensor of a format whose words have a name that ends with `words`: 0 for
    `others`, None for a tensor that is not of the format."""
    end = name.rpartition(".")[2]
    if end == words:
        return prod(shape) * 32 // bits
    return 0 if end in others else None


def _extract(units: Tensor, first_bit: int, bits: int) -> Tensor:
    """Return the value that begins at a bit of each unit, uint8 [num_rows, num_units, num_bytes]."""
    index, shift = divmod(first_bit, 8)
    value = units[:, :, index] >> shift
    if shift + bits > 8:
        value |= units[:, :, index + 1] << (8 - shift)
    return value & ((1 << bits) - 1)
