"""LLM for LangChain. This needs langchain-core: the extra `langchain`."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation as LangChainGeneration
from langchain_core.outputs import GenerationChunk, LLMResult
from pydantic import ConfigDict, Field

from tgis_client.arguments import CallArguments
from tgis_client.async_client import AsyncClient
from tgis_client.client import Client
from tgis_client.connection import DEFAULT_TARGET
from tgis_client.parameters import Parameters
from tgis_client.results import Generation

_NAMES = frozenset(each.name for each in fields(Parameters))


class TgisLLM(BaseLLM):
    """Text model behind `fmaas.GenerationService`."""

    model_config = ConfigDict(arbitrary_types_allowed=True, ignored_types=(cached_property,))

    target: str = DEFAULT_TARGET
    parameters: Parameters = Parameters()
    settings: dict[str, Any] = Field(default_factory=dict, exclude=True, repr=False)
    """ClientSettings: TLS, token, retries."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """CallArguments of every call, such as `prefix_id`."""

    @property
    def _llm_type(self) -> str:
        return "tgis"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Properties that decide on the text, for LangChain's caches and traces."""
        return {"target": self.target, "parameters": self.parameters, "arguments": self.arguments}

    @cached_property
    def _client(self) -> Client:
        return Client(self.target, **self.settings)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **more: Any,
    ) -> LLMResult:
        parameters, arguments = self._arguments(stop, more)
        return _to_result(self._client.generate_batch(prompts, parameters, **arguments))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **more: Any,
    ) -> LLMResult:
        parameters, arguments = self._arguments(stop, more)
        # LangChain does not say in which event loop it calls.
        async with AsyncClient(self.target, **self.settings) as client:
            return _to_result(await client.generate_batch(prompts, parameters, **arguments))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **more: Any,
    ) -> Iterator[GenerationChunk]:
        parameters, arguments = self._arguments(stop, more)
        with self._client.stream(prompt, parameters, **arguments) as parts:
            for part in parts:
                chunk = _to_chunk(part)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **more: Any,
    ) -> AsyncIterator[GenerationChunk]:
        parameters, arguments = self._arguments(stop, more)
        async with AsyncClient(self.target, **self.settings) as client:
            async with client.stream(prompt, parameters, **arguments) as parts:
                async for part in parts:
                    chunk = _to_chunk(part)
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def get_num_tokens(self, text: str) -> int:
        return self._client.tokenize([text], tokens=False)[0].token_count

    def get_token_ids(self, text: str) -> list[int]:
        return list(self._client.tokenize([text], token_ids=True)[0].token_ids)

    def _arguments(self, stop: list[str] | None, more: dict[str, Any]) -> tuple[Parameters, CallArguments]:
        """Split LangChain's keyword arguments into parameters and arguments of the call."""
        given = {name: value for name, value in more.items() if name in _NAMES}
        if stop is not None:
            given["stop_sequences"] = stop
        arguments = {name: value for name, value in more.items() if name in CallArguments.__annotations__}
        return replace(self.parameters, **given), cast(CallArguments, {**self.arguments, **arguments})


def _info(generation: Generation) -> dict[str, Any]:
    return {
        "finish_reason": generation.stop_reason.name.lower(),
        "input_token_count": generation.input_token_count,
        "generated_token_count": generation.generated_token_count,
    }


def _to_result(generations: list[Generation]) -> LLMResult:
    rows = [[LangChainGeneration(text=each.text, generation_info=_info(each))] for each in generations]
    usage = {
        "prompt_tokens": sum(each.input_token_count for each in generations),
        "completion_tokens": sum(each.generated_token_count for each in generations),
    }
    usage["total_tokens"] = sum(usage.values())
    return LLMResult(generations=rows, llm_output={"token_usage": usage})


def _to_chunk(part: Generation) -> GenerationChunk:
    """Return a part of a stream. LangChain joins the information of chunks, so only the last has some."""
    return GenerationChunk(text=part.text, generation_info=_info(part) if part.stop_reason else None)
