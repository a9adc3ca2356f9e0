"""Soft prompts and adapters that are replaced, removed or damaged, and processes that die meanwhile."""

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from integration_tests.support.adapter_requests import INVALID, TEXTS, Ask, Tuned
from integration_tests.support.compare import differences
from integration_tests.support.live_streams import metrics
from integration_tests.support.tuned_files import (
    LINEAR,
    WIDTH,
    edit_adapter,
    write_adapter,
    write_misfit,
)
from tests.support.processes import children_of
from tests.support.prompt_files import Payload
from tests.support.streams import join_stream
from tgis.pb import generation_pb2 as pb

LONG = 150  # tokens, so that a stream lasts
Messages = list[pb.GenerationResponse]
Stream = Future[Messages]
LASTING = {("eight", ""), ("peft.v1", ""), ("", "mlp"), ("eight", "mlp"), ("", "")}


@pytest.fixture(scope="module")
def undisturbed(tuned: Tuned) -> dict[Ask, Messages]:
    """Send all simultaneously without faults, and return the responses."""
    asks = [Ask(TEXTS[1], *ids, LONG) for ids in LASTING]
    asks += [Ask(text, "eight", "", LONG) for text in (TEXTS[0], TEXTS[2])]
    with ThreadPoolExecutor(len(asks)) as threads:
        return dict(zip(asks, threads.map(lambda ask: ask.stream(tuned), asks), strict=True))


def start(tuned: Tuned, threads: ThreadPoolExecutor, *asks: Ask) -> list[Stream]:
    """Start streams of all requests, and wait until each has begun."""
    begun = threading.Barrier(len(asks) + 1)

    def read(ask: Ask) -> Messages:
        parts = []
        for part in ask.start(tuned):
            parts.append(part)
            if len(parts) == 3:
                begun.wait(60)
        return parts

    streams = [threads.submit(read, ask) for ask in asks]
    begun.wait(60)
    return streams


def check(streams: list[Stream], undisturbed: list[Messages]) -> None:
    for stream, expected in zip(streams, undisturbed, strict=True):
        assert not [*differences(join_stream(expected), join_stream(stream.result(120)))]


def are_running(streams: list[Stream]) -> bool:
    return not any(stream.done() for stream in streams)


def shards(tuned: Tuned) -> list[int]:
    return sorted(children_of(tuned.client.service.process.pid)["serve"])


