"""Checks that priorities and tenants reach the scheduler, also of an engine in another process."""

import asyncio
from pathlib import Path

import pytest

from tests.support.router.engine_pair import each_of, open_scene
from tgis.router.engine.handle import SequenceSpec
from tgis.router.sequence import CacheSalt, Stopping

ARRIVALS = [("a", 3, "last"), ("a", 0, "third"), ("a", 0, "fifth"), ("b", 0, "fourth"), ("b", -2, "second")]
PROMPT = tuple(range(300))
"""More tokens than those of a turn."""


@pytest.mark.parametrize("is_split", [False, True])
async def test_one_row_serves_the_waiting_sequences_in_order(is_split: bool, tmp_path: Path) -> None:
    ended = list[str]()
    async with open_scene(tmp_path, is_split, max_sequence_length=400, max_batch_size=1) as scene:
        claim_id = await scene.handle.acquire(len(ARRIVALS) + 1)

        def start(tenant: str, priority: int, name: str) -> asyncio.Task[None]:
            spec = SequenceSpec(
                (len(name), ord(name[1]), *PROMPT),
                Stopping(2, min_new_tokens=2),
                cache_salt=CacheSalt(tenant),
                priority=priority,
            )
            events = each_of(scene.handle.events(scene.handle.open(claim_id, spec, None)))

            async def read() -> None:
                async for _ in events:
                    pass
                ended.append(name)

            return asyncio.create_task(read())

        scene.shard.step_s = 0.3
        tasks = [start("a", 0, "first")]
        await asyncio.sleep(0.15)  # until it runs
        tasks += [start(*arrival) for arrival in ARRIVALS]
        await asyncio.sleep(0.1)
        scene.shard.step_s = 0.001
        await asyncio.gather(*tasks)
        scene.handle.release(claim_id)
    assert ended == ["first", "second", "third", "fourth", "fifth", "last"]
