"""Check the stand-in for CUDA graphs: replays read current memory, and what a GPU refuses fails."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tests.support.cuda.fake_graph import FakeStream

with triton.knobs.runtime.scope():
    triton.knobs.runtime.interpret = True

    @triton.jit
    def add_scaled(x, y, scale, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + i, tl.load(y + i, mask=i < n) + scale * tl.load(x + i, mask=i < n), mask=i < n)


def compute(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """Compute with views, broadcasts, several results, in-place operators, casts, gathers, new memory and
    numbers."""
    y = F.silu(F.linear(x, weight)).reshape(-1).view(len(x), -1)
    y = torch.where(y > 0, y, 0.5)
    highest, best = y.max(-1)
    one, other = y.chunk(2, -1)
    y = torch.cat((one.contiguous(), other * highest[:, None]), -1)
    y[:, :1] += best[:, None] * 2
    y[:1] = 0.25
    y[index] = y[index.flip(0)].half().float()
    taken = torch.empty(len(x)).fill_(3.0)
    y.transpose(0, 1).add_(taken)
    return y.softmax(-1).cumsum(-1) + torch.arange(y.shape[1])


def test_a_replay_follows_memory() -> None:
    torch.manual_seed(0)
    x, weight, out, total = (
        torch.randn(3, 4),
        torch.randn(6, 4),
        torch.full((3, 6), torch.nan),
        torch.zeros(3),
    )
    index = torch.tensor([0, 2])

    def work() -> None:
        with torch.inference_mode():
            y = compute(x, weight, index)
            out.copy_(y)
            total.add_(y.sum(-1))

    expected = compute(x, weight, index).sum(-1)
    graph = FakeStream().capture(work)
    assert total.equal(expected), "the work ran once"
    for _ in range(3):
        x.normal_()
        index.random_(3)
        expected = compute(x, weight, index)
        sums = total + expected.sum(-1)
        graph.replay()
        assert out.equal(expected)
        assert total.equal(sums)


def test_a_replay_keeps_numbers() -> None:
    factors = iter((1.0, 2.0, 3.0))
    x, out = torch.ones(2), torch.zeros(2)
    graph = FakeStream().capture(lambda: out.copy_(x * next(factors)))
    graph.replay()
    graph.replay()
    assert out.tolist() == [2, 2], "the number of the second run, which is captured"


def test_kernels_are_launched_by_a_replay_alone() -> None:
    x, y = torch.arange(10.0), torch.zeros(10)

    def work() -> None:
        doubled = torch.empty_like(x)
        doubled.copy_(x)
        add_scaled[(3,)](x, doubled, 1.0, 10, BLOCK=4)
        add_scaled[(3,)](doubled, y, 10.0, 10, BLOCK=4)

    graph = FakeStream().capture(work)
    assert y.equal(20 * torch.arange(10.0)), "the capture launched none"
    y.zero_()
    x.add_(1)
    graph.replay()
    assert y.equal(20 * (torch.arange(10.0) + 1))


def test_memory_of_graphs_holds_nothing_between_replays() -> None:
    stream, out = FakeStream(), torch.zeros(4)
    made: list[Tensor] = []

    def keep_memory() -> None:
        made.append(torch.empty(4))
        made[-1].fill_(1.0)

    first = stream.capture(keep_memory)
    second = stream.capture(lambda: out.copy_(torch.empty(4)))
    first.replay()
    assert made[-1].tolist() == [1, 1, 1, 1], "valid until another replay"
    second.replay()
    assert made[-1].isnan().all(), "another replay may have taken it"
    assert out.isnan().all(), "new memory holds anything"


def test_integers_of_stale_memory_are_no_index() -> None:
    stream, x, out = FakeStream(), torch.zeros(3), torch.zeros(1)
    graph = stream.capture(lambda: out.copy_(x[torch.empty(1, dtype=torch.int64)]))
    with pytest.raises(IndexError):
        graph.replay()


def test_fixed_memory_must_stay() -> None:
    class Owner:
        x = torch.ones(4)

    owner, out = Owner(), torch.zeros(4)
    graph = FakeStream().capture(lambda: out.copy_(owner.x * 2))
    graph.replay()
    Owner.x = torch.ones(4)
    with pytest.raises(AssertionError, match="was freed"):
        graph.replay()
    x = torch.ones(4)
    graph = FakeStream().capture(lambda: out.copy_(x * 2))
    x.untyped_storage().resize_(1 << 16)
    with pytest.raises(AssertionError, match="has moved"):
        graph.replay()


X, INDEX = torch.arange(12.0).view(3, 4), torch.tensor([0, 2, 1])

REFUSED: dict[str, Callable[[], object]] = {
    "item": lambda: X.max().item(),
    "truth": lambda: bool(X[0, 0] > 1),
    "index of a list": lambda: [1, 2, 3][INDEX[0]],
    "index of a tensor on the host": lambda: X[int(INDEX[0])],
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "array": lambda: np.asarray(X),
    "cpu": lambda: X.cpu(),
    "equal": lambda: torch.equal(X, X),
    "mask that selects": lambda: X[X > 0],
    "mask that stores": lambda: X.index_put_((X > 1,), X[0, 0]),
    "masked_select": lambda: X.masked_select(X > 0),
    "nonzero": lambda: X.nonzero(),
    "unique": lambda: X.unique(),
    "bincount": lambda: INDEX.bincount(),
    "repeats": lambda: X.repeat_interleave(INDEX, 0),
    "random numbers": lambda: torch.rand(3),
    "multinomial": lambda: X.multinomial(1),
    "tensor of a list": lambda: X[0, :3] * torch.tensor([1.0, 2.0, 3.0]),
    "tensor of an array": lambda: X[0, :3] * torch.from_numpy(np.ones(3, np.float32)),
    "number at several places": lambda: X.clone().__setitem__(INDEX, 0.0),
    "number at one place": lambda: X.clone().__setitem__((0, 0), 7.0),
    "tensor of a number": lambda: X * torch.tensor(2.0),
    "resized": lambda: torch.empty(3).resize_(4),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad], ids=["inference", "no_grad"])
def test_synchronizing_operations_are_refused(name: str, mode: Callable[[], torch.no_grad]) -> None:
    def work() -> None:
        with mode():
            REFUSED[name]()

    with pytest.raises(RuntimeError, match="captured work"):
        FakeStream().capture(work)


def test_the_first_run_may_allocate_lasting_memory() -> None:
    kept: dict[str, Tensor] = {}
    x, out = torch.arange(3.0), torch.zeros(3)

    def work() -> None:
        if not kept:
            kept["weights"] = x.double()
        out.copy_(kept["weights"] * 2)

    graph = FakeStream().capture(work)
    kept["weights"].add_(1)
    graph.replay()
    assert out.tolist() == [2, 4, 6]
    kept.clear()
    with pytest.raises(AssertionError, match="was freed"):
        graph.replay()


def test_memory_that_only_one_run_has_is_refused() -> None:
    out, given = torch.zeros(3), [torch.ones(3), torch.ones(3)]
    with pytest.raises(RuntimeError, match="not the same in each run"):
        FakeStream().capture(lambda: out.copy_(given.pop() * 2))
