"""Cases for the HTTP APIs, and the readers of their responses, which also compare finish reasons."""

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from integration_tests.chaos.traffic import LENGTHS, Answer, Ask, Failure
from integration_tests.support.greedy_answers import WORDS

OVERLOADS = ("429: ", '503: {"code":503,"type":"WlmCapacityException"')
"""Prefixes of refusals of a service at its limit."""
OVERLOAD_IN_A_STREAM = "Model is overloaded"  # in TGI's API, whose refusals are events
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
Connect = Callable[[], http.client.HTTPConnection]


class StreamError(Exception):
    """Error for an event that reports a failure."""


@dataclass(frozen=True)
class Reader:
    whole: Callable[[Any], Answer]
    stream: Callable[[Iterable[bytes]], Answer]
    """Read the lines of a stream. Raises StreamError, or ValueError if it is incomplete."""


@dataclass(frozen=True, eq=False)
class HttpCase:
    """Request whose response depends neither on the time nor on other requests."""

    path: str
    body: str
    is_stream: bool
    reader: Reader

    def ask(self, connection: http.client.HTTPConnection) -> tuple[Answer, float]:
        """Send it. Raises Failure."""
        began_at = time.monotonic()

        def fail(error: Exception, is_overload: bool = False, is_break: bool = False) -> Failure:
            connection.close()
            seconds = time.monotonic() - began_at
            return Failure(f"{self.path} after {seconds:.1f} s: {error!r}", is_overload, is_break)

        try:
            connection.request("POST", self.path, self.body, {"content-type": "application/json"})
            with connection.getresponse() as response:
                if response.status != 200:
                    text = f"{response.status}: {response.read().decode()}"
                    raise Failure(text, is_overload=text.startswith(OVERLOADS))
                if not self.is_stream:
                    return self.reader.whole(json.load(response)), 0.0
                lines = Lines(response)
                return self.reader.stream(lines), lines.longest_s
        except (TimeoutError, KeyError) as error:
            raise fail(error) from error
        except StreamError as error:
            raise fail(error, is_overload=str(error).endswith(OVERLOAD_IN_A_STREAM)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            # An interrupted stream may look like one that ends too early.
            raise fail(error, is_break=True) from error


class Lines:
    """Return all lines of a response, and the longest time without one."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response
        self.longest_s = 0.0

    def __iter__(self) -> Iterator[bytes]:
        last_at = time.monotonic()
        for line in self._response:
            self.longest_s, last_at = max(self.longest_s, time.monotonic() - last_at), time.monotonic()
            yield line.strip()


def _read_choice(answer: Any) -> Answer:
    (choice,) = answer["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return [(text, answer["usage"]["completion_tokens"], choice["finish_reason"])]


def _read_choices(lines: Iterable[bytes]) -> Answer:
    text, num_tokens, reason, is_whole = "", 0, None, False
    for line in lines:
        if line == b"data: [DONE]":
            is_whole = True
        elif line.startswith(b"data: "):
            event = _parse(line)
            for choice in event["choices"]:
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    if not is_whole:
        raise ValueError("a stream ended without its last event")
    return [(text, num_tokens, reason)]


def _parse(line: bytes) -> Any:
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise StreamError(f"an error in the stream: {event['error']}")
    return event


def _read_text(answer: Any) -> Answer:
    details = answer["details"]
    return [(answer["generated_text"], details["generated_tokens"], details["finish_reason"])]


def _read_tokens(lines: Iterable[bytes]) -> Answer:
    """Read TGI's events or LMI's lines; the last one contains the whole response."""
    events = [_parse(line) for line in lines if line and not line.startswith(b":")]
    if not events or events[-1].get("generated_text") is None:
        raise ValueError("a stream ended without its last event")
    if events[-1]["details"]["finish_reason"] == "error":
        raise StreamError(f"an error in the stream: {events[-1]['token']}")
    return _read_text(events[-1])


OPENAI, INPUTS = Reader(_read_choice, _read_choices), Reader(_read_text, _read_tokens)


def make_http_cases(random: Random, count: int) -> list[HttpCase]:
    """Return cases of every API in turn, greedy and sampled with a seed, streamed and whole."""
    kinds = (_make_chat, _make_completion, _make_tgi_case, _make_lmi_case)
    return [kinds[i % 4](random, i // 4 % 2 == 0) for i in range(count)]


def _words(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 20)))


def _openai_fields(random: Random, is_stream: bool) -> dict[str, Any]:
    length = random.randint(*LENGTHS)
    fields: dict[str, Any] = {"max_tokens": length, "min_tokens": length, "temperature": 0}
    if random.random() < 0.5:
        fields |= {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "seed": random.getrandbits(32)}
    if is_stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields


def _make_chat(random: Random, is_stream: bool) -> HttpCase:
    messages = [{"role": "user", "content": _words(random)}]
    body = {**_openai_fields(random, is_stream), "messages": messages}
    return HttpCase("/v1/chat/completions", json.dumps(body), is_stream, OPENAI)


def _make_completion(random: Random, is_stream: bool) -> HttpCase:
    body = {**_openai_fields(random, is_stream), "prompt": _words(random)}
    return HttpCase("/v1/completions", json.dumps(body), is_stream, OPENAI)


def _inputs_body(random: Random) -> dict[str, Any]:
    parameters: dict[str, Any] = {"max_new_tokens": random.randint(*LENGTHS), "details": True}
    if random.random() < 0.5:
        parameters |= {"do_sample": True, "temperature": 0.9, "top_k": 30, "seed": random.getrandbits(32)}
    return {"inputs": _words(random), "parameters": parameters}


def _make_tgi_case(random: Random, is_stream: bool) -> HttpCase:
    path = "/generate_stream" if is_stream else "/generate"
    return HttpCase(path, json.dumps(_inputs_body(random)), is_stream, INPUTS)


def _make_lmi_case(random: Random, is_stream: bool) -> HttpCase:
    body = {**_inputs_body(random), "stream": is_stream}
    return HttpCase("/invocations", json.dumps(body), is_stream, INPUTS)


def http_asker(connect: Connect) -> Callable[[], contextlib.AbstractContextManager[Ask]]:
    """Return a function that opens a connection and sends requests on it."""

    @contextmanager
    def open_one() -> Iterator[Ask]:
        with contextlib.closing(connect()) as connection:
            yield lambda case: case.ask(connection)

    return open_one
