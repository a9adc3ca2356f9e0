"""The store returns the current content of an id's files; it reads them once, and again after a change."""

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.prompt_files import (
    REQUIRED,
    WIDTH,
    age,
    bounded_memory,
    random_prompt,
    save_config,
    save_lora,
    save_prompt,
)
from tgis.prompts import snapshot, store
from tgis.prompts.artifact_cache import ArtifactCache, Kind
from tgis.prompts.errors import AdapterError
from tgis.prompts.lora_files import read_adapter_files
from tgis.prompts.soft_prompt import AdapterRequirements
from tgis.prompts.store import AdapterStore, ArtifactInfo

MIB = 1 << 20


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "prompts").mkdir()
    return tmp_path / "prompts"


@pytest.fixture
def artifacts(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "artifacts")


@pytest.fixture
def adapter_store(prompts: Path, artifacts: ArtifactCache) -> AdapterStore:
    return AdapterStore(artifacts, REQUIRED, prompts, None, {})


class CountingCache(ArtifactCache):
    """Cache that counts the copies, and thereby the reads."""

    num_put = 0

    def put(self, *arguments: object) -> str:
        self.num_put += 1
        return super().put(*arguments)  # type: ignore[arg-type]


@pytest.fixture
def counting(tmp_path: Path) -> CountingCache:
    return CountingCache(tmp_path / "artifacts")


def refuse(store: AdapterStore, kind: Kind, id: str) -> str:
    with pytest.raises(AdapterError) as caught:
        store.find(kind, id)
    return str(caught.value)


def prompt_text(id: str, cause: str) -> str:
    return f"can't retrieve prompt prefix with id '{id}': {cause}"


def not_found(id: str) -> str:
    return prompt_text(id, f'prefix id "{id}" not found')


def decoder(artifacts: ArtifactCache, one: ArtifactInfo) -> Tensor:
    return artifacts.open(one.digest).tensors["decoder"]


def test_finds_a_prompt(prompts: Path, artifacts: ArtifactCache) -> None:
    required = replace(REQUIRED, is_encoder_decoder=True, dtype=torch.bfloat16)
    both = save_prompt(prompts / "both", random_prompt(4, seed=1).double(), "encoder.pt")
    save_prompt(both, random_prompt(2))
    shutil.copytree(both, prompts / "copy")
    store = AdapterStore(artifacts, required, prompts, None, {})
    one = store.find("prompt", "both")
    assert one == ArtifactInfo("prompt", one.digest, 2, 4, 2 * 512)
    kept = artifacts.open(one.digest)
    assert (kept.kind, dict(kept.about)) == ("prompt", {})
    assert torch.equal(kept.tensors["decoder"], random_prompt(2).bfloat16())
    assert torch.equal(kept.tensors["encoder"], random_prompt(4, seed=1).bfloat16())
    assert store.find("prompt", "copy") == one
    save_prompt(prompts / "large", torch.ones(16, WIDTH), "encoder.pt")
    assert store.find("prompt", "large").num_bytes == 512
    wide = AdapterStore(artifacts, replace(required, prompt_width=33), prompts, None, {})
    save_prompt(prompts / "wide", torch.ones(8, 33), "encoder.pt")
    assert wide.find("prompt", "wide").num_bytes == 1024


