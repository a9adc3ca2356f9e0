"""Sends requests over vLLM's engine API, `vllm.grpc.engine.VllmEngine`."""

import asyncio
import json
from itertools import count
from typing import Any

import grpc
import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tgis.load.apis.fmaas import CHANNEL_OPTIONS, CONNECT_TIMEOUT_S
from tgis.load.apis.interface import LoadTarget
from tgis.load.errors import AnswerError
from tgis.load.records import AnswerReceiver, Prompting
from tgis_client import Tls

METHOD = "/vllm.grpc.engine.VllmEngine/Generate"


class EngineApiClient:
    """Client of the engine API. Its answers have token ids, no texts."""

    def __init__(self, target: LoadTarget) -> None:
        self._target = target
        self._channels: list[grpc.aio.Channel] = []
        self._metadata = (("authorization", f"Bearer {target.token}"),) if target.token else ()
        self._numbers = count()

    async def open(self) -> None:
        self._channels = [self._open_channel() for _ in range(self._target.num_channels)]
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                for channel in self._channels:
                    await channel.channel_ready()
        except TimeoutError as error:
            raise AnswerError("UNAVAILABLE") from error

    def _open_channel(self) -> grpc.aio.Channel:
        target = self._target
        if not target.is_tls:
            return grpc.aio.insecure_channel(target.address, CHANNEL_OPTIONS)
        credentials = Tls(ca_cert=target.ca_cert, cert=target.cert, key=target.key).read()
        return grpc.aio.secure_channel(target.address, credentials, CHANNEL_OPTIONS)

    async def send(self, prompting: Prompting, receiver: AnswerReceiver) -> None:
        channel = self._channels[next(self._numbers) % len(self._channels)]
        method: Any = channel.unary_stream(
            METHOD, pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )
        try:
            async for message in method(_request(prompting), metadata=self._metadata):
                _receive(message, receiver)
        except grpc.aio.AioRpcError as error:
            raise AnswerError(error.code().name) from error

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def _receive(message: pb.GenerateResponse, receiver: AnswerReceiver) -> None:
    if message.HasField("chunk"):
        receiver.add_tokens(len(message.chunk.token_ids))
        receiver.add_text("".join(f" {id}" for id in message.chunk.token_ids))
        return
    done = message.complete
    receiver.count_tokens(done.completion_tokens)
    receiver.report(done.prompt_tokens, done.cached_tokens)


def _request(prompting: Prompting) -> pb.GenerateRequest:
    params = pb.SamplingParams(max_tokens=prompting.new_tokens, temperature=0.0, n=1, top_p=1.0)
    if prompting.temperature is not None:
        params.temperature, params.seed = prompting.temperature, prompting.seed
    if prompting.is_exact:
        params.min_tokens, params.ignore_eos = prompting.new_tokens, True
    rule = prompting.rule
    if rule is not None and rule.kind == "choice":
        params.choice.choices.extend(rule.value)
    elif rule is not None and rule.kind == "regex":
        params.regex = rule.value
    elif rule is not None:
        params.json_schema = rule.value if isinstance(rule.value, str) else json.dumps(rule.value)
    return pb.GenerateRequest(text=prompting.text, stream=True, sampling_params=params)
