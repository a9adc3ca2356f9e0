"""Check copies to a late device: later writes on the host must not change pending copies."""

import numpy as np
import torch

from tests.support.cuda.late_device import LateDevice
from tgis.shard.runner.device.uploads import NUM_SLOTS, Uploads, view_arrays


def test_arrays_arrive_as_they_were() -> None:
    """Check more copies than slots, of any size, without waiting; the last ones are larger than a slot."""
    device, rng = LateDevice(), np.random.default_rng(1)
    uploads, sent = Uploads(device, num_words=64), []
    for i in range(5 * NUM_SLOTS):
        shapes = [(3,), (0, 5), (int(rng.integers(9)), 2), (i + 1,)]
        arrays = [rng.integers(-(2**31), 2**31, shape).astype(np.int32) for shape in shapes]
        copies = [array.copy() for array in arrays]
        sent.append((copies, uploads.send(arrays)))
        for array in arrays:
            array[...] = -7
    assert device.max_queued == NUM_SLOTS
    device.finish()
    for arrays, tensors in sent:
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.shape == array.shape
            assert tensor.tolist() == array.tolist()
            assert tensor.data_ptr() % 16 == 0 or not tensor.numel()


def test_memory_that_is_given() -> None:
    device = LateDevice()
    uploads, memory = Uploads(device, num_words=8), torch.full((12,), -1, dtype=torch.int32)
    arrays = [np.arange(3, dtype=np.int32), np.arange(4, 8, dtype=np.int32).reshape(2, 2)]
    uploads.send_to(memory, arrays)
    assert memory.tolist() == [-1] * 12
    device.finish()
    result = view_arrays(memory, [(3,), (2, 2)])
    assert [tensor.tolist() for tensor in result] == [[0, 1, 2], [[4, 5], [6, 7]]]
    assert memory[8:].tolist() == [-1] * 4
