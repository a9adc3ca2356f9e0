"""Tests adding and removing names of adapters at run time, with an engine and a fake shard."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from tests.support.http_exchange import exchange
from tests.support.router.model_of_contents import Library, adapter
from tests.support.router.served_chats import HELLO, open_chats
from tests.support.router.served_http import MODEL, ServedHttp
from tgis.pb import shard_pb2 as pb

ADDED = "Success: LoRA adapter '{}' added successfully."
REMOVED = "Success: LoRA adapter '{}' removed successfully."


async def ask(served: ServedHttp, route: str, **body: Any) -> tuple[int, str]:
    """Return the status, and the text or the message of an error."""
    reply = await asyncio.to_thread(exchange, f"{served.url}/v1/{route}_lora_adapter", body)
    return reply.status, reply.text if reply.status == 200 else reply.json["error"]["message"]


@asynccontextmanager
async def open_adapters(directory: Path) -> AsyncIterator[tuple[ServedHttp, openai.AsyncOpenAI, Library]]:
    """Yield a service with the adapters one and two/b, `kept` preloaded, and `both` in the first root."""
    library = Library()
    for name in ("one", "two/b", "kept", "both"):
        library.put(adapter(f"digest of {name}"), name)
    roots = (str(directory / "cache"), str(directory / "store"))
    (directory / "cache" / "both").mkdir(parents=True)
    info = pb.InfoResponse(preloaded_adapter_ids=["kept"])
    async with open_chats(directory, info=info, library=library, adapter_roots=roots) as (served, client):
        yield served, client, library


async def digest_of(served: ServedHttp, client: openai.AsyncOpenAI, model: str) -> str:
    await client.chat.completions.create(model=model, messages=HELLO, max_tokens=1)
    return served.handle.specs[-1].adapters.digests[1]


async def test_a_name_is_given_replaced_and_taken_away(tmp_path: Path) -> None:
    async with open_adapters(tmp_path) as (served, client, library):
        answer = await ask(served, "load", lora_name="sql", lora_path="one")
        assert answer == (200, ADDED.format("sql"))
        assert library.loads["digest of one"] == 1, "it is loaded before the answer"
        assert await digest_of(served, client, "sql") == "digest of one"
        assert library.loads["digest of one"] == 1
        cards = {card.id: card for card in (await client.models.list()).data}
        assert list(cards) == [MODEL, "alias", "kept", "sql"]
        assert (cards["sql"].root, cards["sql"].parent) == ("one", MODEL)  # type: ignore[attr-defined]
        assert (await client.models.retrieve("sql")).id == "sql"

        status, text = await ask(served, "load", lora_name="sql", lora_path="two/b")
        assert (status, "already been loaded" in text) == (400, True)
        assert await digest_of(served, client, "sql") == "digest of one"
        path = f"{tmp_path}/store/two//b/"
        answer = await ask(served, "load", lora_name="sql", lora_path=path, load_inplace=True)
        assert answer == (200, ADDED.format("sql"))
        assert await digest_of(served, client, "sql") == "digest of two/b"

        assert await ask(served, "unload", lora_name="sql") == (200, REMOVED.format("sql"))
        assert [card.id for card in (await client.models.list()).data] == [MODEL, "alias", "kept"]
        with pytest.raises(openai.NotFoundError, match="'sql' does not exist"):
            await digest_of(served, client, "sql")
        assert await ask(served, "unload", lora_name="sql") == (
            404,
            "The LoRA adapter 'sql' cannot be found.",
        )
        assert not library.faults


async def test_refusals(tmp_path: Path) -> None:
    async with open_adapters(tmp_path) as (served, client, library):
        library.put(adapter("broken"), "broken")
        library.errors[0, "broken"] = (grpc.StatusCode.INVALID_ARGUMENT, "adapter type IA3")
        library.put(adapter("huge", 2 << 20), "huge")
        elsewhere = "lora_path is neither an adapter's id"
        for name, path, status, text in (
            ("x", "missing", 404, "directory does not exist"),
            ("x", f"{tmp_path}/store/missing", 404, "directory does not exist"),
            ("x", "broken", 400, "adapter type IA3"),
            ("x", "huge", 400, "exceeds the allowed cache size"),
            ("x", "", 400, elsewhere),
            ("x", "../one", 400, elsewhere),
            ("x", "a/../../one", 400, elsewhere),
            ("x", "/etc", 400, elsewhere),
            ("x", str(tmp_path / "store"), 400, elsewhere),
            ("x", f"{tmp_path}/store/../one", 400, elsewhere),
            ("x", f"{tmp_path}/storeone", 400, elsewhere),
            ("x", f"{tmp_path}/store/\0", 400, elsewhere),
            ("x", f"{tmp_path}/store/both", 400, "names another adapter"),
            ("x", f"{tmp_path}/store/kept", 400, "names another adapter"),
            ("", "one", 400, "lora_name must have"),
            ("a b", "one", 400, "lora_name must have"),
            ("x" * 257, "one", 400, "lora_name must have"),
            (MODEL, "one", 400, "given at the start"),
            ("kept", "one", 400, "given at the start"),
        ):
            answer = await ask(served, "load", lora_name=name, lora_path=path)
            assert answer[0] == status, (name, path, answer)
            assert text in answer[1], (name, path, answer)
        assert (await ask(served, "load", lora_name="x"))[0] == 400
        assert (await ask(served, "unload"))[0] == 400
        assert (await ask(served, "unload", lora_name="kept"))[0] == 400
        assert [card.id for card in (await client.models.list()).data] == [MODEL, "alias", "kept"]
        assert (await ask(served, "load", lora_name="x", lora_path=f"{tmp_path}/cache/both"))[0] == 200


async def test_of_two_calls_for_one_name_one_wins(tmp_path: Path) -> None:
    async with open_adapters(tmp_path) as (served, client, library):
        library.load_s = 0.05
        calls = [ask(served, "load", lora_name="sql", lora_path=path) for path in ("one", "two/b")]
        answers = dict(zip(("one", "two/b"), await asyncio.gather(*calls), strict=True))
        assert sorted(status for status, _ in answers.values()) == [200, 400]
        [winner] = [path for path, (status, _) in answers.items() if status == 200]
        assert await digest_of(served, client, "sql") == f"digest of {winner}"


async def test_a_call_keeps_the_adapter_whose_name_goes(tmp_path: Path) -> None:
    async with open_adapters(tmp_path) as (served, client, _):
        await ask(served, "load", lora_name="sql", lora_path="one")
        stream = await client.chat.completions.create(
            model="sql", messages=HELLO, max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        assert (await ask(served, "unload", lora_name="sql"))[0] == 200
        reasons = [chunk.choices[0].finish_reason async for chunk in stream]
        assert reasons[-1] == "length"


async def test_without_the_option_the_routes_say_so(tmp_path: Path) -> None:
    async with open_chats(tmp_path) as (served, _):
        for route in ("load", "unload"):
            status, text = await ask(served, route, lora_name="a", lora_path="b")
            assert (status, "--runtime-adapters" in text) == (404, True)
