"""Numbers that are hard to round to 8-bit floats, and torch's own rounding."""

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
HEAD_DIM = 64


def all_codes(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def finite_codes(dtype: torch.dtype) -> Tensor:
    codes = all_codes(dtype)
    return codes[codes.isfinite()]


def hard_numbers(dtype: torch.dtype) -> Tensor:
    """Return every bfloat16, every number of the type, and the midpoints between them with their
    neighbours."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    exact = finite_codes(dtype).sort().values
    between = (exact[1:] + exact[:-1]) / 2
    infinity = torch.tensor(torch.inf)
    borders = [between, between.nextafter(infinity), between.nextafter(-infinity)]
    result = torch.cat([every, exact, *borders, torch.tensor([1e-40, -1e-40, 449.0, 464.0, 465.0, 6e4, 7e4])])
    return torch.cat([result, torch.zeros(-len(result) % HEAD_DIM)])


def round_as_torch(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the codes of torch's own rounding, which does not saturate."""
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).view(torch.uint8)
