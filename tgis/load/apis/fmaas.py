"""Sends requests over `fmaas.GenerationService`, with the Python client."""

import ssl
from itertools import cycle
from typing import Any

from tgis.load.apis.interface import LoadTarget
from tgis.load.errors import AnswerError, LoadError
from tgis.load.records import AnswerReceiver, Prompting
from tgis_client import NO_RETRIES, AsyncClient, CallArguments, CallError, Generation, Parameters, Tls

# Otherwise channels with the same options would share a connection.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
RULE_FIELDS = {"json": "json_schema", "regex": "regex", "choice": "choices"}
CONNECT_TIMEOUT_S = 20.0


class FmaasClient:
    """Client of fmaas. Calls use its channels in turn."""

    def __init__(self, target: LoadTarget) -> None:
        tls = read_tls(target)
        self._model_id = target.model or ""
        self._clients = [
            AsyncClient(
                target.address,
                tls=tls,
                token=target.token,
                retry=NO_RETRIES,
                channel_options=CHANNEL_OPTIONS,
            )
            for _ in range(target.num_channels)
        ]
        self._turns = cycle(self._clients)

    async def open(self) -> None:
        """Connect every channel."""
        try:
            for client in self._clients:
                await client.model_info(model_id=self._model_id, timeout=CONNECT_TIMEOUT_S)
        except CallError as error:
            raise AnswerError(error.code.name) from error

    async def send(self, prompting: Prompting, receiver: AnswerReceiver) -> None:
        arguments: CallArguments = {
            "model_id": self._model_id,
            "adapter_id": prompting.adapter_id,
            "prefix_id": prompting.soft_prompt_id,
        }
        client, parameters = next(self._turns), _parameters(prompting)
        try:
            if not prompting.is_stream:
                _receive(await client.generate(prompting.text, parameters, **arguments), receiver)
                return
            async with client.stream(prompting.text, parameters, **arguments) as stream:
                async for part in stream:
                    _receive(part, receiver)
                receiver.report(None, stream.result.report.cached_tokens)
        except CallError as error:
            raise AnswerError(error.code.name) from error

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


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


def _receive(part: Generation, receiver: AnswerReceiver) -> None:
    receiver.accept()
    receiver.count_tokens(part.generated_token_count)
    receiver.add_text(part.text)
    receiver.report(part.input_token_count, part.report.cached_tokens)


def _parameters(prompting: Prompting) -> Parameters:
    more: dict[str, Any] = {"tokens": prompting.has_token_details}
    if prompting.rule is not None:
        more[RULE_FIELDS[prompting.rule.kind]] = prompting.rule.value
    if prompting.temperature is not None:
        more |= {"temperature": prompting.temperature, "seed": prompting.seed}
        more |= {"top_k": prompting.top_k, "top_p": prompting.top_p}
    if prompting.max_input_tokens is not None:
        more["truncate_input_tokens"] = prompting.max_input_tokens
    if prompting.is_exact:
        more["min_new_tokens"] = prompting.new_tokens
    return Parameters(max_new_tokens=prompting.new_tokens, **more)