def test_finds_an_adapter_in_either_store(tmp_path: Path, prompts: Path, artifacts: ArtifactCache) -> None:
    adapters, elsewhere = tmp_path / "adapters", tmp_path / "hub" / "blobs"
    expected = {
        name: save_lora(path, seed)
        for seed, (name, path) in enumerate(
            {
                "a": adapters / "a",
                "b": prompts / "b",
                "both": adapters / "both",
                "org/name": elsewhere,
            }.items()
        )
    }
    save_lora(prompts / "both", 99)
    save_lora(adapters / "linked", 98)
    snapshot_of = tmp_path / "hub" / "snapshot"
    snapshot_of.mkdir()
    for file in elsewhere.iterdir():
        (snapshot_of / file.name).symlink_to(Path("../blobs") / file.name)
    store = AdapterStore(
        artifacts,
        REQUIRED,
        prompts,
        adapters,
        {"org/name": snapshot_of, "linked": snapshot_of, "gone": tmp_path / "no"},
    )
    for id, directory in expected.items():
        tensors, scales = read_adapter_files(directory, MIB)
        one = store.find("adapter", id)
        assert one == ArtifactInfo("adapter", one.digest, 0, 0, 2 * 512)
        kept = artifacts.open(one.digest)
        assert (kept.kind, kept.about) == ("adapter", {"scales": scales})
        assert kept.tensors.keys() == tensors.keys()
        assert all(torch.equal(kept.tensors[name], tensor) for name, tensor in tensors.items())
    assert store.find("adapter", "linked") == store.find("adapter", "org/name")
    assert store.find("prompt", "b") == store.find("adapter", "b")
    assert refuse(store, "prompt", "a") == not_found("a")
    assert (
        refuse(store, "adapter", "gone") == "can't retrieve adapter with id 'gone': directory does not exist"
    )


def test_error_texts_of_bad_prompts(prompts: Path, adapter_store: AdapterStore) -> None:
    save_prompt(prompts / "nan", torch.full((2, WIDTH), torch.nan))
    assert refuse(adapter_store, "prompt", "nan") == prompt_text("nan", "Prefix contains non-finite elements")
    save_lora(prompts / "dora")
    save_config(prompts / "dora", peft_type="LORA", use_dora=True)
    for kind, start in (("prompt", "prompt prefix"), ("adapter", "adapter")):
        text = refuse(adapter_store, kind, "dora")  # type: ignore[arg-type]
        assert text.startswith(f"can't retrieve {start} with id 'dora': weight-decomposed LoRA (DoRA)")
    for name in ("ia3", "tuning"):
        save_lora(prompts / name)
    save_config(prompts / "ia3", peft_type="IA3")
    save_config(prompts / "tuning", peft_type="PROMPT_TUNING")
    for kind, id, peft_type in (
        ("prompt", "ia3", "IA3"),
        ("adapter", "ia3", "IA3"),
        ("adapter", "tuning", "PROMPT_TUNING"),
    ):
        assert refuse(adapter_store, kind, id) == f"adapter type {peft_type} is not currently supported"  # type: ignore[arg-type]


def test_too_large_prompts_and_adapters(prompts: Path, artifacts: ArtifactCache) -> None:
    save_prompt(prompts / "a", random_prompt(16))
    save_lora(prompts / "lora", rank=4)
    large = AdapterStore(
        artifacts, replace(REQUIRED, max_prompt_bytes=512, max_adapter_bytes=1024), prompts, None, {}
    )
    small = AdapterStore(
        artifacts, replace(REQUIRED, max_prompt_bytes=511, max_adapter_bytes=1023), prompts, None, {}
    )
    assert large.find("prompt", "a").num_bytes == 512
    assert large.find("adapter", "lora").num_bytes == 1024
    assert refuse(small, "prompt", "a") == prompt_text(
        "a", "Prefix ID object a exceeds the allowed cache size"
    )
    cause = "adapter lora exceeds the allowed cache size"
    assert refuse(small, "adapter", "lora") == f"can't retrieve adapter with id 'lora': {cause}"
    for kind, id, name in (("prompt", "a", "decoder.pt"), ("adapter", "lora", "adapter_model.safetensors")):
        with (prompts / id / name).open("r+b") as file, bounded_memory(16 * MIB):
            file.truncate(10 << 30)
            assert "exceeds the allowed cache size" in refuse(small, kind, id)  # type: ignore[arg-type]