def put(file: Path, content: bytes) -> None:
    """Publish it like caikit: under another name first, then renamed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".swp")
    unfinished.write_bytes(content)
    unfinished.rename(file)


def missing(content_id: str) -> tuple[grpc.StatusCode, str]:
    cause = f'prefix id "{content_id}" not found'
    return INVALID, f"can't retrieve prompt prefix with id '{content_id}': {cause}"


def outcome(ask: Ask, tuned: Tuned) -> Any:
    """Return the response, or the status and its text."""
    try:
        return ask.send(tuned)
    except grpc.RpcError as error:
        return error.code(), error.details()


@pytest.mark.slow
def test_replaced_and_removed_under_load(tuned: Tuned, undisturbed: dict[Ask, Messages]) -> None:
    """Running requests continue with the old version; the next request gets the new one, or is refused."""
    pids, directory = shards(tuned), tuned.prompts / "swapped"
    old, new = [(tuned.prompts / name / "decoder.pt").read_bytes() for name in ("eight", "one")]
    put(directory / "decoder.pt", old)
    asks = [Ask(text, "swapped", num_tokens=LONG) for text in TEXTS[:3]]
    with ThreadPoolExecutor(len(asks)) as threads:
        streams = start(tuned, threads, *asks)
        put(directory / "decoder.pt", new)
        answer = Ask("fox", "swapped", num_tokens=2).send(tuned)
        shutil.rmtree(directory)
        refusal = Ask("fox", "swapped").refusal(tuned)
        assert are_running(streams)
        check(streams, [undisturbed[replace(ask, prefix_id="eight")] for ask in asks])
    Ask("fox", "one", num_tokens=2).check(tuned, answer)
    assert refusal == missing("swapped")
    assert shards(tuned) == pids


def test_an_adapter_is_replaced_and_removed(tuned: Tuned, undisturbed: dict[Ask, Messages]) -> None:
    directory = tuned.adapters / "swapped"
    shutil.copytree(tuned.adapters / "mlp", directory)
    ask, other = Ask(TEXTS[1], adapter_id="swapped", num_tokens=LONG), Ask("fox", "", "swapped", 2)
    with ThreadPoolExecutor(1) as threads:
        [stream] = start(tuned, threads, ask)
        shutil.rmtree(directory)
        shutil.copytree(tuned.prompts / "lora", directory)
        answer = other.send(tuned)
        shutil.rmtree(directory)
        refusal = other.refusal(tuned)
        assert not stream.done()
        check([stream], [undisturbed[replace(ask, adapter_id="mlp")]])
    replace(other, adapter_id="lora").check(tuned, answer)
    assert refusal == (INVALID, "can't retrieve adapter with id 'swapped': directory does not exist")


def test_a_prompt_that_is_copied_slowly(tuned: Tuned) -> None:
    """It is refused until it is complete, and then served at once."""
    whole = (tuned.prompts / "eight" / "decoder.pt").read_bytes()
    directory, ask = tuned.prompts / "slow", Ask("fox", "slow", num_tokens=4)
    directory.mkdir()
    (directory / "decoder.pt.swp").write_bytes(whole)
    assert ask.refusal(tuned) == missing("slow")
    with (directory / "decoder.pt").open("wb", buffering=0) as file:
        for part in (whole[:500], whole[500:-40], whole[-40:]):
            code, text = ask.refusal(tuned)
            assert code == INVALID
            assert text.startswith("can't retrieve prompt prefix with id 'slow': ")
            file.write(part)
    replace(ask, prefix_id="eight").check(tuned, ask.send(tuned))
    shutil.rmtree(directory)


def test_a_directory_that_comes_and_goes(tuned: Tuned) -> None:
    """Every response is correct, or reports that nothing exists."""
    pids, directory, is_over = shards(tuned), tuned.prompts / "fickle", threading.Event()
    r = random.Random(0)
    whole = (tuned.prompts / "eight" / "decoder.pt").read_bytes()

    def come_and_go() -> None:
        while not is_over.is_set():
            put(directory / "decoder.pt", whole)
            time.sleep(r.random() * 0.15)
            shutil.rmtree(directory)
            time.sleep(r.random() * 0.1)

    ask, end = Ask("fox", "fickle", num_tokens=2), time.monotonic() + 1
    outcomes: list[Any] = []
    with ThreadPoolExecutor(3) as threads:
        coming = threads.submit(come_and_go)
        while time.monotonic() < end:
            outcomes += threads.map(lambda _: outcome(ask, tuned), range(2))
        is_over.set()
        coming.result(10)
    answers = [result for result in outcomes if not isinstance(result, tuple)]
    assert 0 < len(answers) < len(outcomes)
    assert all(result == missing("fickle") for result in outcomes if isinstance(result, tuple))
    for answer in answers:
        replace(ask, prefix_id="eight").check(tuned, answer)
    assert shards(tuned) == pids


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_shard_when_the_files_are_gone(
    tuned: Tuned, undisturbed: dict[Ask, Messages], victim: int
) -> None:
    """Streams continue with their version to the last token; unused adapters are loaded again."""
    pids, restarts = shards(tuned), metrics(tuned.client)["tgi_shard_restarts"]
    copies = {"gone": tuned.prompts / "eight", "gone-too": tuned.prompts / "peft.v1"}
    for name, original in copies.items():
        shutil.copytree(original, tuned.prompts / name)
    shutil.copytree(tuned.adapters / "mlp", tuned.adapters / "gone")
    ids = {("gone", ""): ("eight", ""), ("gone-too", ""): ("peft.v1", ""), ("", "gone"): ("", "mlp")}
    ids |= {("gone", "gone"): ("eight", "mlp"), ("", ""): ("", "")}
    asks = [Ask(TEXTS[1], *pair, LONG) for pair in ids]
    with ThreadPoolExecutor(len(asks) + 1) as threads:
        streams = start(tuned, threads, *asks)
        for directory in (tuned.prompts / "gone", tuned.prompts / "gone-too", tuned.adapters / "gone"):
            shutil.rmtree(directory)
        os.kill(pids[victim], signal.SIGKILL)
        assert are_running(streams)
        late = threads.submit(Ask("fox", "hundred", "lora", 4).send, tuned)
        check(streams, [undisturbed[Ask(TEXTS[1], *pair, LONG)] for pair in ids.values()])
    Ask("fox", "hundred", "lora", 4).check(tuned, late.result(60))
    assert metrics(tuned.client)["tgi_shard_restarts"] == restarts + 1
    assert not set(shards(tuned)) & set(pids)
    assert Ask("fox", "gone").refusal(tuned) == missing("gone")
    Ask("fox", "eight", "mlp", 4).check(tuned, Ask("fox", "eight", "mlp", 4).send(tuned))
    misses = metrics(tuned.client)["tgi_adapter_cache_misses"]
    Ask("fox", adapter_id="kept", num_tokens=4).check(tuned, Ask("fox", "", "kept", 4).send(tuned))
    assert metrics(tuned.client)["tgi_adapter_cache_misses"] == misses


def saved(tensor: Any) -> Callable[[Path], None]:
    return lambda directory: torch.save(tensor, directory / "decoder.pt")


def holding(content: bytes, name: str = "decoder.pt") -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes(content) and None


def header(text: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def write_sparse(directory: Path) -> None:
    """Create a sparse file of eight GiB."""
    with (directory / "decoder.pt").open("wb") as file:
        file.truncate(8 << 30)


def write_wide_row(directory: Path) -> None:
    """Create one row that claims to be a hundred million."""
    torch.save(torch.ones(1, WIDTH).expand(10**8, WIDTH), directory / "decoder.pt")


NO_TENSOR, WRONG_LENGTH = "Invalid prefix embedding tensor", "Invalid prefix embedding length of {}"
WRONG_WIDTH = f"Prefix embedding tensor dim {WIDTH + 1} does not match model ({WIDTH})"
OTHER_KEY = b'{"x":{"dtype":"F32","shape":[0,32],"data_offsets":[0,0]}}'
EMBEDDINGS = b'{"prompt_embeddings":{"dtype":"F32","shape":[%s],"data_offsets":[0,%d]}}'
PEFT = "adapter_model.safetensors"
BAD_PROMPTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "nan": (saved(torch.full((4, WIDTH), torch.nan)), "Prefix contains non-finite elements"),
    "wide": (
        saved(torch.ones(4, WIDTH + 1)),
        WRONG_WIDTH,
    ),
    "vector": (saved(torch.ones(WIDTH)), NO_TENSOR),
    "integers": (saved(torch.ones(4, WIDTH, dtype=torch.int64)), NO_TENSOR),
    "complex": (saved(torch.ones(4, WIDTH, dtype=torch.complex64)), NO_TENSOR),
    "sparse": (saved(torch.ones(4, WIDTH).to_sparse()), NO_TENSOR),
    "dictionary": (saved({"prompt_embeddings": torch.ones(4, WIDTH)}), NO_TENSOR),
    "many-rows": (write_wide_row, WRONG_LENGTH.format(10**8)),
    "nothing": (holding(b""), NO_TENSOR),
    "text": (holding(b"prompt\n" * 99), NO_TENSOR),
    "large": (write_sparse, "Prefix ID object bad/large exceeds the allowed cache size"),
    "huge-header": (holding(header(b"{}", 1 << 62), PEFT), NO_TENSOR),
    "long-header": (holding(header(b"{}" + b" " * (3 << 19)), PEFT), NO_TENSOR),
    "no-header": (holding(b"\1\2\3", PEFT), NO_TENSOR),
    "short-tensor": (holding(header(EMBEDDINGS % (b"4,32", 512)) + b"\0" * 40, PEFT), NO_TENSOR),
    "overflowing-shape": (holding(header(EMBEDDINGS % (b"4294967296,4294967296", 0)), PEFT), NO_TENSOR),
    "other-key": (
        holding(header(OTHER_KEY), PEFT),
        NO_TENSOR,
    ),
    "deep-header": (holding(header(b"[" * 100_000), PEFT), NO_TENSOR),
}


def test_bad_prompts_affect_no_other_request(
    tuned: Tuned, undisturbed: dict[Ask, Messages], tmp_path: Path
) -> None:
    pids, root, made = shards(tuned), tuned.prompts / "bad", tmp_path / "made"
    whole = (tuned.prompts / "eight" / "decoder.pt").read_bytes()
    bad = {
        **BAD_PROMPTS,
        "payload": (saved([torch.ones(4, WIDTH), Payload(os.mkdir, str(made))]), NO_TENSOR),
        "cut": (holding(whole[:-300]), NO_TENSOR),
    }
    with ThreadPoolExecutor(1) as threads:
        beside = Ask(TEXTS[1], "eight", num_tokens=LONG)
        [stream] = start(tuned, threads, beside)
        for name, (write, cause) in bad.items():
            (root / name).mkdir(parents=True)
            write(root / name)
            text = f"can't retrieve prompt prefix with id 'bad/{name}': {cause}"
            assert Ask("fox", f"bad/{name}").refusal(tuned) == (INVALID, text), name
        check([stream], [undisturbed[beside]])
    shutil.rmtree(root)
    assert not made.exists()
    assert shards(tuned) == pids
    put(root / "nan" / "decoder.pt", whole)
    Ask("fox", "eight", num_tokens=4).check(tuned, Ask("fox", "bad/nan", num_tokens=4).send(tuned))


def change_tensors(directory: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    path = directory / "adapter_model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        tensors |= change(name, tensor)
    save_file(tensors, path, {"format": "pt"})


def break_json(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{" * 1000)


def cut_file(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


# Damage of a valid adapter, and the error text after the id.
BAD_ADAPTERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "dora": (lambda d: edit_adapter(d, use_dora=True), "DoRA"),
    "json": (break_json, "adapter_config.json"),
    "list": (lambda d: (d / "adapter_config.json").write_text("[]") and None, "adapter_config.json"),
    "no-rank": (lambda d: edit_adapter(d, r=0), ""),
    "huge-rank": (lambda d: edit_adapter(d, r=1 << 40), ""),
    "other-rank": (lambda d: edit_adapter(d, r=5), ""),
    "whole-modules": (lambda d: edit_adapter(d, modules_to_save=["lm_head"]), "modules_to_save"),
    "biases": (lambda d: edit_adapter(d, bias="all"), "bias"),
    "cut": (cut_file, ""),
    "no-file": (lambda d: (d / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    "nan": (lambda d: change_tensors(d, lambda n, t: {n: t * torch.nan}), "finite"),
    "half": (lambda d: change_tensors(d, lambda n, t: {} if "lora_B" in n else {n: t}), ""),
    "layer": (lambda d: change_tensors(d, lambda n, t: {n.replace("layers.1", "layers.7"): t}), ""),
    "names": (lambda d: change_tensors(d, lambda n, t: {n.replace("q_proj", "query"): t}), ""),
    "shape": (lambda d: change_tensors(d, lambda n, t: {n: t[None].contiguous()}), ""),
    "integers": (lambda d: change_tensors(d, lambda n, t: {n: t.long()}), ""),
}


def test_bad_adapters_affect_no_other_request(
    tuned: Tuned, undisturbed: dict[Ask, Messages], tmp_path: Path
) -> None:
    pids, root, made = shards(tuned), tuned.adapters / "bad", tmp_path / "made"
    for name, (change, _) in BAD_ADAPTERS.items():
        shutil.copytree(tuned.prompts / "lora", root / name)
        change(root / name)
    write_misfit(root / "misfit", tuned.served.directory)
    write_adapter(root / "too-large", tuned.served.directory, 0, LINEAR, r=400)
    shutil.copytree(tuned.prompts / "lora", root / "payload")
    (root / "payload" / "adapter_model.safetensors").unlink()
    torch.save({"base_model.model.x": Payload(os.mkdir, str(made))}, root / "payload" / "adapter_model.bin")
    causes = {name: cause for name, (_, cause) in BAD_ADAPTERS.items()}
    causes |= {"misfit": "", "too-large": "exceeds the allowed cache size", "payload": ""}
    with ThreadPoolExecutor(1) as threads:
        beside = Ask(TEXTS[1], adapter_id="mlp", num_tokens=LONG)
        [stream] = start(tuned, threads, beside)
        for name, cause in causes.items():
            code, text = Ask("fox", adapter_id=f"bad/{name}").refusal(tuned)
            assert code == INVALID, (name, text)
            assert text.startswith(f"can't retrieve adapter with id 'bad/{name}': "), text
            assert cause in text, (name, text)
            assert "\n" not in text, (name, text)
            assert not any(part in text for part in ("Traceback", str(root), "0x")), (name, text)
        check([stream], [undisturbed[beside]])
    assert not made.exists()
    assert shards(tuned) == pids
    shutil.rmtree(root)
    shutil.copytree(tuned.prompts / "lora", root / "json")
    again = Ask("fox", adapter_id="bad/json", num_tokens=4)
    replace(again, adapter_id="lora").check(tuned, again.send(tuned))


@pytest.mark.slow
def test_a_look_up_that_takes_too_long_is_given_up(tuned: Tuned) -> None:
    """After five seconds, on a hung disk of a shard that serves all other requests."""
    with ThreadPoolExecutor(1) as threads:
        started = time.monotonic()
        slow = threads.submit(Ask("fox", "on-a-slow-disk").refusal, tuned)
        while not slow.done():
            other = Ask("fox", "one", num_tokens=4)
            other.check(tuned, other.send(tuned))
        assert 4.5 < time.monotonic() - started < 8
    text = "can't retrieve prompt prefix with id 'on-a-slow-disk': Timeout expired"
    assert slow.result() == (INVALID, text)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_look_up_in_a_shard_that_stands_still_is_a_pause(tuned: Tuned, victim: int) -> None:
    """It ends when the shard continues, or when it is killed and restarted."""
    for prefix_id, stands_s in (("half", 7.0), ("peft/raw", None)):
        pid, restarts = shards(tuned)[victim], metrics(tuned.client)["tgi_shard_restarts"]
        ask, plain = Ask("fox", prefix_id, num_tokens=4), Ask("fox", num_tokens=4)
        with ThreadPoolExecutor(2) as threads:
            os.kill(pid, signal.SIGSTOP)
            answers = [threads.submit(each.send, tuned) for each in (ask, plain)]
            if stands_s is not None:
                time.sleep(stands_s)
                assert not any(answer.done() for answer in answers)
                os.kill(pid, signal.SIGCONT)
            for each, answer in zip((ask, plain), answers, strict=True):
                each.check(tuned, answer.result(60))
        assert metrics(tuned.client)["tgi_shard_restarts"] - restarts == (stands_s is None)
