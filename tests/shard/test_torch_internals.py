"""Private parts of torch that `torch_internals.py` uses. `test_collectives.py` connects groups with them."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tgis.shard.torch_internals import ForbidOperators, TorchOperatorError, connect_gloo, has_forward_hooks

MOVED = f"torch {torch.__version__} is not what tgis/shard/torch_internals.py was checked with"


def test_options_of_gloo() -> None:
    options = {"_timeout", "_devices"} - {*dir(dist.ProcessGroupGloo._Options)}
    assert not options, f"{MOVED}: ProcessGroupGloo._Options has no {options}"
    timeout = timedelta(seconds=7)
    group = connect_gloo(dist.HashStore(), 0, 1, timeout, "127.0.0.1")
    assert group.options._timeout == timeout, MOVED
    group.shutdown()


def test_only_views_are_allowed() -> None:
    x = torch.zeros(4)
    with ForbidOperators():  # type: ignore[no-untyped-call]
        assert x.view(2, 2).shape == (2, 2), MOVED
        with pytest.raises(TorchOperatorError, match=r"aten\.add"):
            x + 1
        with pytest.raises(TorchOperatorError, match=r"aten\.zero_"):
            x.zero_()


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_found(register: str) -> None:
    linear = nn.Linear(1, 1)
    assert not has_forward_hooks(linear), MOVED
    getattr(linear, register)(print)
    assert has_forward_hooks(linear), MOVED


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built for CPUs alone")
def test_parts_for_gpus_exist() -> None:
    names = {"_cuda_endAllocateToPool", "_cuda_releasePool"} - {*dir(torch._C)}
    assert not names, f"{MOVED}: torch._C has no {names}"
    assert "timeout: datetime.timedelta" in str(dist.ProcessGroupNCCL.__init__.__doc__), MOVED
