"""Tests the names of models: the lists, and the values that the option allows."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.router.served_chats import HELLO, open_chats
from tests.support.router.served_http import MODEL
from tgis.router.api.models import Models, served_names
from tgis.router.api.openai.model_routes import ModelRoutes
from tgis.router.errors import StartupError


async def test_models_are_listed_and_described(tmp_path: Path) -> None:
    async with open_chats(tmp_path) as (_, client):
        assert [model.id async for model in client.models.list()] == [MODEL, "alias"]
        assert (await client.models.retrieve("alias")).object == "model"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("nobody/x")
        assert caught.value.code == "model_not_found"


async def test_loaded_adapters_are_listed() -> None:
    models = Models(("a", "b"), adapter_ids=lambda: ("x/y",))
    routes = ModelRoutes(models, 77, default_sampling={"top_k": 5})
    answer = json.loads(bytes((await routes.list_models(None)).body))  # type: ignore[arg-type]
    cards = [(each["id"], each["root"], each["parent"], each["max_model_len"]) for each in answer["data"]]
    assert cards == [("a", "a", None, 77), ("b", "a", None, 77), ("x/y", "x/y", "a", 77)]
    assert [each["default_sampling"] for each in answer["data"]] == [{"top_k": 5}] * 3
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


PLACEHOLDERS = ("dummy", "text-generation-inference", "tgi", "default")


async def test_placeholders_of_tgi_clients_are_the_model(tmp_path: Path) -> None:
    fields: Any = {"max_tokens": 1}
    async with open_chats(tmp_path / "tgi", http_api="tgi") as (_, client):
        for name in PLACEHOLDERS:
            assert (await client.completions.create(model=name, prompt="a", **fields)).model == MODEL
            chat = await client.chat.completions.create(model=name, messages=HELLO, **fields)
            assert chat.model == MODEL
        assert [model.id async for model in client.models.list()] == [MODEL, "alias"]
    async with open_chats(tmp_path / "openai") as (_, client):
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="dummy", prompt="a", **fields)


@dataclass
class Names:
    """Names from clients, in a process without an engine."""

    ids: dict[str, str]

    async def adapter_names(self) -> Mapping[str, str]:
        return self.ids

    async def give_name(self, name: str, adapter_id: str, is_replacing: bool) -> None:
        self.ids[name] = adapter_id

    async def take_name(self, name: str) -> None:
        del self.ids[name]


async def test_adapters_and_models_may_have_the_names_of_placeholders() -> None:
    given = Names({})
    models = Models(("a", "tgi"), adapter_ids=lambda: ("default",), given=given, placeholders=PLACEHOLDERS)
    assert await models.choose("dummy") == ("a", None)
    await given.give_name("dummy", "some/adapter", is_replacing=False)
    assert await models.choose("tgi") == ("tgi", None)
    assert await models.choose("default") == ("default", "default")
    assert await models.choose("dummy") == ("dummy", "some/adapter")
    assert await models.choose("text-generation-inference") == ("a", None)
