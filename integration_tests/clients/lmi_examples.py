"""The bodies that DJL publishes for LMI's handlers, with prompts and limits for a small model, and their
expected responses. The caller provides the function that sends a body."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from integration_tests.clients.expectations import TGI_REASONS, Completion, Served, is_close

DEFAULT_MAX_NEW_TOKENS = 30


class Reply(NamedTuple):
    status: int
    content_type: str
    body: bytes

    @property
    def value(self) -> Any:
        assert self.status == 200, self
        assert self.content_type.split(";")[0] == "application/json", self
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        """Final line of a stream."""
        assert self.status == 200, self
        assert self.content_type.split(";")[0] == "application/jsonlines", self
        assert self.body.endswith(b"\n")
        return [json.loads(line) for line in self.body.splitlines()]


Invoke = Callable[[Mapping[str, Any]], Reply]
"""Function that sends a body, which itself selects streaming."""
Example = Callable[[Served, Invoke], None]


def greedy(asked: Completion, **more: Any) -> dict[str, Any]:
    return {"inputs": asked.prompt, "parameters": {"max_new_tokens": asked.max_tokens, **more}}


def text_in_text_out(served: Served, invoke: Invoke) -> None:
    for asked in served.completions[:6]:
        assert invoke(greedy(asked)).value == {"generated_text": asked.text}
    asked = served.completions[0]
    whole = invoke(greedy(asked, return_full_text=True)).value
    assert whole == {"generated_text": asked.prompt + asked.text}


def text_with_details(served: Served, invoke: Invoke) -> None:
    for asked in served.completions[:4]:
        answer = invoke(greedy(asked, details=True, do_sample=False)).value
        assert answer.keys() == {"generated_text", "details"}
        assert answer["generated_text"] == asked.text
        details = answer["details"]
        assert details["finish_reason"] == TGI_REASONS[asked.finish_reason]
        assert details["generated_tokens"] == len(asked.output_ids)
        assert details["inputs"] == asked.prompt
        check_tokens(details["tokens"], asked)


def check_tokens(tokens: list[Any], asked: Completion) -> None:
    assert [token["id"] for token in tokens] == asked.output_ids
    assert is_close([token["log_prob"] for token in tokens], asked.logprobs)
    shown = [token["text"] for token in tokens if not token.get("special_token")]
    assert "".join(shown) == asked.text


def prompt_with_details(served: Served, invoke: Invoke) -> None:
    asked = served.completions[1]
    details = invoke(greedy(asked, details=True, decoder_input_details=True)).value["details"]
    assert [token["id"] for token in details["prefill"]] == asked.ids
    assert is_close([token["log_prob"] for token in details["prefill"][1:]], asked.prompt_logprobs)


def lines_of_tokens(served: Served, invoke: Invoke) -> None:
    for asked in served.completions[:4]:
        lines = invoke({**greedy(asked, details=True), "stream": True}).lines
        check_tokens([line["token"] for line in lines], asked)
        assert all(line.keys() == {"token"} for line in lines[:-1])
        assert lines[-1]["generated_text"] == asked.text
        details = lines[-1]["details"]
        assert details["finish_reason"] == TGI_REASONS[asked.finish_reason]
        assert details["generated_tokens"] == len(asked.output_ids)
        assert details["inputs"] == asked.prompt
        assert "tokens" not in details


def every_common_parameter(served: Served, invoke: Invoke) -> None:
    parameters = {"do_sample": True, "seed": 4, "temperature": 0.9, "repetition_penalty": 1.1, "top_k": 40}
    parameters |= {"top_p": 0.9, "max_new_tokens": 20, "details": True, "return_full_text": False}
    body = {"inputs": "a little girl", "parameters": parameters}
    answer = invoke(body).value
    assert answer == invoke(body).value
    assert invoke({**body, "stream": True}).lines[-1]["generated_text"] == answer["generated_text"]
    others = [invoke({**body, "parameters": {**parameters, "seed": seed}}).value for seed in (5, 6)]
    assert any(other["generated_text"] != answer["generated_text"] for other in others)


def stop_sequences(served: Served, invoke: Invoke) -> None:
    asked = next(asked for asked in served.completions if len(asked.text) > 12)
    stop = asked.text[4:6]
    answer = invoke(greedy(asked, stop_sequences=[stop], details=True)).value
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert answer["generated_text"].removesuffix(stop) == asked.text[: asked.text.index(stop)]


def thirty_tokens_without_a_limit(served: Served, invoke: Invoke) -> None:
    body = {"inputs": "a little girl", "parameters": {"details": True, "ignore_eos_token": True}}
    assert invoke(body).value["details"]["generated_tokens"] == DEFAULT_MAX_NEW_TOKENS
    assert invoke({"inputs": "a little girl"}).value["generated_text"]


def several_inputs(served: Served, invoke: Invoke) -> None:
    some = [asked for asked in served.completions if asked.max_tokens >= 8][:3]
    body = {"inputs": [asked.prompt for asked in some], "parameters": {"max_new_tokens": 8}}
    answers = invoke(body).value
    alone = [invoke({**body, "inputs": asked.prompt}).value for asked in some]
    assert answers == alone


def chats(served: Served, invoke: Invoke) -> None:
    for chat in served.chats[:3]:
        body = {"messages": chat.messages, "max_tokens": chat.answer.max_tokens, "temperature": 0}
        answer = invoke(body).value
        [choice] = answer["choices"]
        assert choice["message"]["content"] == chat.answer.text
        assert answer["usage"]["prompt_tokens"] == len(chat.answer.ids)
        assert answer["usage"]["completion_tokens"] == len(chat.answer.output_ids)
        lines = invoke({**body, "stream": True}).lines
        choices = [choice for line in lines for choice in line["choices"]]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == chat.answer.text


def an_adapter_of_the_body(served: Served, invoke: Invoke) -> None:
    asked = served.completions[0]
    tuned = invoke({**greedy(asked), "adapters": "tuned"}).value["generated_text"]
    assert tuned != asked.text
    reply = invoke({**greedy(asked), "adapters": "nobody"})
    assert 400 <= reply.status < 500


def bodies_that_are_refused(served: Served, invoke: Invoke) -> None:
    for body in (
        {},
        {"inputs": ""},
        {"inputs": 3},
        {"inputs": "a", "parameters": [1]},
        {"inputs": "a", "parameters": {"top_p": 7}},
    ):
        reply = invoke(body)
        assert reply.status == 424, (body, reply)
        error = json.loads(reply.body)
        assert error["code"] == 424
        assert error["error"], error


EXAMPLES: list[Example] = [
    text_in_text_out,
    text_with_details,
    prompt_with_details,
    lines_of_tokens,
    every_common_parameter,
    stop_sequences,
    thirty_tokens_without_a_limit,
    several_inputs,
    chats,
    an_adapter_of_the_body,
    bodies_that_are_refused,
]
