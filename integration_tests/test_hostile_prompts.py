"""Hostile soft prompts, and ids that try to leave the store, beside a steady client, which gets the same
responses without loss."""

import contextlib
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from integration_tests.support.greedy_answers import Model
from integration_tests.support.service import Client, serve
from integration_tests.support.steady_client import API, steady_client, wait_for_answers
from integration_tests.support.tuned_files import WIDTH, SoftPrompt, embeddings, write_prompt
from tests.support.accounts import assert_nothing_left, take_baseline
from tests.support.hostile_ids import HOSTILE, write_ways_out
from tests.support.http_exchange import exchange
from tests.support.processes import children_of
from tests.support.prompt_files import Payload, claim_numbers, rewrite_pickle
from tgis.pb import generation_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PROMPT, PEFT_PICKLE, PEFT = "decoder.pt", "adapter_model.bin", "adapter_model.safetensors"
FLAGS = ["--dtype", "float32", *API]
LARGEST = torch.finfo(torch.float32).max
Write = Callable[[Path], object]


@dataclass(frozen=True)
class Served:
    client: Client
    store: Path

    @property
    def shards(self) -> list[int]:
        return children_of(self.client.service.process.pid)["serve"]


@pytest.fixture(scope="module")
def served(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = tmp_path_factory.mktemp("stores") / "root"
    write_prompt(store / "eight", SoftPrompt(embeddings(8, 1)))
    write_ways_out(store, store.parent / "outside", store.parent / "outside")
    for client in serve(model.directory, *FLAGS, "--prefix-store-path", str(store)):
        yield Served(client, store)


def generate(served: Served, prefix_id: str) -> str:
    stopping = pb.StoppingCriteria(max_new_tokens=8, min_new_tokens=8)
    message = pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text="girl")],
        prefix_id=prefix_id,
        params=pb.Parameters(stopping=stopping),
    )
    return served.client.stub.Generate(message, timeout=60).responses[0].text


def refusal(served: Served, prefix_id: str) -> str:
    """Return the text of a refusal, which names no path on disk except the id."""
    with pytest.raises(grpc.RpcError) as caught:
        generate(served, prefix_id)
    text = caught.value.details().replace(prefix_id, "")
    assert caught.value.code() is INVALID, (prefix_id, text)
    assert "\n" not in text
    assert not any(part in text for part in (str(served.store.parent), "Traceback", "0x")), text
    return text


@contextlib.contextmanager
def beside_a_steady_client(served: Served) -> Iterator[list[float]]:
    """Yield the durations of its requests; afterwards the shards are the same, and no resource is held."""
    service, pids = served.client.service, served.shards
    expected = generate(served, "eight")
    baseline, num_lines = take_baseline(service.http), len(service.lines)
    with steady_client(service.http) as seconds:
        yield seconds
        wait_for_answers(seconds)
    assert generate(served, "eight") == expected
    assert served.shards == pids
    assert_nothing_left(service.http, baseline, timeout_s=30)
    assert not [line for line in service.lines[num_lines:] if "Traceback" in line]


def saved(content: object, name: str = PROMPT, *, is_zip: bool = True) -> Write:
    return lambda directory: torch.save(content, directory / name, _use_new_zipfile_serialization=is_zip)


def peft_saved(**tensors: Tensor) -> Write:
    return lambda directory: save_file(tensors, directory / PEFT)


def with_a_claim(old: int, new: int) -> Write:
    """Create a prompt whose pickle has `new` instead of `old`, which is a side or the number of elements."""

    def write(directory: Path) -> None:
        torch.save(torch.ones(8, WIDTH), directory / PROMPT)
        rewrite_pickle(directory / PROMPT, claim_numbers(old, new))

    return write


def sparse(num_bytes: int) -> Write:
    def write(directory: Path) -> None:
        with (directory / PROMPT).open("wb") as file:
            file.truncate(num_bytes)

    return write


