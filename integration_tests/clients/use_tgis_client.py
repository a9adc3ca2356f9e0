"""`tgis-next-client` with LangChain: the model is invoked, streams, runs batches, and is part of a chain."""

import asyncio
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from integration_tests.clients.expectations import Check, Completion, Served, run
from tgis_client import Parameters
from tgis_client.langchain import TgisLLM


def connect(served: Served, asked: Completion, **more: Any) -> TgisLLM:
    parameters = Parameters(max_new_tokens=asked.max_tokens)
    return TgisLLM(
        target=served.grpc_target, parameters=parameters, settings={"token": served.api_key}, **more
    )


def a_prompt_is_completed(served: Served) -> None:
    for asked in served.completions[:6]:
        model = connect(served, asked)
        assert model.invoke(asked.prompt) == asked.text
        assert asyncio.run(model.ainvoke(asked.prompt)) == asked.text


def a_stream_has_several_chunks(served: Served) -> None:
    for asked in served.completions[:4]:
        model = connect(served, asked)
        chunks = list(model.stream(asked.prompt))
        assert "".join(chunks) == asked.text
        assert len(chunks) > 2

        async def stream(model: TgisLLM = model, asked: Completion = asked) -> list[str]:
            return [chunk async for chunk in model.astream(asked.prompt)]

        assert "".join(asyncio.run(stream())) == asked.text


def a_batch_is_one_call(served: Served) -> None:
    limit = min(asked.max_tokens for asked in served.completions)
    some = served.completions[:5]
    model = connect(served, some[0]).bind(max_new_tokens=limit)
    texts = model.batch([asked.prompt for asked in some])
    assert all(asked.text.startswith(text) for asked, text in zip(some, texts, strict=True))
    assert asyncio.run(model.abatch([asked.prompt for asked in some])) == texts
    result = connect(served, some[0]).generate([asked.prompt for asked in some[:2]])
    usage = result.llm_output["token_usage"]
    assert usage["prompt_tokens"] == sum(len(asked.ids) for asked in some[:2])
    assert result.generations[0][0].generation_info["finish_reason"] in ("max_tokens", "eos_token")


class Heard(BaseCallbackHandler):
    """Handler that keeps the tokens it is called with."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        self.tokens.append(token)


def callbacks_hear_every_chunk(served: Served) -> None:
    asked, heard = served.completions[0], Heard()
    list(connect(served, asked).stream(asked.prompt, config={"callbacks": [heard]}))
    assert "".join(heard.tokens) == asked.text


def keyword_arguments_replace_parameters(served: Served) -> None:
    asked = served.completions[0]
    model = connect(served, asked)
    assert asked.text.startswith(model.invoke(asked.prompt, max_new_tokens=2))
    stop = asked.text[2:4]
    assert model.invoke(asked.prompt, stop=[stop]) == asked.text[: asked.text.index(stop) + len(stop)]
    seeded = [model.invoke(asked.prompt, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]


def a_model_is_part_of_a_chain(served: Served) -> None:
    asked = served.completions[0]
    template = PromptTemplate.from_template("{text}")
    chain = template | connect(served, asked) | StrOutputParser()
    assert chain.invoke({"text": asked.prompt}) == asked.text


def tokens_are_counted(served: Served) -> None:
    asked = served.completions[0]
    model = connect(served, asked)
    assert model.get_token_ids(asked.prompt) == asked.ids
    assert model.get_num_tokens(asked.prompt) == len(asked.ids)


CHECKS: list[Check] = [
    a_prompt_is_completed,
    a_stream_has_several_chunks,
    a_batch_is_one_call,
    callbacks_hear_every_chunk,
    keyword_arguments_replace_parameters,
    a_model_is_part_of_a_chain,
    tokens_are_counted,
]

if __name__ == "__main__":
    run(CHECKS)
