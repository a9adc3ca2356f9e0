"""The `langchain-openai` package: a chat model that is invoked, streams, returns structured output and calls
tools, and an agent of `langgraph`."""

import asyncio
import functools
import operator
from collections.abc import Iterable
from typing import Any, Literal

import pydantic
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from integration_tests.clients.expectations import Check, Served, run
from integration_tests.clients.tools_for_models import Clock, Forecast

QUESTION = "once upon a time"


class Verdict(pydantic.BaseModel):
    """Description of the structured output."""

    animal: Literal["fox", "dog"]
    is_quick: bool


def connect(served: Served, **more: Any) -> ChatOpenAI:
    settings = {
        "base_url": served.base_url,
        "api_key": served.api_key,
        "model": served.model,
        "max_retries": 0,
    }
    return ChatOpenAI(**{**settings, "temperature": 0, **more})


def a_chat_is_invoked(served: Served) -> None:
    for chat in served.chats[:4]:
        answer = connect(served, max_tokens=chat.answer.max_tokens).invoke(chat.messages)
        assert answer.content == chat.answer.text
        usage = answer.usage_metadata
        assert usage is not None
        assert usage["input_tokens"] == len(chat.answer.ids)
        assert usage["output_tokens"] == len(chat.answer.output_ids)
        assert answer.response_metadata["finish_reason"] == chat.answer.finish_reason


def a_chat_streams(served: Served) -> None:
    for chat in served.chats[:4]:
        model = connect(served, max_tokens=chat.answer.max_tokens, stream_usage=True)
        parts = list(model.stream(chat.messages))
        assert "".join(str(part.content) for part in parts) == chat.answer.text
        assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) == len(
            chat.answer.output_ids
        )


def a_batch_is_async(served: Served) -> None:
    chats = [chat for chat in served.chats if chat.answer.max_tokens == served.chats[0].answer.max_tokens][:8]
    model = connect(served, max_tokens=chats[0].answer.max_tokens)
    answers = asyncio.run(model.abatch([chat.messages for chat in chats]))
    assert [answer.content for answer in answers] == [chat.answer.text for chat in chats]


def answers_have_a_schema(served: Served) -> None:
    model = connect(served, temperature=1, seed=3).with_structured_output(Verdict, method="json_schema")
    assert isinstance(model.invoke(served.chats[0].messages), Verdict)


def tools_are_bound(served: Served) -> None:
    model = connect(served, temperature=1, seed=5, max_tokens=400)
    bound = model.bind_tools([Forecast, Clock], tool_choice="any", strict=True)
    answer = bound.invoke(QUESTION)
    assert isinstance(answer, AIMessage)
    assert answer.tool_calls
    assert not answer.invalid_tool_calls
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    streamed = sum_chunks(bound.stream(QUESTION))
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [
        (call["name"], call["args"]) for call in answer.tool_calls
    ]
    verdict = connect(served, seed=5, temperature=1).with_structured_output(
        Verdict, method="function_calling"
    )
    assert isinstance(verdict.invoke(QUESTION), Verdict)


def sum_chunks(chunks: Iterable[Any]) -> AIMessageChunk:
    whole = functools.reduce(operator.add, chunks)
    assert isinstance(whole, AIMessageChunk)
    return whole


def an_agent_answers_with_its_tools(served: Served) -> None:
    """The model must call a tool first, and must not call one after its result."""
    called = []

    @tool("Forecast", args_schema=Forecast)
    def forecast(city: str, days: int) -> str:
        """Return the weather of a city."""
        called.append(f"dry in {city} for {days} days")
        return called[-1]

    def ask(state: MessagesState) -> dict[str, Any]:
        choice = "none" if called else "required"
        model = connect(served, temperature=1, seed=6, max_tokens=200)
        bound = model.bind_tools([forecast], tool_choice=choice, parallel_tool_calls=False, strict=True)
        return {"messages": [bound.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([forecast]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    messages = graph.compile().invoke({"messages": [("user", QUESTION)]})["messages"]
    assert [type(message) for message in messages] == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert [messages[2].content] == called
    assert messages[2].tool_call_id == messages[1].tool_calls[0]["id"]
    assert messages[3].content


def a_text_is_completed(served: Served) -> None:
    for wanted in served.completions[:4]:
        model = OpenAI(
            base_url=served.base_url,
            api_key=served.api_key,  # type: ignore[arg-type]
            model=served.model,
            temperature=0,
            max_tokens=wanted.max_tokens,
        )
        assert model.invoke(wanted.prompt) == wanted.text


CHECKS: list[Check] = [
    a_chat_is_invoked,
    a_chat_streams,
    a_batch_is_async,
    answers_have_a_schema,
    tools_are_bound,
    an_agent_answers_with_its_tools,
    a_text_is_completed,
]

if __name__ == "__main__":
    run(CHECKS)