def test_copies_of_the_models_tables_are_not_kept_loaded(prompts: Path, artifacts: ArtifactCache) -> None:
    """They need no memory in a rank, but they make the file larger, which is limited."""
    path = save_lora(prompts / "a")
    stored = load_file(path / "adapter_model.safetensors")
    table = {"base_model.model.model.embed_tokens.base_layer.weight": torch.ones(64, WIDTH)}
    save_file(stored | table, path / "adapter_model.safetensors")
    store = AdapterStore(artifacts, replace(REQUIRED, max_adapter_bytes=1024), prompts, None, {})
    one = store.find("adapter", "a")
    assert one.num_bytes == 1024
    assert "model.embed_tokens.base" in artifacts.open(one.digest).tensors
    vast = {name: torch.ones(MIB + 4096, WIDTH) for name in table}
    save_file(stored | vast, path / "adapter_model.safetensors")
    assert "exceeds the allowed cache size" in refuse(store, "adapter", "a")


def test_a_model_that_takes_neither(prompts: Path, artifacts: ArtifactCache) -> None:
    save_lora(save_prompt(prompts / "a", random_prompt()))
    store = AdapterStore(artifacts, None, prompts, None, {})
    cause = "soft prompts and adapters need the service's own engine, which does not run this model"
    assert refuse(store, "prompt", "a") == prompt_text("a", cause)
    assert refuse(store, "adapter", "a") == f"can't retrieve adapter with id 'a': {cause}"
    assert refuse(store, "prompt", "b") == not_found("b")
    store = AdapterStore(artifacts, None, prompts, None, {}, is_known=True)
    cause = "soft prompts and adapters need the service's own engine: leave DEPLOYMENT_FRAMEWORK unset"
    assert refuse(store, "prompt", "a") == prompt_text("a", cause)


CHANGES: list[Callable[[Path], object]] = [
    lambda path: save_prompt(path, random_prompt(seed=1)),
    lambda path: os.replace(save_prompt(path, random_prompt(seed=1), "new") / "new", path / "decoder.pt"),
    lambda path: (shutil.rmtree(path), save_prompt(path, random_prompt(seed=1))),
    lambda path: save_prompt(path, {"prompt_embeddings": random_prompt(seed=1)}, "adapter_model.bin"),
    lambda path: (path.rename(path.with_name("old")), save_prompt(path, random_prompt(seed=1))),
]


@pytest.mark.parametrize("is_old", [True, False], ids=["old", "fresh"])
@pytest.mark.parametrize("change", CHANGES, ids=["written", "replaced", "made anew", "hidden", "renamed"])
def test_a_change_is_noticed(
    change: Callable[[Path], object],
    is_old: bool,
    prompts: Path,
    adapter_store: AdapterStore,
    artifacts: ArtifactCache,
) -> None:
    path = save_prompt(prompts / "a", random_prompt())
    if is_old:
        age(path)
    first = adapter_store.find("prompt", "a")
    before = os.stat(path / "decoder.pt")
    change(path)
    os.utime(path / "decoder.pt", ns=(before.st_atime_ns, before.st_mtime_ns))
    second = adapter_store.find("prompt", "a")
    assert torch.equal(decoder(artifacts, first), random_prompt())
    assert torch.equal(decoder(artifacts, second), random_prompt(seed=1))


def test_removed_adapters_are_not_found_until_they_return(
    prompts: Path, adapter_store: AdapterStore, artifacts: ArtifactCache
) -> None:
    path = age(save_prompt(prompts / "a", random_prompt()))
    one = adapter_store.find("prompt", "a")
    (path / "decoder.pt").rename(path / "decoder.pt.swp")
    assert refuse(adapter_store, "prompt", "a") == not_found("a")
    (path / "decoder.pt.swp").rename(path / "decoder.pt")
    assert adapter_store.find("prompt", "a") == one
    shutil.rmtree(path)
    assert refuse(adapter_store, "prompt", "a") == not_found("a")
    assert torch.equal(decoder(artifacts, one), random_prompt()), "running requests go on with it"


