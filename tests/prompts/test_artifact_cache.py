"""A stored copy is returned unchanged under the digest of its file, to every reader; other content never
is."""

import errno
import hashlib
import os
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.prompt_files import bounded_memory, random_prompt
from tgis.prompts.artifact_cache import MAX_WORK_S, ArtifactCache
from tgis.prompts.errors import MissingArtifactError

ABOUT = {"scales": {"b": 0.1, "a": 2.0}}
OTHER = "0" * 64


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "some" / "artifacts"


@pytest.fixture
def artifacts(directory: Path) -> ArtifactCache:
    return ArtifactCache(directory)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_keeps_tensors(artifacts: ArtifactCache, directory: Path) -> None:
    assert not directory.exists()
    tensors = {
        "half": random_prompt().half(),
        "turned": random_prompt(5, 3).T,
        "brain": random_prompt().bfloat16().requires_grad_(),
        "empty": torch.empty(0, 8),
    }
    digest = artifacts.put("adapter", tensors, ABOUT)
    assert names(directory) == [digest]
    assert hashlib.sha256((directory / digest).read_bytes()).hexdigest() == digest
    assert set(load_file(directory / digest)) == set(tensors)
    kept = artifacts.open(digest)
    assert (kept.kind, kept.about) == ("adapter", ABOUT)
    assert kept.tensors.keys() == tensors.keys()
    artifacts.remove([digest])
    for name, tensor in kept.tensors.items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])


def test_keeps_tensors_that_share_memory(artifacts: ArtifactCache) -> None:
    whole = random_prompt(8)
    tensors = {
        "whole": whole,
        "again": whole,
        "part": whole[2:4],
        "rows": whole[:1].expand(3, -1),
        "t": whole.T,
    }
    kept = artifacts.open(artifacts.put("adapter", tensors, {}))
    assert all(torch.equal(kept.tensors[name], tensor) for name, tensor in tensors.items())


def test_one_content_has_one_digest(artifacts: ArtifactCache, directory: Path) -> None:
    a, b = random_prompt(), random_prompt(seed=1)
    digest = artifacts.put("adapter", {"a": a, "b": b}, ABOUT)
    for _ in range(20):  # keys whose order a library may choose
        about = {"scales": {"a": 2.0, "b": 0.1}}
        assert artifacts.put("adapter", {"b": b.clone(), "a": a.T.contiguous().T}, about) == digest
    others = {
        artifacts.put("prompt", {"a": a, "b": b}, ABOUT),
        artifacts.put("adapter", {"a": b, "b": a}, ABOUT),
        artifacts.put("adapter", {"a": a, "b": b}, {"scales": {"a": 2.0, "b": 0.2}}),
        artifacts.put("adapter", {"a": a, "b": b.half()}, ABOUT),
    }
    assert len(others | {digest}) == 5
    assert len(names(directory)) == 5


def test_is_private(artifacts: ArtifactCache, directory: Path) -> None:
    directory.mkdir(parents=True, mode=0o755)
    digest = artifacts.put("prompt", {"decoder": random_prompt()}, {})
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / digest).stat().st_mode & 0o777 == 0o600


def test_a_directory_of_others_is_not_used(artifacts: ArtifactCache, directory: Path, tmp_path: Path) -> None:
    directory.parent.mkdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        artifacts.put("prompt", {}, {})
    directory.unlink()
    if os.geteuid() == 0:
        directory.mkdir()
        os.chown(directory, 12345, -1)
        with pytest.raises(PermissionError):
            artifacts.put("prompt", {}, {})


@pytest.mark.parametrize(
    "digest", ["", "..", "../x", "/etc/passwd", "a" * 63, "A" * 64, "a" * 64 + "\n", OTHER]
)
def test_missing_digests(digest: str, artifacts: ArtifactCache, directory: Path) -> None:
    for _ in range(2):
        with pytest.raises(MissingArtifactError):
            artifacts.open(digest)
        artifacts.remove([digest])
        artifacts.remove_others([digest])
        directory.mkdir(parents=True, exist_ok=True)


