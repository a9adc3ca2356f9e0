"""Names of models: the lists, and what the option allows."""

import json
from pathlib import Path

import openai
import pytest

from tests.support.router.chat_door import chat_door
from tests.support.router.http_door import MODEL
from tgis.router.api.http.openai.models import Models, served_names
from tgis.router.errors import StartupError


async def test_models_are_listed_and_described(tmp_path: Path) -> None:
    async with chat_door(tmp_path) as (_, client):
        assert [model.id async for model in client.models.list()] == [MODEL, "alias"]
        assert (await client.models.retrieve("alias")).object == "model"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("nobody/x")
        assert caught.value.code == "model_not_found"


async def test_loaded_adapters_are_listed() -> None:
    models = Models(("a", "b"), 77, adapter_ids=lambda: ("x/y",))
    answer = json.loads(bytes((await models.list(None)).body))  # type: ignore[arg-type]
    told = [(each["id"], each["root"], each["parent"], each["max_model_len"]) for each in answer["data"]]
    assert told == [("a", "a", None, 77), ("b", "a", None, 77), ("x/y", "x/y", "a", 77)]
    assert await models.choose("x/y") == ("x/y", "x/y")
    assert await models.choose("b") == ("b", None)
    assert await models.choose(None) == ("a", None)


def test_served_names() -> None:
    assert served_names(None, "/models/some-model") == ("some-model",)
    assert served_names(" , ", "org/name") == ("name",)
    assert served_names("one, org/two,one", "x") == ("one", "org/two")
    for wrong in ("a b", "é", "x" * 257, "a\n"):
        with pytest.raises(StartupError):
            served_names(f"ok,{wrong}z", "x")
