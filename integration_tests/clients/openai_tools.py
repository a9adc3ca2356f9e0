"""The `openai` package: tool loops, parsed arguments, and reasoning, streamed and whole."""

from typing import Any

import openai

from integration_tests.clients.expectations import Check, Served
from integration_tests.clients.tools_for_models import Clock, Forecast, run_tool


def connect(served: Served, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(
        **{"base_url": served.base_url, "api_key": served.api_key, "max_retries": 0, **settings}
    )


def a_tool_is_called_and_its_result_is_answered(served: Served) -> None:
    """Each round also streams the response that it has received as a whole."""
    tools = [openai.pydantic_function_tool(Forecast), openai.pydantic_function_tool(Clock)]
    with connect(served) as client:
        for seed in range(6):
            messages: list[Any] = [{"role": "user", "content": "once upon a time"}]
            fields: dict[str, Any] = {"tools": tools, "temperature": 1, "seed": seed, "max_tokens": 400}
            fields |= {"parallel_tool_calls": seed % 2 == 0, "tool_choice": "required"}
            answer = client.chat.completions.create(model=served.model, messages=messages, **fields)
            [choice] = answer.choices
            calls = choice.message.tool_calls or []
            assert choice.finish_reason == "tool_calls", answer
            assert choice.message.content is None
            assert calls if fields["parallel_tool_calls"] else len(calls) == 1
            results = [(call.id, run_tool(call.function.name, call.function.arguments)) for call in calls]

            with client.chat.completions.stream(model=served.model, messages=messages, **fields) as stream:
                [streamed] = stream.get_final_completion().choices
            assert streamed.finish_reason == "tool_calls"
            assert [
                (call.function.name, call.function.arguments) for call in streamed.message.tool_calls or ()
            ] == [(call.function.name, call.function.arguments) for call in calls]
            kinds = {"Forecast": Forecast, "Clock": Clock}
            for call in streamed.message.tool_calls or ():
                assert isinstance(call.function.parsed_arguments, kinds[call.function.name])

            messages.append(choice.message)
            messages += [{"role": "tool", "tool_call_id": name, "content": text} for name, text in results]
            answer = client.chat.completions.create(
                model=served.model, messages=messages, tools=tools, tool_choice="none", max_tokens=5
            )
            assert answer.choices[0].message.tool_calls is None
            assert answer.choices[0].message.content is not None


def a_named_tool_is_parsed(served: Served) -> None:
    named: Any = {"type": "function", "function": {"name": "Clock"}}
    with connect(served) as client:
        answer = client.chat.completions.parse(
            model=served.model,
            messages=served.chats[0].messages,  # type: ignore[arg-type]
            tools=[openai.pydantic_function_tool(Clock)],
            tool_choice=named,
            seed=3,
        )
    [choice] = answer.choices
    [call] = choice.message.tool_calls or []
    assert choice.finish_reason == "stop"
    assert isinstance(call.function.parsed_arguments, Clock)


def reasoning_is_separated_from_content(served: Served) -> None:
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "max_reasoning_tokens": 8}
    fields: dict[str, Any] = {"model": served.model, "messages": served.chats[0].messages, "temperature": 0}
    fields |= {"max_tokens": 30, "stream_options": {"include_usage": True}}
    with connect(served) as client:
        chunks = list(client.chat.completions.create(stream=True, **fields, extra_body=thinks))
        del fields["stream_options"]
        answer = client.chat.completions.create(**fields, extra_body=thinks)
    message, usage = answer.choices[0].message, answer.usage
    assert message.content
    thought = message.reasoning_content  # type: ignore[attr-defined]
    assert thought
    assert "</think>" not in thought + message.content
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == thought
    assert "".join(delta.content or "" for delta in deltas) == message.content
    for each in (usage, chunks[-1].usage):
        assert each is not None
        assert each.completion_tokens_details is not None
        assert each.completion_tokens_details.reasoning_tokens == 9  # with its end mark


TOOL_CHECKS: list[Check] = [a_named_tool_is_parsed, reasoning_is_separated_from_content]
LONG_CHECKS: list[Check] = [a_tool_is_called_and_its_result_is_answered]
"""These tests need room for long prompts."""
