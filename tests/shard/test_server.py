"""Check server processes over their sockets, driven as the router drives them."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
import transformers

from tests.support.shard.messages import Steps, integers, open_row
from tgis.net.framing import FrameReader, frame, steps_path
from tgis.pb import shard_pb2 as pb
from tgis.pb.shard_pb2_grpc import ShardServiceStub

SCRIPT = """
import sys
from tgis import logs
from tgis.config.processes import ShardConfig
from tgis.process.heartbeat import Heartbeat
from tgis.shard.server import serve
logs.setup("info", False)
serve(ShardConfig(**eval(sys.argv[1])), Heartbeat(None))
"""


class Shard:
    """The process of one rank."""

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
    """A stream of steps."""

    def __init__(self, shard: Shard) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(steps_path(str(shard.socket)))
        self._frames, self._bodies = FrameReader(), deque[bytes]()

    def send(self, *steps: pb.StepRequest) -> None:
        self.socket.sendall(b"".join(map(frame, steps)))

    def receive(self, count: int) -> list[pb.StepResponse]:
        """Return the next message, or raise EOFError at the end of the stream."""
        return [self._next() for _ in range(count)]

    def close(self) -> None:
        self.socket.close()

    def _next(self) -> pb.StepResponse:
        while not self._bodies:
            if not (data := self.socket.recv(7)):
                raise EOFError
            self._bodies += self._frames.push(data)
        return pb.StepResponse.FromString(self._bodies.popleft())


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


@dataclass
class Pair:
    """Two ranks and a store of soft prompts that the first rank reads."""

    shards: list[Shard]
    stubs: list[ShardServiceStub]
    store: Path

    @contextmanager
    def stream(self) -> Iterator["Both"]:
        with ExitStack() as stack:
            yield Both([stack.enter_context(closing(Call(shard))) for shard in self.shards])


class Both:
    """A stream of steps to each rank, with the same requests."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def send(self, *steps: pb.StepRequest) -> list[pb.StepResponse]:
        """Return the first rank's answers."""
        for call in self.calls:
            call.send(*steps)
        answers = [call.receive(len(steps)) for call in self.calls]
        for one, two in zip(*answers, strict=True):
            assert (one.step_id, one.digest) == (two.step_id, two.digest)
            assert not two.token_ids
        return answers[0]


