"""Sends requests over `fmaas.GenerationService`, with the Python client."""

from itertools import cycle
from typing import Any

from tgis.load.apis.interface import LoadTarget
from tgis.load.errors import AnswerError
from tgis.load.records import AnswerReceiver, Prompting
from tgis_client import NO_RETRIES, AsyncClient, CallArguments, CallError, Parameters, Tls

# Otherwise channels with the same options would share a connection.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
RULE_FIELDS = {"json": "json_schema", "regex": "regex", "choice": "choices"}
CONNECT_TIMEOUT_S = 20.0


class FmaasClient:
    """Client of fmaas. Calls use its channels in turn."""

    def __init__(self, target: LoadTarget) -> None:
        tls = Tls(ca_cert=target.ca_cert, cert=target.cert, key=target.key) if target.is_tls else None
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
        stream = next(self._turns).stream(prompting.text, _parameters(prompting), **arguments)
        try:
            async with stream:
                async for part in stream:
                    receiver.count_tokens(part.generated_token_count)
                    receiver.add_text(part.text)
                result = stream.result
        except CallError as error:
            raise AnswerError(error.code.name) from error
        receiver.report(result.input_token_count, result.report.cached_tokens)

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


def _parameters(prompting: Prompting) -> Parameters:
    more: dict[str, Any] = {}
    if prompting.rule is not None:
        more[RULE_FIELDS[prompting.rule.kind]] = prompting.rule.value
    if prompting.temperature is not None:
        more |= {"temperature": prompting.temperature, "seed": prompting.seed}
    if prompting.is_exact:
        more["min_new_tokens"] = prompting.new_tokens
    return Parameters(max_new_tokens=prompting.new_tokens, **more)
