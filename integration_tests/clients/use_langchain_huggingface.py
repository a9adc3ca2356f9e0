"""`langchain-huggingface`: its endpoint class with TGI's API. Its defaults set top-p and typical-p."""

import asyncio
from typing import Any

from langchain_huggingface import HuggingFaceEndpoint

from integration_tests.clients.expectations import Check, Completion, Served, run


def connect(served: Served, **settings: Any) -> HuggingFaceEndpoint:
    """It sends a token only to Hugging Face's own endpoints; a header is sent everywhere."""
    return HuggingFaceEndpoint(
        endpoint_url=f"{served.root}/",
        task="text-generation",
        server_kwargs={"headers": served.headers},
        **settings,
    )


def greedy(asked: Completion) -> dict[str, Any]:
    unset = {"temperature": None, "top_p": None, "typical_p": None}
    return {"max_new_tokens": asked.max_tokens, "do_sample": False, **unset}


def whole(served: Served) -> list[Completion]:
    """Return the responses whose stream shows no special token."""
    return [asked for asked in served.completions if asked.finish_reason == "length"]


def a_prompt_is_completed(served: Served) -> None:
    for asked in whole(served)[:4]:
        assert connect(served, **greedy(asked)).invoke(asked.prompt) == asked.text


def a_prompt_streams(served: Served) -> None:
    for asked in whole(served)[:4]:
        endpoint = connect(served, streaming=True, **greedy(asked))
        assert "".join(endpoint.stream(asked.prompt)) == asked.text
        assert endpoint.invoke(asked.prompt) == asked.text


def prompts_are_completed_async(served: Served) -> None:
    async def ask() -> None:
        for asked in whole(served)[:3]:
            endpoint = connect(served, **greedy(asked))
            assert await endpoint.ainvoke(asked.prompt) == asked.text
            assert "".join([part async for part in endpoint.astream(asked.prompt)]) == asked.text

    asyncio.run(ask())


def its_defaults_sample_by_seed(served: Served) -> None:
    endpoint = connect(served, max_new_tokens=12, top_k=10, repetition_penalty=1.03, seed=5)
    assert endpoint.invoke("once upon a time") == endpoint.invoke("once upon a time")


def a_stop_text_is_cut(served: Served) -> None:
    asked = next(asked for asked in whole(served) if len(asked.text) > 12)
    stop = asked.text[4:6]
    text = connect(served, **greedy(asked)).invoke(asked.prompt, stop=[stop])
    assert text == asked.text[: asked.text.index(stop)]


CHECKS: list[Check] = [
    a_prompt_is_completed,
    a_prompt_streams,
    prompts_are_completed_async,
    its_defaults_sample_by_seed,
    a_stop_text_is_cut,
]

if __name__ == "__main__":
    run(CHECKS)