def test_reads_once_and_again_when_the_copy_is_gone(prompts: Path, counting: CountingCache) -> None:
    store = AdapterStore(counting, REQUIRED, prompts, None, {})
    age(save_prompt(prompts / "a", random_prompt()))
    one = store.find("prompt", "a")
    assert [store.find("prompt", "a") for _ in range(3)] == [one] * 3
    assert counting.num_put == 1
    counting.remove([one.digest])
    assert store.find("prompt", "a") == one
    assert counting.num_put == 2
    assert torch.equal(decoder(counting, one), random_prompt())


def test_a_refusal_is_remembered_until_the_files_change(
    prompts: Path, adapter_store: AdapterStore, caplog: pytest.LogCaptureFixture
) -> None:
    path = prompts / "a"
    path.mkdir()
    (path / "decoder.pt").write_bytes(b"no tensor")
    age(path)
    for _ in range(3):
        assert refuse(adapter_store, "prompt", "a") == prompt_text("a", "Invalid prefix embedding tensor")
    [line] = (record for record in caplog.records if record.name == store.__name__)
    assert f"{path / 'decoder.pt'} cannot be read" in line.getMessage()
    save_prompt(path, random_prompt())
    assert adapter_store.find("prompt", "a").num_decoder_tokens == 4


def test_a_refusal_by_the_model_is_remembered_until_the_files_change(
    prompts: Path, counting: CountingCache, caplog: pytest.LogCaptureFixture
) -> None:
    store = AdapterStore(counting, REQUIRED, prompts, None, {})
    for id, seed in (("a", 0), ("same", 0), ("other", 1)):
        save_lora(prompts / id, seed)
    age(save_prompt(prompts / "prompt", random_prompt()))
    for id in ("a", "same", "other"):
        age(prompts / id)
    kinds: tuple[Kind, Kind] = ("prompt", "adapter")
    one, other = (store.find("adapter", id) for id in ("a", "other"))
    assert store.find("prompt", "a") == store.find("adapter", "same") == one
    num_put = counting.num_put
    store.refuse(one.digest, AdapterError("it is for another model"))
    counting.remove([one.digest])
    for _ in range(2):
        for kind, id in ((kinds[0], "a"), (kinds[1], "a"), (kinds[1], "same")):
            start = "prompt prefix" if kind == "prompt" else "adapter"
            text = f"can't retrieve {start} with id '{id}': it is for another model"
            assert refuse(store, kind, id) == text
        assert store.find("adapter", "other") == other
    assert counting.num_put == num_put
    assert len([record for record in caplog.records if "is refused" in record.getMessage()]) == 3
    save_lora(prompts / "a", 2)
    assert store.find("adapter", "a").digest not in (one.digest, other.digest)
    assert "another model" in refuse(store, "adapter", "same")


