"""Tests LoRA adapters by name over OpenAI's API, with fake shards whose tokens depend on the adapter."""

from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest

from tests.support.router.fake_shard import VOCAB_SIZE
from tests.support.router.model_of_contents import Item, Library, adapter
from tests.support.router.model_of_shard import join_digests, truth
from tests.support.router.router_process import MAX_SEQUENCE_LENGTH, Setup, start_router, stop_router
from tgis.pb import shard_pb2

PROMPT, NUM_TOKENS = "Once upon a time there was a little fox", 6
MODEL, PRELOADED, OTHER = "tiny", "team/kept", "sql"
DIGESTS = {MODEL: "", "tiny-v1": "", PRELOADED: "d1", OTHER: "d2"}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    library = Library()
    for name in (PRELOADED, OTHER):
        library.put(adapter(DIGESTS[name]), name)
    library.put(adapter("never"), MODEL)  # the served model's name has precedence
    library.put(Item("d3", num_decoder_tokens=4), "soft")
    info = shard_pb2.InfoResponse(preloaded_adapter_ids=[PRELOADED])
    flags = ["--http-api", "openai", "--served-model-name", f"{MODEL},tiny-v1"]
    setup = start_router(tmp_path_factory.mktemp("router"), 1, *flags, info=info, library=library)
    yield setup
    assert stop_router(setup) == 0, setup.service.output
    assert library.faults == []


@pytest.fixture(scope="module")
def client(router: Setup) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_names_choose_the_model_or_an_adapter(router: Setup, client: openai.OpenAI) -> None:
    prompt = router.tokenizer.encode(PROMPT).ids
    texts = set()
    for name, digest in DIGESTS.items():
        tokens = truth(prompt, NUM_TOKENS, VOCAB_SIZE, digests=join_digests(digest, ""))[len(prompt) :]
        fields: Any = {"model": name, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
        more = {"return_token_ids": True, "ignore_eos": True}
        answer = client.completions.create(**fields, extra_body=more)
        assert answer.model == name
        assert answer.choices[0].token_ids == tokens
        texts.add(answer.choices[0].text)
        chunks = list(client.completions.create(**fields, stream=True, extra_body=more))
        assert {chunk.model for chunk in chunks} == {name}
        assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert len(texts) == 3
    assert router.library.loads == {"d1": 1, "d2": 1}


def test_names_of_nothing_are_not_found(client: openai.OpenAI) -> None:
    for name in ("nobody", "team/nobody", "soft", "x" * 5000, "../tiny"):
        for stream in (False, True):
            with pytest.raises(openai.NotFoundError) as caught:
                client.completions.create(model=name, prompt=PROMPT, max_tokens=1, stream=stream)
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model"), name


def test_an_adapter_that_finds_no_room_may_be_asked_for_again(router: Setup, client: openai.OpenAI) -> None:
    router.library.errors[-1, "large"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room is left for a copy")
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="large", prompt=PROMPT, max_tokens=1)
    assert caught.value.response.headers["retry-after"] == "1"


def test_preloaded_adapters_are_listed(client: openai.OpenAI) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert list(cards) == [MODEL, "tiny-v1", PRELOADED]
    model_card = cards[PRELOADED].model_dump()
    assert (model_card["root"], model_card["parent"], model_card["max_model_len"]) == (
        PRELOADED,
        MODEL,
        MAX_SEQUENCE_LENGTH,
    )
    assert client.models.retrieve(PRELOADED) == cards[PRELOADED]
    for name in (OTHER, "nobody"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(name)
        assert caught.value.code == "model_not_found"
