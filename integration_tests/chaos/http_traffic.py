"""Cases over OpenAI's API, and what reads their answers."""

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from integration_tests.chaos.traffic import LENGTHS, Answer, Ask, Failure
from integration_tests.support.greedy_answers import WORDS

OVERLOADED = 429
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
Connect = Callable[[], http.client.HTTPConnection]


@dataclass(frozen=True, eq=False)
class HttpCase:
    """A request whose answer does not depend on when it is asked, nor beside whom."""

    path: str
    body: str
    is_stream: bool

    def ask(self, connection: http.client.HTTPConnection) -> tuple[Answer, float]:
        """Raises Failure."""
        began_at = time.monotonic()
        try:
            connection.request("POST", self.path, self.body, {"content-type": "application/json"})
            with connection.getresponse() as response:
                if response.status != 200:
                    text = f"{response.status}: {response.read().decode()}"
                    raise Failure(text, is_overload=response.status == OVERLOADED)
                return _read_stream(response) if self.is_stream else (_read(json.load(response)), 0.0)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            connection.close()
            seconds = time.monotonic() - began_at
            raise Failure(f"{self.path} after {seconds:.1f} s: {error!r}") from error


def _read(answer: dict[str, Any]) -> Answer:
    (choice,) = answer["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return [(text, answer["usage"]["completion_tokens"], choice["finish_reason"])]


def _read_stream(response: http.client.HTTPResponse) -> tuple[Answer, float]:
    """The answer, and the longest time without a line. Raises ValueError if the stream breaks off."""
    longest_s, last_at, text, num_tokens, reason = 0.0, time.monotonic(), "", 0, None
    for line in response:
        longest_s, last_at = max(longest_s, time.monotonic() - last_at), time.monotonic()
        if line.strip() == b"data: [DONE]":
            response.read()
            return [(text, num_tokens, reason)], longest_s
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(f"an error in the stream: {event['error']}")
        for choice in event["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            reason = choice["finish_reason"] or reason
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    raise ValueError("a stream ended without its last event")


def make_http_cases(random: Random, count: int) -> list[HttpCase]:
    """Completions and chats, greedy and sampled with a seed, streamed and whole."""
    return [_make_case(random, is_chat=i % 2 == 0, is_stream=i % 4 < 2) for i in range(count)]


def _make_case(random: Random, is_chat: bool, is_stream: bool) -> HttpCase:
    length = random.randint(*LENGTHS)
    body: dict[str, Any] = {"max_tokens": length, "min_tokens": length, "temperature": 0}
    if random.random() < 0.5:
        body |= {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "seed": random.getrandbits(32)}
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    words = " ".join(random.choices(WORDS, k=random.randint(1, 20)))
    if is_chat:
        body["messages"] = [{"role": "user", "content": words}]
        return HttpCase("/v1/chat/completions", json.dumps(body), is_stream)
    return HttpCase("/v1/completions", json.dumps(body | {"prompt": words}), is_stream)


def http_asker(connect: Connect) -> Callable[[], contextlib.AbstractContextManager[Ask]]:
    """Return what opens a connection and asks over it."""

    @contextmanager
    def open_one() -> Iterator[Ask]:
        with contextlib.closing(connect()) as connection:
            yield lambda case: case.ask(connection)

    return open_one