def test_waiting_for_a_hanging_look_up_times_out(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, entered = threading.Event(), threading.Event()

    class HangingCache(ArtifactCache):
        def put(self, *arguments: object) -> str:
            entered.set()
            assert gate.wait(10)
            return super().put(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "TURN_TIMEOUT_S", 0.05)
    adapter_store = AdapterStore(HangingCache(tmp_path / "artifacts"), REQUIRED, prompts, None, {})
    save_prompt(prompts / "a", random_prompt())
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(adapter_store.find, "prompt", "a")
        assert entered.wait(10)
        assert refuse(adapter_store, "prompt", "a") == prompt_text("a", "Timeout expired")
        gate.set()
        assert adapter_store.find("prompt", "a") == first.result()
    assert not adapter_store._turns


def test_the_second_store_is_searched_only_if_the_first_lacks_the_id(
    tmp_path: Path, prompts: Path, artifacts: ArtifactCache
) -> None:
    adapters, outside = tmp_path / "adapters", save_lora(tmp_path / "outside", 1)
    adapter_store = AdapterStore(artifacts, REQUIRED, prompts, adapters, {})
    ids = ("escapes", "dangles", "loops/a", "empty", "file", "dir/a")
    for id in ids:
        save_lora(prompts / id)
        assert adapter_store.find("adapter", id).kind == "adapter", "there is no directory of adapters at all"
    adapters.mkdir()
    (adapters / "escapes").symlink_to(outside)
    (adapters / "dangles").symlink_to("nowhere")
    (adapters / "loops").symlink_to("loops")
    (adapters / "file").touch()
    (adapters / "empty").mkdir()
    (adapters / "dir").touch()
    for id in ("escapes", "dangles", "loops/a", "file"):
        text = f"can't retrieve adapter with id '{id}': directory does not exist"
        assert refuse(adapter_store, "adapter", id) == text
    assert "no adapter_config.json found" in refuse(adapter_store, "adapter", "empty")
    assert adapter_store.find("adapter", "dir/a").kind == "adapter"


def test_a_clock_that_is_ahead_is_never_trusted(
    prompts: Path, counting: CountingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = AdapterStore(counting, REQUIRED, prompts, None, {})
    age(save_prompt(prompts / "a", random_prompt()))
    now_ns = snapshot.time.time_ns
    monkeypatch.setattr(snapshot.time, "time_ns", lambda: now_ns() - 3_600_000_000_000)
    assert store.find("prompt", "a") == store.find("prompt", "a")
    assert counting.num_put == 2


def test_remembers_a_bounded_number(
    prompts: Path, counting: CountingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_REMEMBERED", 2)
    adapter_store = AdapterStore(counting, REQUIRED, prompts, None, {})
    for id in "abc":
        save_prompt(prompts / id, random_prompt(seed=ord(id)))
    age(prompts / "c")
    for id in "abaca":
        adapter_store.find("prompt", id)
    assert counting.num_put == 3
    adapter_store.find("prompt", "b")
    assert counting.num_put == 4
    assert len(adapter_store._remembered) == 2
    assert not adapter_store._turns


def test_threads_read_once(prompts: Path, counting: CountingCache) -> None:
    store = AdapterStore(counting, REQUIRED, prompts, None, {})
    for id in "ab":
        save_prompt(prompts / id, random_prompt(seed=ord(id)))
    start = threading.Barrier(8)

    def find(number: int) -> ArtifactInfo:
        start.wait()
        return store.find("prompt", "ab"[number % 2])

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(find, range(8)))
    assert counting.num_put == 2
    assert results == results[:2] * 4


def test_a_slow_one_does_not_hold_up_others(prompts: Path, tmp_path: Path) -> None:
    gate, entered = threading.Event(), threading.Event()

    class SlowCache(ArtifactCache):
        def put(self, kind: Kind, tensors: object, about: object) -> str:
            if len(tensors["decoder"]) == 2:  # type: ignore[index]
                entered.set()
                assert gate.wait(10)
            return super().put(kind, tensors, about)  # type: ignore[arg-type]

    store = AdapterStore(SlowCache(tmp_path / "artifacts"), REQUIRED, prompts, None, {})
    save_prompt(prompts / "slow", random_prompt(2))
    save_prompt(prompts / "other", random_prompt(3))
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(store.find, "prompt", "slow")
        assert entered.wait(10)
        assert store.find("prompt", "other").num_decoder_tokens == 3
        gate.set()
        assert slow.result().num_decoder_tokens == 2


def test_files_under_constant_writes_are_complete_or_refused(
    prompts: Path, adapter_store: AdapterStore, artifacts: ArtifactCache
) -> None:
    """All rows of one file are equal, and rows of two writes differ; the file is written in place, as by
    `cp`."""
    path = save_prompt(prompts / "a", torch.zeros(16, WIDTH))
    variants = []
    for value in range(2):
        save_prompt(prompts / "made", torch.full((16, WIDTH), float(value)))
        variants.append((prompts / "made" / "decoder.pt").read_bytes())
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for content in variants:
                with (path / "decoder.pt").open("r+b", buffering=0) as file:
                    for start in range(0, len(content), 256):
                        file.write(content[start : start + 256])
                stop.wait(0.03)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            with suppress(AdapterError):
                rows = decoder(artifacts, adapter_store.find("prompt", "a"))
                assert (rows == rows[0, 0]).all()
    finally:
        stop.set()
        writer.join()
    age(path)
    assert torch.equal(decoder(artifacts, adapter_store.find("prompt", "a")), torch.ones(16, WIDTH))


def test_directories_that_are_swapped_all_the_time(
    prompts: Path, adapter_store: AdapterStore, artifacts: ArtifactCache
) -> None:
    for version in range(2):
        save_prompt(prompts / f"v{version}", torch.full((16, WIDTH), float(version)))
    (prompts / "a").symlink_to("v0")
    stop = threading.Event()

    def swap() -> None:
        number = 0
        while not stop.wait(0.0005):
            number += 1
            (prompts / "next").symlink_to(f"v{number % 2}")
            (prompts / "next").rename(prompts / "a")

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        found_values = {
            decoder(artifacts, adapter_store.find("prompt", "a")).unique().tolist()[0] for _ in range(100)
        }
    finally:
        stop.set()
        swapper.join()
    assert found_values == {0.0, 1.0}


def test_vanishes_while_it_is_read(
    prompts: Path, adapter_store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = snapshot._copy

    def vanish_first(source: snapshot.AdapterDirectory, *rest: object) -> None:
        shutil.rmtree(source.directory)
        copy(source, *rest)  # type: ignore[arg-type]

    def vanish_then(source: snapshot.AdapterDirectory, *rest: object) -> None:
        copy(source, *rest)  # type: ignore[arg-type]
        shutil.rmtree(source.directory)

    for vanish in (vanish_first, vanish_then):
        save_prompt(prompts / "a", random_prompt())
        monkeypatch.setattr(snapshot, "_copy", vanish)
        assert refuse(adapter_store, "prompt", "a") == not_found("a")
        monkeypatch.setattr(snapshot, "_copy", copy)
        save_prompt(prompts / "a", random_prompt())
        assert adapter_store.find("prompt", "a").num_decoder_tokens == 4


def test_the_link_is_turned_and_its_target_removed_while_it_is_read(
    prompts: Path, adapter_store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        save_prompt(prompts / f"v{number}", random_prompt(2 + number))
    (prompts / "a").symlink_to("v0")
    copy = snapshot._copy

    def turn(source: snapshot.AdapterDirectory, *rest: object) -> None:
        if source.directory.name == "v0":
            (prompts / "next").symlink_to("v1")
            (prompts / "next").rename(prompts / "a")
            shutil.rmtree(source.directory)
        copy(source, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshot, "_copy", turn)
    assert adapter_store.find("prompt", "a").num_decoder_tokens == 3


def test_a_full_disk_is_not_the_clients_fault(prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "artifacts").touch()
    save_prompt(prompts / "a", random_prompt())
    store = AdapterStore(ArtifactCache(tmp_path / "artifacts"), REQUIRED, prompts, None, {})
    with pytest.raises(OSError):
        store.find("prompt", "a")


def test_a_model_decides_which_files_matter(prompts: Path, artifacts: ArtifactCache) -> None:
    path = save_prompt(prompts / "a", random_prompt())
    (path / "encoder.pt").symlink_to("/etc/passwd")
    assert AdapterStore(artifacts, REQUIRED, prompts, None, {}).find("prompt", "a").num_decoder_tokens == 4
    seq2seq: AdapterRequirements = replace(REQUIRED, is_encoder_decoder=True)
    assert refuse(AdapterStore(artifacts, seq2seq, prompts, None, {}), "prompt", "a") == not_found("a")
