"""Tests the sampling of requests without sampling fields, and the refusal of the operator's values."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.fake_shard import VOCAB_SIZE
from tests.support.router.http_port import get
from tests.support.router.router_process import router_command, start_router, stop_router
from tests.support.router.served_chats import HELLO, open_chats, post
from tests.support.tokenizers.trained import write_byte_level
from tgis.config.processes import RouterConfig
from tgis.router.api.http.default_sampling import read_default_sampling
from tgis.router.errors import StartupError
from tgis.sampling_parameters import Sampling

NOTHING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
OPENAI = {"greedy": False, "temperature": 1.0} | NOTHING
MODEL = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.125, "repetition_penalty": 1.5}
OTHERS = {"do_sample": True, "eos_token_id": [1, 2], "max_new_tokens": 5, "transformers_version": "4.51.0"}
NULLS = dict.fromkeys(MODEL)
OFF = {"temperature": 1} | NOTHING
FORMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
}


def write(directory: Path, content: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "generation_config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def of(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in OPENAI}


OTHER_FILE = {"do_sample": False, "temperature": 0.7, "top_k": 9, "repetition_penalty": 1.25}
OF_OTHER_FILE = {"greedy": True, "repetition_penalty": 1.25}
CASES: list[tuple[dict[str, str], list[tuple[dict[str, Any], dict[str, Any]]]]] = [
    (
        {},
        [
            ({}, MODEL),
            (NULLS, MODEL),
            ({"temperature": 0.5, "top_k": 7}, MODEL | {"temperature": 0.5, "top_k": 7}),
            (OFF, {}),
            ({"top_k": -1, "min_p": None}, MODEL | {"top_k": 0}),
            ({"temperature": 0}, {"greedy": True, "repetition_penalty": 1.5}),
        ],
    ),
    (
        {"override_generation_config": '{"top_p": 0.5}'},
        [({"top_k": 7}, MODEL | {"top_p": 0.5, "top_k": 7}), ({"top_p": 0.25}, MODEL | {"top_p": 0.25})],
    ),
    ({"generation_config": "none"}, [({}, {}), ({"top_k": 7}, {"top_k": 7})]),
    ({"generation_config": "none", "override_generation_config": '{"top_k": 3}'}, [({}, {"top_k": 3})]),
    (
        {"generation_config": "{other}"},
        [({}, OF_OTHER_FILE), ({"temperature": 0.5}, {"temperature": 0.5, "repetition_penalty": 1.25})],
    ),
    (
        {"generation_config": "{other}", "override_generation_config": '{"temperature": 2}'},
        [({}, {"temperature": 2.0, "repetition_penalty": 1.25})],
    ),
]


@pytest.mark.parametrize(("options", "requests"), CASES, ids=lambda one: str(one)[:40])
async def test_defaults_of_unset_parameters(
    tmp_path: Path, options: dict[str, str], requests: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    own, other = write(tmp_path / "model", MODEL | OTHERS), tmp_path / "other"
    write(other, OTHER_FILE)
    given = {name: text.replace("{other}", str(other)) for name, text in options.items()}
    async with open_chats(tmp_path, port_options={"model_sampling_path": str(own)} | given) as (served, _):
        for path, form in FORMS.items():
            for fields, expected in requests:
                status, answer = await post(served, path, form | fields)
                assert status == 200, answer
                spec = served.handle.specs[-1]
                assert of(spec.sampling) == OPENAI | expected, (path, fields)
                assert spec.stopping.max_new_tokens == 1
        assert len(served.handle.specs) == len(FORMS) * len(requests)


async def test_other_apis_keep_their_defaults(tmp_path: Path) -> None:
    """TGI's and LMI's own forms are greedy. Chats to these APIs have OpenAI's fields and defaults."""
    options = {"model_sampling_path": str(write(tmp_path / "model", MODEL))}
    own, chat = {"inputs": "a", "parameters": {"max_new_tokens": 1}}, FORMS["/v1/chat/completions"]
    greedy = {"greedy": True}
    for api, path, body, expected in (
        ("tgi", "/generate", own, greedy),
        ("tgi", "/invocations", own, greedy),
        ("tgi", "/invocations", chat, MODEL),
        ("lmi", "/invocations", own, greedy),
        ("lmi", "/invocations", chat, MODEL),
    ):
        async with open_chats(tmp_path / api, http_api=api, port_options=options) as (served, _):
            status, answer = await post(served, path, body)
            assert status == 200, answer
            assert of(served.handle.specs[-1].sampling) == OPENAI | expected, (api, path)


