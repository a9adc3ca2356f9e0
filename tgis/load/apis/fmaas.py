"""Sends requests over `fmaas.GenerationService`, with the Python client."""

import ssl
from typing import Any

from tgis.load.apis.channels import ChannelPool
from tgis.load.apis.interface import LoadTarget
from tgis.load.errors import AnswerError, LoadError
from tgis.load.records import AnswerReceiver, Prompting
from tgis_client import (
    NO_RETRIES,
    AsyncClient,
    CallArguments,
    CallError,
    Generation,
    Parameters,
    StopReason,
    Tls,
)

# Otherwise channels with the same options would share a connection.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
RULE_FIELDS = {"json": "json_schema", "regex": "regex", "choice": "choices"}
CONNECT_TIMEOUT_S = 20.0


class FmaasClient:
    """Client of fmaas. Calls of several prompts always have whole answers."""

    def __init__(self, target: LoadTarget) -> None:
        tls = read_tls(target)
        self._model_id = target.model or ""

        def open_client() -> AsyncClient:
            return AsyncClient(
                target.address,
                tls=tls,
                token=target.token,
                retry=NO_RETRIES,
                channel_options=CHANNEL_OPTIONS,
            )

        self._clients = ChannelPool(target, open_client, AsyncClient.aclose)

    async def open(self) -> None:
        """Connect every channel."""
        try:
            for client in self._clients.channels:
                await client.model_info(model_id=self._model_id, timeout=CONNECT_TIMEOUT_S)
        except CallError as error:
            raise AnswerError(error.code.name, error.details) from error

    async def send(self, prompting: Prompting, receiver: AnswerReceiver) -> None:
        arguments: CallArguments = {
            "model_id": self._model_id,
            "adapter_id": prompting.adapter_id,
            "prefix_id": prompting.soft_prompt_id,
        }
        is_stream = prompting.is_stream and not prompting.more_texts
        receive = _receive_stream if is_stream else _receive_whole
        async with self._clients.lease() as client:
            try:
                await receive(client, prompting, arguments, receiver)
            except CallError as error:
                raise AnswerError(error.code.name, error.details) from error

    async def close(self) -> None:
        await self._clients.close()


async def _receive_stream(
    client: AsyncClient, prompting: Prompting, arguments: CallArguments, receiver: AnswerReceiver
) -> None:
    async with client.stream(prompting.text, _parameters(prompting), **arguments) as stream:
        async for part in stream:
            receiver.accept()
            receiver.add_text(part.text)
            receiver.count_tokens(part.generated_token_count)
            receiver.report(part.input_token_count, part.report.cached_tokens)
            _receive_end(part, 0, receiver)
        receiver.report(None, stream.result.report.cached_tokens)


async def _receive_whole(
    client: AsyncClient, prompting: Prompting, arguments: CallArguments, receiver: AnswerReceiver
) -> None:
    texts = await client.generate_batch(prompting.texts, _parameters(prompting), **arguments)
    receiver.count_tokens(sum(text.generated_token_count for text in texts))
    receiver.report(sum(text.input_token_count for text in texts), texts[0].report.cached_tokens)
    for number, text in enumerate(texts):
        receiver.add_text(text.text, number)
        _receive_end(text, number, receiver)


def _receive_end(part: Generation, number: int, receiver: AnswerReceiver) -> None:
    if part.stop_reason is not StopReason.NOT_FINISHED:
        receiver.end(part.stop_reason.name.lower(), number)


def read_tls(target: LoadTarget) -> Tls | None:
    """Return the credentials of channels. Raises LoadError if a file cannot be used."""
    if not target.is_tls:
        return None
    tls = Tls(ca_cert=target.ca_cert, cert=target.cert, key=target.key)
    try:
        tls.read()
    except (OSError, ssl.SSLError) as error:
        raise LoadError(f"a TLS file cannot be used: {error}") from error
    return tls


def _parameters(prompting: Prompting) -> Parameters:
    more: dict[str, Any] = {"tokens": prompting.has_token_details}
    if prompting.rule is not None:
        more[RULE_FIELDS[prompting.rule.kind]] = prompting.rule.value
    if prompting.temperature is not None:
        more |= {"temperature": prompting.temperature, "seed": prompting.seed}
        more |= {"top_k": prompting.top_k, "top_p": prompting.top_p}
    if prompting.repetition_penalty is not None:
        more["repetition_penalty"] = prompting.repetition_penalty
    if prompting.max_input_tokens is not None:
        more["truncate_input_tokens"] = prompting.max_input_tokens
    if prompting.is_exact:
        more["min_new_tokens"] = prompting.new_tokens
    return Parameters(max_new_tokens=prompting.new_tokens, **more)