def test_removes_only_digests(artifacts: ArtifactCache, directory: Path) -> None:
    digests = [artifacts.put("prompt", {"decoder": random_prompt(seed=seed)}, {}) for seed in range(3)]
    (directory.parent / "x").touch()
    (directory / "x").touch()
    artifacts.remove(["../x", str(directory / "x"), "x", digests[0], OTHER])
    assert names(directory) == sorted([*digests[1:], "x"])
    artifacts.remove_others([digests[1], OTHER])
    assert names(directory) == sorted([digests[1], "x"])
    assert digests[1] in artifacts
    assert digests[2] not in artifacts
    assert (directory.parent / "x").exists()


def test_damaged_copies_are_removed_and_written_again(artifacts: ArtifactCache, directory: Path) -> None:
    tensors = {"decoder": random_prompt()}
    digest = artifacts.put("prompt", tensors, {})
    file = directory / digest
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole + b"\0", whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        file.write_bytes(damaged)
        with pytest.raises(MissingArtifactError):
            artifacts.open(digest)
        assert digest not in artifacts
        file.write_bytes(damaged)
        assert artifacts.put("prompt", tensors, {}) == digest
        assert torch.equal(artifacts.open(digest).tensors["decoder"], tensors["decoder"])


def test_digests_never_stored_are_missing(artifacts: ArtifactCache, directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "content").write_bytes(b"no safetensors")
    digest = hashlib.sha256(b"no safetensors").hexdigest()
    (directory / "content").rename(directory / digest)
    with pytest.raises(MissingArtifactError):
        artifacts.open(digest)


def test_old_leftovers_of_processes_are_removed(artifacts: ArtifactCache, directory: Path) -> None:
    with artifacts.temporary_directory() as young:
        old = directory / young.name.replace(young.name[-4:], "last")
        old.mkdir()
        (old / "content").touch()
        os.utime(old, (time.time() - MAX_WORK_S - 10,) * 2)
        (young / "content").touch()
        artifacts.remove_others([])
        assert not old.exists()
        assert (young / "content").exists()
    assert names(directory) == []


def test_old_unclaimed_copies_are_removed(artifacts: ArtifactCache, directory: Path) -> None:
    old, kept, young = (
        artifacts.put("prompt", {"decoder": torch.full((1, 2), float(i))}, {}) for i in range(3)
    )
    for digest in (old, kept):
        os.utime(directory / digest, (time.time() - MAX_WORK_S - 10,) * 2)
    artifacts.sweep([kept])
    assert names(directory) == sorted([kept, young])


@contextmanager
def full_disk() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_nothing(artifacts: ArtifactCache, directory: Path) -> None:
    with full_disk(), pytest.raises(OSError) as caught:
        artifacts.put("prompt", {"decoder": torch.ones(1 << 16)}, {})
    assert caught.value.errno == errno.EFBIG
    assert names(directory) == []


def test_takes_little_memory(artifacts: ArtifactCache) -> None:
    tensor = torch.ones(16 << 20)  # 64 MiB
    with bounded_memory(32 << 20):
        digest = artifacts.put("adapter", {"a": tensor}, {})
        kept = artifacts.open(digest)
    assert torch.equal(kept.tensors["a"], tensor)


def test_threads_put_open_and_remove(artifacts: ArtifactCache, directory: Path) -> None:
    contents = [{"decoder": random_prompt(64, seed=seed)} for seed in range(3)]
    digests = [artifacts.put("prompt", content, {}) for content in contents]

    def work(number: int) -> int:
        num_opened = 0
        for i in range(30):
            which = (number + i) % 3
            assert artifacts.put("prompt", contents[which], {}) == digests[which]
            try:
                kept = artifacts.open(digests[which])
            except MissingArtifactError:
                pass
            else:
                num_opened += torch.equal(kept.tensors["decoder"], contents[which]["decoder"])
            (artifacts.remove if i % 2 else artifacts.remove_others)([digests[(which + 1) % 3]])
        return num_opened

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(work, range(6))) > 0
    assert set(names(directory)) <= set(digests)


def test_a_file_of_another_name_is_not_taken_for_one(artifacts: ArtifactCache, directory: Path) -> None:
    digest = artifacts.put("prompt", {"decoder": random_prompt()}, {})
    save_file({"decoder": random_prompt(seed=1)}, directory / OTHER, metadata={"tgis": "{}"})
    with pytest.raises(MissingArtifactError):
        artifacts.open(OTHER)
    assert digest in artifacts