async def test_models_show_the_values(tmp_path: Path) -> None:
    options = {
        "model_sampling_path": str(write(tmp_path / "model", MODEL | OTHERS)),
        "override_generation_config": '{"temperature": 1}',
    }
    async with open_chats(tmp_path, port_options=options) as (_, client):
        shown = [getattr(model, "default_sampling", None) async for model in client.models.list()]
    assert shown == [MODEL | {"temperature": 1}] * 2
    async with open_chats(tmp_path, port_options=options | {"generation_config": "none"}) as (_, client):
        assert (await client.models.retrieve("alias")).default_sampling == {"temperature": 1}  # type: ignore[attr-defined]
    async with open_chats(tmp_path) as (_, client):
        assert not hasattr(await client.models.retrieve("alias"), "default_sampling")


@pytest.mark.parametrize(
    ("content", "expected", "warnings"),
    [
        ({"temperature": "hot", "top_p": True, "top_k": 5.5, "min_p": 7, "repetition_penalty": 0}, {}, 5),
        ('{"temperature": NaN, "repetition_penalty": Infinity, "top_k": 4}', {"top_k": 4}, 2),
        ({"temperature": 10**400, "top_p": None, "top_k": 50.0, "min_p": 0}, {"min_p": 0}, 2),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {"temperature": 0}, 0),
        ("{", {}, 1),
        ("[]", {}, 1),
        (None, {}, 0),
    ],
)
def test_unused_fields_of_the_generation_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: Any, expected: dict[str, Any], warnings: int
) -> None:
    path = tmp_path / "generation_config.json" if content is None else write(tmp_path, content)
    config = RouterConfig(tokenizer_path="", model_sampling_path=str(path))
    assert read_default_sampling(config) == expected
    assert len(caplog.records) == warnings
    assert all(str(tmp_path) in record.getMessage() for record in caplog.records)


def test_a_directory_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "broken", "{")
    write(tmp_path / "list", "[]")
    (tmp_path / "file").touch()
    for name, text in (
        ("none", "is not a file"),
        ("file", "is not a file"),
        ("x" * 300, "cannot be read: File name too long"),
        ("broken", "is not valid JSON"),
        ("list", "is not a JSON object"),
    ):
        with pytest.raises(StartupError, match=f"^generation_config: .*{text}") as refused:
            read_default_sampling(RouterConfig(tokenizer_path="", generation_config=str(tmp_path / name)))
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("{", "it is no JSON object"),
        ("[]", "it is no JSON object"),
        ("7", "it is no JSON object"),
        ("[" * 99_999, "it is no JSON object"),
        ('{"top_k": NaN}', "it is no JSON object"),
        ("\udcff", "it is no JSON object"),
        ('{"max_new_tokens": 5}', "'max_new_tokens' is none of temperature, top_p"),
        ('{"do_sample": false}', "'do_sample' is none of temperature, top_p"),
        ('{"a\\nb": 1}', r"'a\nb' is none of temperature, top_p"),
        ('{"temperature": 2.5}', "temperature must be <= 2.0"),
        ('{"temperature": "hot"}', "temperature must be a number, not a string"),
        ('{"top_k": 1, "top_p": 0}', "top_p must be > 0.0"),
        ('{"top_k": 5.5}', "top_k must be an integer"),
        ('{"min_p": null}', "min_p must be a finite number"),
        ('{"repetition_penalty": 1e400}', "it is no JSON object"),
    ],
)
def test_overrides_that_are_refused(text: str, refusal: str) -> None:
    with pytest.raises(StartupError) as refused:
        read_default_sampling(RouterConfig(tokenizer_path="", override_generation_config=text))
    assert str(refused.value).startswith(f"override_generation_config: {refusal}")
    assert "\n" not in str(refused.value)


def test_a_process_reads_the_options(tmp_path: Path) -> None:
    write(tmp_path / "other", MODEL)
    flags = ["--http-api", "openai", "--generation-config", str(tmp_path / "other")]
    router = start_router(tmp_path, 1, *flags, "--override-generation-config", '{"top_k": 3}')
    try:
        status, text = get(f"{router.http}/v1/models")[:2]
    finally:
        assert stop_router(router) == 0
    assert status == 200
    assert [each["default_sampling"] for each in json.loads(text)["data"]] == [MODEL | {"top_k": 3}]


def test_a_process_refuses_an_override_in_one_line(tmp_path: Path) -> None:
    write_byte_level(tmp_path, VOCAB_SIZE)
    command = router_command(tmp_path, "--override-generation-config", '{"top_kk": 3}')
    done = subprocess.run(
        [sys.executable, "-m", "tgis", *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    line = f"error: override_generation_config: 'top_kk' is none of {', '.join(MODEL)}"
    assert done.stderr.splitlines()[-1] == line
