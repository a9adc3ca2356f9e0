"""Compares tokens and texts with those of the tokenizers library."""

import json
from pathlib import Path

from tests.support.router.served_chats import HELLO, open_chats, post
from tgis import __version__


async def test_tokens_are_the_librarys(tmp_path: Path) -> None:
    text = "The quick brown fox, é and more"
    async with open_chats(tmp_path) as (served, client):
        fast = served.tokenizer.fast
        for adds in (True, False):
            status, answer = await post(
                served, "/tokenize", {"prompt": text, "add_special_tokens": adds, "return_token_strs": True}
            )
            expected = fast.encode(text, add_special_tokens=adds)
            assert status == 200
            assert answer == {
                "count": len(expected.ids),
                "max_model_len": 200,
                "tokens": expected.ids,
                "token_strs": expected.tokens,
            }
        assert answer["tokens"] != fast.encode(text).ids, "the tokenizer adds nothing"
        _, detokenized = await post(served, "/detokenize", {"tokens": answer["tokens"]})
        assert detokenized == {"prompt": text}
        long = text * 2000  # long enough for the tokenization process
        _, answer = await post(served, "/tokenize", {"prompt": long})
        assert answer["tokens"] == fast.encode(long).ids
        assert answer["token_strs"] is None
        _, answer = await post(served, "/tokenize", {"messages": HELLO})
        assert answer["tokens"] == fast.encode("<user>hello<assistant>", add_special_tokens=False).ids
        version = await client.get("/../version", cast_to=object)
        assert version == {"version": __version__}, json.dumps(version)


async def test_refusals(tmp_path: Path) -> None:
    async with open_chats(tmp_path) as (served, _):
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
            ("/tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template"),
            ("/detokenize", {"tokens": [999_999_999]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ):
            status, answer = await post(served, path, body)
            assert (status, answer["error"]["param"]) == (400, param), answer
        for path in ("/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/audio/speech"):
            status, answer = await post(served, path, {})
            assert status == 404
            assert "/v1/chat/completions" in answer["error"]["message"]
