"""A child that cannot be started."""

import os

import pytest

from tgis.child import Child


async def test_a_start_that_fails_leaves_no_descriptor_open() -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(ValueError, match="null byte"):
            await Child("nobody", ["\0"], beats=True).start()
    assert len(os.listdir("/proc/self/fd")) <= len(before)
