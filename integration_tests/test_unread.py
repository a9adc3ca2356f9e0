"""A launched service with full logging, while shards and router fail during marked prompts: no word of them
is logged or left in files."""

import urllib.request
from pathlib import Path
from typing import NoReturn

import grpc
import pytest

from integration_tests.support.greedy_answers import Model
from integration_tests.support.service import Client, launch
from tgis.pb import generation_pb2 as pb

pytestmark = pytest.mark.slow

MARK = "mArKeD"
TOKEN = f"token-{MARK}"
METADATA = [("authorization", f"Bearer {TOKEN}"), ("x-api-key", MARK)]
# Faults of every kind, one after the other; the last one is the router's, and ends the service.
FAULTS = [
    "shard.before_forward[epoch=1]=raise@9",
    "shard.before_forward[epoch=2]=oom@9",
    "shard.before_answer[epoch=2]=garbage@20",
    "shard.before_forward[epoch=3]=kill@9",
    "router.before_step=raise@400",
]


def ask_for_ever(client: Client, outputs: list[str], metrics: list[str]) -> NoReturn:
    parameters = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=60, min_new_tokens=60))
    prompt = pb.GenerationRequest(text=f"girl {MARK} bread")
    message = pb.SingleGenerationRequest(request=prompt, params=parameters)
    while True:
        stream = client.stub.GenerateStream(message, metadata=METADATA, timeout=120)
        outputs.append("".join(part.text for part in stream))
        with urllib.request.urlopen(f"{client.service.http}/metrics", timeout=10) as response:
            metrics.append(response.read().decode())


def test_by_anybody(model: Model, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(TOKEN)
    flags = ["--auth-tokens-path", str(tmp_path / "tokens"), "--failpoints", ",".join(FAULTS)]
    flags += ["--termination-log", str(tmp_path / "log"), "--dtype", "float32", "--log-level", "debug"]
    service = launch(model.directory, *flags, "--prefix-store-path", str(tmp_path)).wait_until_serving(240)
    client, outputs, metrics = Client(service), list[str](), list[str]()
    with client.channel, pytest.raises(grpc.RpcError):
        ask_for_ever(client, outputs, metrics)
    assert service.process.wait(20) == 1
    assert service.end() == 1
    printed = service.output
    for word in ("DEBUG", "Traceback", "a step failed", "was killed by SIGKILL", "InjectedError"):
        assert word in printed, word
    assert len(outputs) >= 4
    assert "shard_restarts 3" in metrics[-1]
    for secret in (MARK, outputs[0][:20]):
        for shown in (printed, *metrics, (tmp_path / "log").read_text()):
            assert secret not in shown