def bomb(directory: Path) -> None:
    """Create a file with a gigabyte of zeros that uses a megabyte on disk."""
    with (
        zipfile.ZipFile(directory / PROMPT, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("archive/data.pkl", "w", force_zip64=True) as record,
    ):
        for _ in range(1 << 10):
            record.write(bytes(1 << 20))


WRONG: dict[str, Write] = {
    "nan": saved(torch.full((8, WIDTH), torch.nan)),
    "one-nan": saved(torch.ones(8, WIDTH).index_fill(0, torch.tensor(7), torch.nan)),
    "infinite": saved(torch.full((8, WIDTH), -torch.inf)),
    "peft-nan": peft_saved(prompt_embeddings=torch.full((8, WIDTH), torch.nan)),
    "narrow": saved(torch.ones(8, WIDTH - 1)),
    "wide": saved(torch.ones(8, WIDTH * 1000)),
    "vector": saved(torch.ones(WIDTH)),
    "number": saved(torch.tensor(1.0)),
    "three-sides": saved(torch.ones(1, 8, WIDTH)),
    "no-rows": saved(torch.ones(0, WIDTH)),
    "booleans": saved(torch.ones(8, WIDTH, dtype=torch.bool)),
    "transposed": saved(torch.ones(WIDTH + 1, 8).T),
    "long": saved(torch.ones(10_000, WIDTH)),
    "many-rows": saved(torch.ones(1, WIDTH).expand(10**8, WIDTH)),
    "list": saved([torch.ones(8, WIDTH)]),
    "text": lambda directory: (directory / PROMPT).write_bytes(b"prompt\n" * 99),
    "directory": lambda directory: (directory / PROMPT).mkdir(),
    "pipe": lambda directory: os.mkfifo(directory / PROMPT),
    "device": lambda directory: (directory / PROMPT).symlink_to("/dev/zero"),
    "sparse": sparse(64 << 30),
    "small-sparse": sparse(1 << 20),
    "bomb": bomb,
    "rows-that-are-not-there": with_a_claim(8, 1 << 40),
    "columns-that-are-not-there": with_a_claim(WIDTH, 1 << 62),
    "no-other": peft_saved(other=torch.ones(8, WIDTH)),
}
HUGE: dict[str, Tensor] = {
    "largest": torch.full((8, WIDTH), LARGEST),
    "smallest": torch.full((8, WIDTH), torch.finfo(torch.float32).tiny / 2),
    "of-both-signs": LARGEST * torch.tensor([1.0, -1.0] * (WIDTH // 2)).expand(8, WIDTH).contiguous(),
    "one-largest": torch.ones(8, WIDTH).index_fill(1, torch.tensor(3), LARGEST),
    "doubles": torch.full((8, WIDTH), 1e30, dtype=torch.float64),
    "zeros": torch.zeros(8, WIDTH),
}


def test_prompts_of_wrong_content(served: Served) -> None:
    with beside_a_steady_client(served):
        for name, write in WRONG.items():
            (served.store / "bad" / name).mkdir(parents=True)
            write(served.store / "bad" / name)
            refusal(served, f"bad/{name}")
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda name: refusal(served, f"bad/{name}"), [*WRONG] * 4))
    shutil.rmtree(served.store / "bad")


def test_prompts_of_huge_numbers_spoil_no_other_answer(served: Served) -> None:
    """The model's results for them may be infinite. Each request is served or refused, always with the same
    result."""
    with beside_a_steady_client(served):
        for name, tensor in HUGE.items():
            (served.store / name).mkdir()
            torch.save(tensor, served.store / name / PROMPT)
        with ThreadPoolExecutor(8) as threads:
            outcomes = list(threads.map(lambda name: outcome(served, name), [*HUGE] * 8))
    assert {*zip([*HUGE] * 8, outcomes, strict=True)} == {*zip(HUGE, outcomes, strict=False)}


def outcome(served: Served, prefix_id: str) -> str:
    try:
        return generate(served, prefix_id)
    except grpc.RpcError as error:
        return str(error.details())


@pytest.mark.parametrize("name", [PROMPT, "old", PEFT_PICKLE, PEFT])
def test_prompts_cut_at_any_byte(served: Served, name: str, tmp_path: Path) -> None:
    directory, file = served.store / "cut", PROMPT if name == "old" else name
    directory.mkdir()
    content: dict[str, Tensor] | Tensor = torch.ones(8, WIDTH)
    content = content if file == PROMPT else {"prompt_embeddings": content}
    if isinstance(content, dict) and name == PEFT:
        save_file(content, tmp_path / "whole")
    else:
        torch.save(content, tmp_path / "whole", _use_new_zipfile_serialization=name != "old")
    whole = (tmp_path / "whole").read_bytes()
    lengths = random.Random(0).sample(range(len(whole)), 60)
    with beside_a_steady_client(served):
        for length in [0, *lengths, len(whole) - 1]:
            (directory / file).write_bytes(whole[:length])
            refusal(served, "cut")
        (directory / file).write_bytes(whole)
        generate(served, "cut")
    shutil.rmtree(directory)


def test_pickles_with_code(served: Served, tmp_path: Path) -> None:
    made = tmp_path / "made"
    harm = Payload(os.mkdir, str(made))
    contents = [harm, [torch.ones(8, WIDTH), harm], {"prompt_embeddings": harm}]
    contents += [Payload(eval, f"__import__('os').mkdir({str(made)!r})"), Payload(bytearray, 1 << 36)]
    writes = [
        saved(content, name, is_zip=is_zip)
        for content in contents
        for name in (PROMPT, PEFT_PICKLE)
        for is_zip in (True, False)
    ]
    writes += [lambda directory: (directory / PROMPT).write_bytes(pickle.dumps(harm)) and None]
    with beside_a_steady_client(served):
        for i, write in enumerate(writes):
            directory = served.store / f"code-{i}"
            directory.mkdir()
            write(directory)
            refusal(served, directory.name)
            shutil.rmtree(directory)
    assert not made.exists()


def test_hostile_ids(served: Served) -> None:
    """Send the id by gRPC, as UTF-8, and as the name of a model in OpenAI's API."""
    outside = served.store.parent / "outside"
    ids = [
        pattern.replace("{outside}", str(outside)).replace("{root}", str(served.store)) for pattern in HOSTILE
    ]
    ids += ["../" * 3_000 + "etc/passwd", "\0" * 10_000, "a" * 10_000, "é" * 5_000, "a/" * 5_000 + "a"]
    with beside_a_steady_client(served):
        for id in filter(None, ids):
            refusal(served, id)
        for id in ids:
            body = {"model": id, "prompt": "girl", "max_tokens": 1}
            reply = exchange(f"{served.client.service.http}/v1/completions", body)
            assert reply.status in ((200,) if not id else (404, 400)), (id, reply.text)
            assert str(outside) not in json.dumps(reply.json) or str(outside) in id
