"""Kernels with known results and machine code, for tests of the tools. They are plain functions, because
`triton.jit` chooses between compiler and interpreter when it is called."""

import triton
import triton.language as tl


def copy(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


def multiply(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(left, right))


def count(number, total):  # type: ignore[no-untyped-def]
    result = 0
    for i in range(tl.load(number)):
        result += i
    tl.store(total, result)


def interpreted(function: object) -> object:
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        return triton.jit(function)
