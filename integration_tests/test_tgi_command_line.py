"""A service launched with TGI's command line and environment, called over plain HTTP."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from integration_tests.clients.served import write_served_model
from tests.support.http_exchange import HttpReply, exchange
from tests.support.processes import Service, children_of

pytestmark = pytest.mark.slow

KEY = "a-key-of-this-test"
ORIGINS = ("https://a.example", "https://b.example")
TEMPLATE = "{{ bos_token }}{% for message in messages %}[{{ message.content }}]{% endfor %}"


class Launched(NamedTuple):
    service: Service
    directory: Path

    def ask(self, path: str, body: Any = None, key: str = KEY, **headers: str) -> HttpReply:
        return exchange(self.service.http + path, body, {"authorization": f"Bearer {key}", **headers})


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    directory = tmp_path_factory.mktemp("tgi")
    write_served_model(directory / "weights")
    config = {"chat_template": TEMPLATE, "bos_token": "<mine>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    flags = (
        f"--model-id org/tiny --weights-cache-override {directory}/weights --revision v1 "
        f"--tokenizer-config-path {directory}/tokenizer_config.json --max-total-tokens 200 --max-best-of 1 "
        "--max-input-tokens 50 "
        "--max-stop-sequences=5 --max-concurrent-requests 16 --max-batch-prefill-tokens 64 "
        "--max-batch-size 8 "
        "--max-client-batch-size 2 --payload-limit 5000 --validation-workers 2 --hostname 127.0.0.1 --port 0 "
        "--grpc-port 0 --cors-allow-origin https://a.example --cors-allow-origin=https://b.example "
        "--waiting-served-ratio 1.2 --cuda-memory-fraction 0.9 --cuda-graphs 1,2 --usage-stats off "
        "--graceful-termination-timeout 20 --disable-grammar-support --sharded false -e"
    )
    env = {"COMPAT": "tgi", "API_KEY": KEY, "TERMINATION_LOG": str(directory / "log"), "HOSTNAME": "pod-1"}
    service = Service(["launcher", *flags.split()], env).wait_until_serving()
    try:
        yield Launched(service, directory)
    finally:
        code = service.end()
    assert code == 0, service.output
    assert KEY not in service.output


def test_limits(launched: Launched) -> None:
    info = launched.ask("/info").json
    limits = ("max_best_of", "max_stop_sequences", "max_input_tokens", "max_total_tokens", "model_id")
    assert [info[name] for name in limits] == [1, 5, 50, 200, "org/tiny"]
    assert (info["max_concurrent_requests"], info["validation_workers"]) == (16, 2)
    assert info["max_client_batch_size"] == 2
    fine = launched.ask("/generate", {"inputs": "once upon", "parameters": {"max_new_tokens": 5}})
    assert fine.status == 200
    assert fine.json["generated_text"]
    for inputs, parameters, text in (
        ("a " * 100, {}, "`inputs` must have less than 50 tokens. Given: "),
        ("a", {"stop": list("abcdef")}, "`stop` supports up to 5 stop sequences. Given: 6"),
        ("a", {"best_of": 2, "do_sample": True}, "`best_of` != 1 is not allowed for this endpoint"),
        ("a", {"grammar": {"type": "regex", "value": "a"}}, "grammar is not supported"),
        ("a", {"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ):
        refused = launched.ask("/generate", {"inputs": inputs, "parameters": parameters})
        assert refused.status == 422
        assert refused.json["error"].startswith(f"Input validation error: {text}")
    assert launched.ask("/generate", {"inputs": "a" * 5000}).status == 413
    prompts = {"model": "tgi", "max_tokens": 1, "prompt": ["a", "b", "c"]}
    assert launched.ask("/v1/completions", prompts).status == 400
    assert launched.ask("/v1/completions", prompts | {"prompt": ["a", "b"]}).status == 200


def test_the_template_is_that_of_the_file(launched: Launched) -> None:
    answer = launched.ask("/chat_tokenize", {"messages": [{"role": "user", "content": "hello"}]})
    assert answer.json["templated_text"] == "<mine>[hello]"
    assert f"chats use the template of {launched.directory}/tokenizer_config.json" in launched.service.output


def test_keys_and_origins(launched: Launched) -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    for key in ("none", KEY.upper()):
        assert launched.ask("/generate", body, key=key).status == 401
    for origin in (*ORIGINS, "https://c.example"):
        answer = launched.ask("/generate", body, origin=origin)
        allowed = origin if origin in ORIGINS else None
        assert answer.headers.get("access-control-allow-origin") == allowed
    for pids in children_of(launched.service.process.pid).values():
        for pid in pids:
            assert KEY not in Path(f"/proc/{pid}/environ").read_text()
            assert KEY not in Path(f"/proc/{pid}/cmdline").read_text()


def test_the_log(launched: Launched) -> None:
    output = launched.service.output
    assert "using 1 shard: sharded is false and num_shard is unset" in output
    for flag in ("--waiting-served-ratio", "--usage-stats"):
        assert f"{flag} has no effect: " in output
    assert "  served_model_name: org/tiny (--model-id)" in output
    assert "  auth_tokens: (hidden) (API_KEY)" in output