@pytest.fixture(scope="module")
def pair(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("pair")
    options = {"world_size": 2, "rendezvous": str(root / "meeting"), "epoch": 3}
    options["prefix_store_path"] = str(root / "store")
    shards = [Shard(model_path, root / "shard", rank=rank, **options) for rank in range(2)]
    with started(shards[0]) as (_, first), started(shards[1]) as (_, second):
        yield Pair(shards, [first, second], root / "store")


@pytest.fixture
def stream(pair: Pair) -> Iterator[Both]:
    with pair.stream() as both:
        yield both


@pytest.mark.slow
def test_two_ranks_answer_alike(model_path: Path, pair: Pair, stream: Both) -> None:
    infos = [stub.Info(pb.InfoRequest()) for stub in pair.stubs]
    assert [(info.rank, info.world_size, info.epoch) for info in infos] == [(0, 2, 3), (1, 2, 3)]
    assert [(info.num_blocks, info.pad_token_id) for info in infos] == [(4 * 128 // 16, 2)] * 2
    prompt, steps = [7, 8, 9, 10], Steps(16, infos[0].num_blocks)
    ahead = [steps.step([(0, 0, 2)], [open_row(0, prompt)])]
    ahead += [steps.step([(0, end, end + 1)] if end < 9 else [(0, 9, 10)]) for end in range(2, 10)]
    tokens = [token for answer in stream.send(*ahead) for token in integers(answer.token_ids)]
    assert tokens == expected_tokens(model_path, prompt, 7)


def write_prompt(directory: Path, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    prompt = torch.randn(3, 32)
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(prompt, directory / "decoder.pt")
    return prompt


def expected_under(model_path: Path, prompt: torch.Tensor, token_ids: list[int], count: int) -> list[int]:
    oracle = transformers.LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokens: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            result = oracle.model.embed_tokens(torch.tensor([token_ids + tokens]))
            out = oracle(inputs_embeds=torch.cat([prompt[None], result], 1))
            tokens.append(int(out.logits[0, -1].argmax()))
    return tokens


def under(row: int, digest: str) -> pb.OpenRow:
    message = open_row(row, [2, 2, 2, 7, 8, 9])
    message.prompt_digest = digest
    return message


def test_a_prompt_is_found_loaded_replaced_and_unloaded(model_path: Path, pair: Pair, stream: Both) -> None:
    """Check that rows keep the content they started with, as loaded by all ranks."""
    first, steps = pair.stubs[0], Steps(16, 32)

    def load(directory: str) -> pb.FindResponse:
        result = first.Find(pb.FindRequest(kind=pb.CONTENT_KIND_PROMPT, id=directory), timeout=20)
        for stub in pair.stubs:
            stub.Load(pb.LoadRequest(digest=result.digest))
        return result

    old = write_prompt(pair.store / "a" / "b.1", 1)
    result = load("a/b.1")
    assert (result.kind, result.num_decoder_tokens, result.num_encoder_tokens) == (1, 3, 0)
    [answer] = stream.send(steps.step([(0, 0, 6)], [under(0, result.digest)]))
    tokens = integers(answer.token_ids)
    new = write_prompt(pair.store / "a" / "b.1", 2)
    again = load("a/b.1")
    assert again.digest != result.digest
    for stub in pair.stubs:
        stub.Unload(pb.UnloadRequest(digests=[result.digest]))
    [answer] = stream.send(steps.step([(0, 6, 7), (1, 0, 6)], [under(1, again.digest)]))
    assert integers(answer.rows) == [0, 1]
    tokens.append(integers(answer.token_ids)[0])
    assert tokens == expected_under(model_path, old, [7, 8, 9], 2)
    assert integers(answer.token_ids)[1:] == expected_under(model_path, new, [7, 8, 9], 1)
    [answer] = stream.send(steps.step([(1, 6, 7), (2, 0, 6)], [under(2, result.digest)]))
    assert integers(answer.rows) == [1]
    assert [error.message for error in answer.errors] == ["its soft prompt is not loaded"]


def test_missing_adapters_are_neither_found_nor_loaded(pair: Pair) -> None:
    for stub in pair.stubs:
        with pytest.raises(grpc.RpcError) as caught:
            stub.Load(pb.LoadRequest(digest="0" * 64))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as caught:
        pair.stubs[0].Find(pb.FindRequest(kind=pb.CONTENT_KIND_PROMPT, id="a/c"), timeout=20)
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.NOT_FOUND,
        "can't retrieve prompt prefix with id 'a/c': prefix id \"a/c\" not found",
    )


def test_ranks_end_on_request(pair: Pair) -> None:
    for shard in pair.shards:
        shard.process.send_signal(signal.SIGTERM)
    assert [shard.process.wait(30) for shard in pair.shards] == [0, 0]


def test_life_of_a_server(model_path: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "shard-0"))
    with started(Shard(model_path, tmp_path / "shard")) as (shard, stub), ExitStack() as stack:
        for path in (shard.socket, steps_path(str(shard.socket))):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stub.Info(pb.InfoRequest()).vocab_size == 99
        first, steps = stack.enter_context(closing(Call(shard))), Steps(16, 32)
        first.send(steps.step([(0, 0, 2)], [open_row(0, [5, 6])]))
        assert len(first.receive(1)[0].token_ids) == 4

        stub.Health(pb.HealthRequest())

        second, steps = stack.enter_context(closing(Call(shard))), Steps(16, 32)
        with pytest.raises(EOFError):
            first.receive(1)
        with pytest.raises(BrokenPipeError):
            first.send(steps.step([(0, 2, 3)]))
        second.send(steps.step([(0, 0, 3)], [open_row(0, [5, 6, 7])]), steps.step([(0, 3, 4)]))
        second.socket.shutdown(socket.SHUT_WR)
        answers = second.receive(2)
        assert [integers(answer.rows) for answer in answers] == [[0], [0]]
        with pytest.raises(EOFError):
            second.receive(1)

        third = stack.enter_context(closing(Call(shard)))
        third.send(steps.step([(0, 4, 5)]))
        with pytest.raises((EOFError, ConnectionResetError)):
            third.receive(1)
        assert shard.process.wait(10) == 1
        log = shard.log.read_text()
        assert "a step failed" in log
        assert "work on a row that is not open" in log
        assert "s: weights and tokenizer take " in log
