"""Server processes behind their sockets, spoken to as the router does."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import grpc
import pytest
import torch
import transformers

from tests.shard.messages import Steps, integers, open_row
from tgis.pb import shard_pb2 as pb
from tgis.pb.shard_pb2_grpc import ShardServiceStub

SCRIPT = """
import sys
from tgis import logs
from tgis.config import ShardConfig
from tgis.shard.server import serve
logs.setup("info", False)
serve(ShardConfig(**eval(sys.argv[1])))
"""


class Shard:
    """One rank's process."""

    def __init__(self, model: Path, uds_path: Path, **options: object) -> None:
        rank = options.get("rank", 0)
        small = {"max_batch_size": 4, "max_sequence_length": 128, "cpu_threads": 1}
        config = {"model_path": str(model), "uds_path": str(uds_path), **small, **options}
        self.socket, self.log = Path(f"{uds_path}-{rank}"), Path(f"{uds_path}-{rank}.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen([sys.executable, "-c", SCRIPT, repr(config)], stderr=log)

    def connect(self, timeout_s: float = 120) -> grpc.Channel:
        channel = grpc.insecure_channel(f"unix:{self.socket}")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                grpc.channel_ready_future(channel).result(timeout=0.5)
                return channel
            except grpc.FutureTimeoutError:
                continue
        raise AssertionError(f"never served: {self.log.read_text()}")


@contextmanager
def started(shard: Shard) -> Iterator[tuple[Shard, ShardServiceStub]]:
    try:
        with shard.connect() as channel:
            yield shard, ShardServiceStub(channel)
    finally:
        shard.process.kill()
        shard.process.wait()


class Call:
    """A Step stream whose requests are sent one by one."""

    def __init__(self, stub: ShardServiceStub) -> None:
        self.requests: SimpleQueue[pb.StepRequest | None] = SimpleQueue()
        self.responses = stub.Step(iter(self.requests.get, None))

    def send(self, *steps: pb.StepRequest) -> None:
        for step in steps:
            self.requests.put(step)

    def receive(self, count: int) -> list[pb.StepResponse]:
        return [next(self.responses) for _ in range(count)]


@pytest.fixture(scope="module")
def model_path(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("grouped_queries")


def expected_tokens(model_path: Path, prompt: list[int], count: int) -> list[int]:
    oracle = transformers.LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def test_two_ranks_answer_alike(model_path: Path, tmp_path: Path) -> None:
    meeting = {"world_size": 2, "rendezvous": str(tmp_path / "meeting"), "epoch": 3}
    shards = [Shard(model_path, tmp_path / "shard", rank=rank, **meeting) for rank in range(2)]
    with started(shards[0]) as (first, stub), started(shards[1]) as (second, other):
        infos = [stub.Info(pb.InfoRequest()), other.Info(pb.InfoRequest())]
        assert [(info.rank, info.world_size, info.epoch) for info in infos] == [(0, 2, 3), (1, 2, 3)]
        assert infos[0].num_blocks == infos[1].num_blocks == 4 * 128 // 16
        calls, steps = [Call(stub), Call(other)], Steps(16, infos[0].num_blocks)
        prompt = [7, 8, 9, 10]
        ahead = [steps.step([(0, 0, 2)], [open_row(0, prompt)])]
        ahead += [steps.step([(0, end, end + 1)] if end < 9 else [(0, 9, 10)]) for end in range(2, 10)]
        for call in calls:
            call.send(*ahead)
        answers = [call.receive(len(ahead)) for call in calls]
        for one, two in zip(*answers, strict=True):
            assert (one.step_id, one.digest) == (two.step_id, two.digest)
            assert not two.token_ids
        tokens = [token for answer in answers[0] for token in integers(answer.token_ids)]
        assert tokens == expected_tokens(model_path, prompt, 7)
        for shard in (first, second):
            shard.process.send_signal(signal.SIGTERM)
        assert [shard.process.wait(10) for shard in (first, second)] == [0, 0]


def test_life_of_a_server(model_path: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "shard-0"))
    with started(Shard(model_path, tmp_path / "shard")) as (shard, stub):
        assert stat.S_IMODE(os.stat(shard.socket).st_mode) == 0o600
        assert stub.Info(pb.InfoRequest()).vocab_size == 99
        first, steps = Call(stub), Steps(16, 32)
        first.send(steps.step([(0, 0, 2)], [open_row(0, [5, 6])]))
        assert len(first.receive(1)[0].token_ids) == 4

        stub.Health(pb.HealthRequest())
        with pytest.raises(grpc.RpcError) as error:
            stub.LookupPrompt(pb.LookupPromptRequest(prompt_id="a/b"))
        assert (error.value.code(), error.value.details()) == (
            grpc.StatusCode.NOT_FOUND,
            'prefix id "a/b" not found',
        )
        with pytest.raises(grpc.RpcError) as error:
            stub.LookupAdapter(pb.LookupAdapterRequest(adapter_id="x"))
        assert error.value.code() == grpc.StatusCode.NOT_FOUND

        second, steps = Call(stub), Steps(16, 32)
        with pytest.raises(grpc.RpcError) as error:
            first.receive(1)
        assert error.value.code() == grpc.StatusCode.ABORTED
        first.send(steps.step([(0, 2, 3)]))
        second.send(steps.step([(0, 0, 3)], [open_row(0, [5, 6, 7])]), steps.step([(0, 3, 4)]))
        answers = second.receive(2)
        assert [integers(answer.rows) for answer in answers] == [[0], [0]]
        second.requests.put(None)
        assert list(second.responses) == [], "half closed, answered, ended"

        third = Call(stub)
        third.send(steps.step([(0, 4, 5)]))
        with pytest.raises(grpc.RpcError):
            third.receive(1)
        assert shard.process.wait(10) == 1
        log = shard.log.read_text()
        assert "a step failed" in log
        assert "work on a row that is not open" in log
        assert "loaded in" in log
