"""Sends requests over vLLM's engine API, `vllm.grpc.engine.VllmEngine`."""

import asyncio
import io
import json
import zipfile
from typing import Any

import grpc
import grpc.aio
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from tgis.load.apis.channels import UNAVAILABLE, ChannelPool
from tgis.load.apis.fmaas import CHANNEL_OPTIONS, CONNECT_TIMEOUT_S, read_tls
from tgis.load.apis.interface import LoadTarget
from tgis.load.errors import AnswerError
from tgis.load.records import AnswerReceiver, Prompting

SERVICE = "/vllm.grpc.engine.VllmEngine"
TOKENIZER_FILE = "tokenizer.json"


class EngineApiClient:
    """Client of the engine API. Its answers have token ids, which the service's tokenizer makes a text."""

    def __init__(self, target: LoadTarget) -> None:
        self._target = target
        self._channels: ChannelPool[grpc.aio.Channel] | None = None
        self._metadata = (("authorization", f"Bearer {target.token}"),) if target.token else ()
        self._tokenizer: Tokenizer | None = None

    async def open(self) -> None:
        self._channels = ChannelPool(self._target, self._open_channel, lambda channel: channel.close())
        channels = self._channels.channels
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                for channel in channels:
                    await channel.channel_ready()
                self._tokenizer = await self._read_tokenizer(channels[0])
        except TimeoutError as error:
            raise AnswerError(UNAVAILABLE) from error
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise AnswerError(error.code().name, error.details() or "") from error

    def _open_channel(self) -> grpc.aio.Channel:
        target = self._target
        tls = read_tls(self._target)
        if tls is None:
            return grpc.aio.insecure_channel(target.address, CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(target.address, tls.read(), CHANNEL_OPTIONS)

    async def _read_tokenizer(self, channel: grpc.aio.Channel) -> Tokenizer | None:
        method: Any = channel.unary_stream(
            f"{SERVICE}/GetTokenizer",
            common_pb2.GetTokenizerRequest.SerializeToString,
            common_pb2.GetTokenizerChunk.FromString,
        )
        chunks = method(common_pb2.GetTokenizerRequest(), metadata=self._metadata)
        data = b"".join([chunk.data async for chunk in chunks])
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                return Tokenizer.from_str(archive.read(TOKENIZER_FILE).decode())
        except (KeyError, zipfile.BadZipFile):
            return None

    async def send(self, prompting: Prompting, receiver: AnswerReceiver) -> None:
        assert self._channels is not None, "it is opened before the first call"
        ids: list[int] = []
        async with self._channels.lease() as channel:
            method: Any = channel.unary_stream(
                f"{SERVICE}/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
            )
            call = method(_request(prompting), metadata=self._metadata)
            try:
                async for message in call:
                    ids += _receive(message, receiver)
            except grpc.aio.AioRpcError as error:
                raise AnswerError(error.code().name, error.details() or "") from error
            finally:
                call.cancel()
        receiver.add_text(self._decode(ids, prompting))

    def _decode(self, ids: list[int], prompting: Prompting) -> str:
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(ids))
        if prompting.rule is not None:
            raise AnswerError("the service does not hand out its tokenizer, which the check of texts needs")
        return " ".join(map(str, ids))

    async def close(self) -> None:
        if self._channels is not None:
            await self._channels.close()


def _receive(message: pb.GenerateResponse, receiver: AnswerReceiver) -> list[int]:
    """Return the ids of the message that no message before has."""
    if message.HasField("chunk"):
        receiver.add_tokens(len(message.chunk.token_ids))
        return list(message.chunk.token_ids)
    done = message.complete
    ids = list(done.output_ids) if not receiver.record.counts else []
    receiver.count_tokens(done.completion_tokens)
    receiver.report(done.prompt_tokens, done.cached_tokens)
    receiver.end(done.finish_reason)
    return ids


def _request(prompting: Prompting) -> pb.GenerateRequest:
    params = pb.SamplingParams(max_tokens=prompting.new_tokens, temperature=0.0, n=1, top_p=1.0)
    if prompting.temperature is not None:
        params.temperature, params.seed = prompting.temperature, prompting.seed
        params.top_k = prompting.top_k or 0
        params.top_p = prompting.top_p or 1.0
    if prompting.repetition_penalty is not None:
        params.repetition_penalty = prompting.repetition_penalty
    if prompting.max_input_tokens is not None:
        params.truncate_prompt_tokens = prompting.max_input_tokens
    if prompting.is_exact:
        params.min_tokens = prompting.new_tokens
        params.ignore_eos = True
    _add_rule(params, prompting)
    return pb.GenerateRequest(text=prompting.text, stream=prompting.is_stream, sampling_params=params)


def _add_rule(params: pb.SamplingParams, prompting: Prompting) -> None:
    rule = prompting.rule
    if rule is not None and rule.kind == "choice":
        params.choice.choices.extend(rule.value)
    elif rule is not None and rule.kind == "regex":
        params.regex = rule.value
    elif rule is not None:
        params.json_schema = rule.value if isinstance(rule.value, str) else json.dumps(rule.value)
