"""Sends requests with one shared sampling parameter, and prints as JSON what each part of the service does
with it.

Run it as `python -m tests.support.router.parameter_report NAME VALUE BAD_VALUE DIRECTORY`."""

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import torch
from click.testing import CliRunner
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import add_TraceServiceServicer_to_server
from torch import Tensor

from scripts import wire_page
from tests.support.canned_service import CannedService, serve
from tests.support.cuda.interpreter import interpreted_modules
from tests.support.cuda.sampled_rows import make_state
from tests.support.http_exchange import exchange
from tests.support.router.engine_pair import Scene
from tests.support.router.served_grpc import open_grpc, status_of
from tests.support.router.served_http import MODEL, open_http
from tests.support.trace_collector import Collector, values
from tgis.cli.client.command import command as client
from tgis.pb import generation_pb2 as pb
from tgis.pb import shard_pb2
from tgis.router.api.lmi.parameters import LmiParameters, to_parameters
from tgis.router.requests.tracing import open_tracing
from tgis.sampling_parameters import PARAMETERS
from tgis.shard.kernels.cuda import sample as device_sample
from tgis.shard.kernels.cuda.step_state import Word
from tgis.shard.runner.columns import ROW, read_row
from tgis.shard.runner.device.device_rows import make_words
from tgis.shard.sampling import sampler

VOCAB_SIZE = 16
TEMPERATURE = 0.5
Report = dict[str, Any]


def main(name: str, value: str, bad_value: str, directory: str) -> None:
    asyncio.run(_report(name, float(value), float(bad_value), Path(directory)))


async def _report(name: str, value: float, bad: float, directory: Path) -> None:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(collector, server)
    tracing = open_tracing(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", "s")
    server.start()
    report: Report = {}
    for api, ask in {"fmaas": _ask_fmaas, "openai": _ask_openai}.items():
        (directory / api).mkdir()
        report[api] = await ask(name, value, bad, directory / api, tracing)
    await asyncio.to_thread(tracing.close)
    server.stop(None).wait()
    report["spans"] = [values(span.attributes) for span in collector.spans]
    report["client"] = _client(name, value)
    report["lmi"] = getattr(to_parameters(msgspec.convert({name: value}, LmiParameters), False, False), name)
    report["page"] = wire_page.render()
    print(json.dumps(report))


async def _ask_fmaas(name: str, value: float, bad: float, directory: Path, tracing: Any) -> Report:
    key = f"tgis-{name.replace('_', '-')}"
    sampling = pb.SamplingParameters(temperature=TEMPERATURE)
    request = pb.SingleGenerationRequest(
        request=pb.GenerationRequest(text="5 6 7"),
        params=pb.Parameters(
            method=pb.SAMPLE, sampling=sampling, stopping=pb.StoppingCriteria(max_new_tokens=2)
        ),
    )
    async with open_grpc(directory, tracing=tracing) as served:
        stub = served.stub
        status, _ = await status_of(stub.GenerateStream(request, metadata=[(key, str(value))]))
        assert status is grpc.StatusCode.OK
        refusal = await status_of(stub.GenerateStream(request, metadata=[(key, str(bad))]))
        return {"refusal": [refusal[0].name, refusal[1]], **_seen_by_shard(name, served.scene)}


async def _ask_openai(name: str, value: float, bad: float, directory: Path, tracing: Any) -> Report:
    body = {"model": MODEL, "prompt": "5 6 7", "max_tokens": 2, "temperature": TEMPERATURE}
    async with open_http(directory, tracing=tracing) as served:

        async def ask(path: str, body: Any = None) -> Any:
            return await asyncio.to_thread(exchange, served.url + path, body)

        reply = await ask("/v1/completions", body | {name: value})
        assert reply.status == 200, reply.text
        refusal = await ask("/v1/completions", body | {name: bad})
        schemas = (await ask("/openapi.json")).json["components"]["schemas"]
        return {
            "refusal": [refusal.status, refusal.json["error"]["param"], refusal.json["error"]["message"]],
            "schema": schemas["CompletionRequest"]["properties"][name],
            **_seen_by_shard(name, served.scene),
        }


def _seen_by_shard(name: str, scene: Scene) -> Report:
    """Return the counted parameters, the value that the shard received, and the logits that its samplers draw
    from."""
    message = scene.shard.last_opened
    assert message is not None
    counted = {label: count for (label,), count in scene.metrics.request_parameter_count.values().items()}
    return {
        "counted": counted,
        "received": getattr(message.sampling, name),
        "logits": _logits().tolist(),
        "cpu": _sample_on_cpu(message).tolist(),
        "device": _sample_on_device(message, device_sample.plain).tolist(),
        "kernel": _sample_on_device(message, interpreted_modules()["sample"].launch).tolist(),
    }


def _logits() -> Tensor:
    return torch.linspace(-2, 2, VOCAB_SIZE).view(1, VOCAB_SIZE)


def _row(message: shard_pb2.OpenRow) -> Any:
    rows = np.zeros(1, ROW)
    rows[0] = read_row(message)
    return rows


def _sample_on_cpu(message: shard_pb2.OpenRow) -> Tensor:
    rows, logits = _row(message), _logits()
    batch = sampler.SamplingBatch(
        rows=np.zeros(1, np.int64),
        params=rows[list(sampler.ROW_PARAMETERS.names)],
        num_generated=np.zeros(1, np.int64),
        positions=rows["length"],
        token_ids=np.zeros((1, 8), np.int32),
        eos_token_ids=np.full((1, 1), -1, np.int32),
        wants_details=np.ones(1, np.bool_),
    )
    sampler.sample(logits, batch, sampler.SeenTokens(VOCAB_SIZE, torch.device("cpu")))
    return logits


def _sample_on_device(message: shard_pb2.OpenRow, sample: Any) -> Tensor:
    rows, logits, state = _row(message), _logits(), make_state(1, VOCAB_SIZE)
    others = {word.name.lower() for word in Word} - {*ROW.names}
    words = make_words(rows, **{name: np.zeros(1, np.int64) for name in others})
    state.words[0] = torch.from_numpy(words[0])
    state.token_counts.zero_()
    state.bias_token_ids.fill_(-1)
    with np.errstate(all="ignore"):
        sample(logits, state, torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32))
    return logits


def _client(name: str, value: float) -> Report:
    """Return the help of the client's option and the request that it sends."""
    service, option = CannedService(), f"--{name.replace('_', '-')}"
    runner = CliRunner()
    help_text = runner.invoke(client, ["generate", "--help"]).output
    with serve(service) as target:
        result = runner.invoke(client, ["generate", "x", option, str(value), "--target", target])
    assert result.exit_code == 0, result.output
    sent = {key: text for key, text in service.metadata[0].items() if key.startswith("tgis-")}
    [declared] = [each for each in PARAMETERS if each.name == name]
    has_help = " ".join(declared.help.split()) in " ".join(help_text.split())
    return {"has_help": has_help, "metadata": sent, "method": service.asked[0].params.method}


if __name__ == "__main__":
    main(*sys.argv[1:])
