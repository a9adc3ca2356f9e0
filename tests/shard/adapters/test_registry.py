"""Check which adapters a rank keeps while threads load, unload and read concurrently, and how errors
propagate."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

import pytest
import torch

from tgis.prompts.errors import MissingArtifactError
from tgis.shard.adapters import registry as contents_module
from tgis.shard.adapters.registry import LoadedAdapter, LoadedAdapters, LoadedPrompt
from tgis.shard.layers.lora import Adapter, LowRank

PROMPT, ADAPTER = LoadedPrompt(torch.ones(2, 4), torch.ones(0, 4)), Adapter({})


def read(digest: str) -> LoadedAdapter:
    return {"prompt": PROMPT, "adapter": ADAPTER}[digest]


def test_each_digest_has_its_own_kind() -> None:
    adapters = LoadedAdapters(read)
    assert adapters.prompt("prompt") is None
    adapters.load("prompt")
    adapters.load("adapter")
    assert (adapters.prompt("prompt"), adapters.adapter("prompt")) == (PROMPT, None)
    assert (adapters.prompt("adapter"), adapters.adapter("adapter")) == (None, ADAPTER)
    assert (adapters.prompt(""), adapters.adapter("")) == (None, None)
    adapters.unload(["prompt", "unknown"])
    assert adapters.prompt("prompt") is None
    adapters.load("prompt")
    adapters.unload_others(["prompt", "unknown"])
    assert (adapters.prompt("prompt"), adapters.adapter("adapter")) == (PROMPT, None)
    adapters.unload_others([])
    assert adapters.prompt("prompt") is None


def test_unloaded_memory_is_returned_to_the_system_periodically(monkeypatch: pytest.MonkeyPatch) -> None:
    part = LowRank(torch.ones(8, 2), torch.ones(2, 8), 0)  # 128 bytes
    made = {
        "prompt": LoadedPrompt(torch.ones(2, 4), torch.ones(4, 4)),
        "adapter": Adapter({"a": (part, part)}),
    }
    released: list[int] = []
    monkeypatch.setattr(contents_module, "RELEASE_BYTES", 96 + 256)
    monkeypatch.setattr(contents_module, "release_memory", lambda: released.append(1))
    adapters = LoadedAdapters(lambda digest: made[digest])
    for _ in range(2):
        for digest in made:
            adapters.load(digest)
        num_released = len(released)
        adapters.unload(["prompt", "unknown"])
        assert len(released) == num_released
        adapters.unload(["adapter"])
        assert len(released) == num_released + 1


class Reader:
    """A reader that counts its calls and blocks until `go` is set."""

    def __init__(self) -> None:
        self.count, self.go, self.error = 0, threading.Event(), None

    def __call__(self, digest: str) -> LoadedAdapter:
        self.count += 1
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error
        return PROMPT


def load_at_once(adapters: LoadedAdapters, reader: Reader, count: int) -> list[BaseException | None]:
    with ThreadPoolExecutor(count) as threads:
        loads = [threads.submit(adapters.load, "one") for _ in range(count)]
        while not reader.count:
            time.sleep(0.001)
        reader.go.set()
        return [load.exception() for load in loads]


def test_loads_at_once_read_once() -> None:
    reader = Reader()
    adapters = LoadedAdapters(reader)
    assert load_at_once(adapters, reader, 8) == [None] * 8
    assert (reader.count, adapters.prompt("one")) == (1, PROMPT)
    adapters.load("one")
    assert reader.count == 1


def test_an_error_reaches_all_waiting_calls_and_no_later_one() -> None:
    reader = Reader()
    adapters, reader.error = LoadedAdapters(reader), OSError("no disk")
    errors = load_at_once(adapters, reader, 4)
    assert all(isinstance(error, OSError) for error in errors)
    assert adapters.prompt("one") is None
    reader.error = None
    adapters.load("one")
    assert adapters.prompt("one") is PROMPT


def test_another_is_loaded_while_one_hangs() -> None:
    slow = threading.Event()

    def wait_for_one(digest: str) -> LoadedAdapter:
        if digest == "slow":
            assert slow.wait(10)
        return PROMPT

    adapters = LoadedAdapters(wait_for_one)
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(adapters.load, "slow")
        adapters.load("fast")
        assert adapters.prompt("fast") is PROMPT
        adapters.unload_others(["slow"])
        slow.set()
        hanging.result(10)
        assert adapters.prompt("fast") is None
        assert adapters.prompt("slow") is PROMPT


def test_many_threads_agree_with_the_last_word() -> None:
    adapters = LoadedAdapters(lambda digest: LoadedPrompt(torch.full((1, 1), int(digest)), torch.empty(0, 1)))

    def work(seed: int) -> None:
        rng, mine = random.Random(seed), f"{seed}"
        for _ in range(300):
            adapters.load(mine)
            result = adapters.prompt(mine)
            assert result is not None
            assert int(result.decoder) == seed
            adapters.unload([mine])
            assert adapters.prompt(mine) is None
            adapters.unload_others([str(i) for i in range(4)])
            if rng.random() < 0.1:
                with suppress(MissingArtifactError):  # the others unload it
                    adapters.load("9")

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, seed) for seed in range(4)]:
            done.result(20)


@pytest.mark.parametrize("others", [False, True])
def test_an_adapter_unloaded_while_it_is_read_is_not_kept(others: bool) -> None:
    """Check that a load whose caller gave up is not kept, because nobody would unload it.

    A later load reads the adapter again."""
    entered, gates = SimpleQueue[None](), [threading.Event(), threading.Event()]
    waiting = iter(gates)

    def read_slowly(digest: str) -> LoadedAdapter:
        gate = next(waiting)
        entered.put(None)
        assert gate.wait(10)
        return PROMPT

    adapters = LoadedAdapters(read_slowly)
    with ThreadPoolExecutor(2) as threads:
        stray = threads.submit(adapters.load, "slow")
        entered.get(timeout=10)
        if others:
            adapters.unload_others(["fast"])
        else:
            adapters.unload(["slow"])
        wanted = threads.submit(adapters.load, "slow")
        entered.get(timeout=10)
        gates[0].set()
        assert isinstance(stray.exception(10), MissingArtifactError)
        assert adapters.prompt("slow") is None
        gates[1].set()
        wanted.result(10)
    assert adapters.prompt("slow") is PROMPT


@pytest.mark.parametrize("error", [KeyError("x"), MemoryError()])
def test_errors_of_reading_are_raised(error: Exception) -> None:
    def fail(digest: str) -> LoadedAdapter:
        raise error

    with pytest.raises(type(error)):
        LoadedAdapters(fail).load("x")
