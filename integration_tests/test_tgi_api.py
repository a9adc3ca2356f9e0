"""A service launched like TGI, by flags and by variables: its information, its responses, its refusals at the
limit, and streams that survive a lost shard."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from integration_tests.support.inputs_requests import tgi_body
from integration_tests.support.inputs_service import (
    Launched,
    busy,
    check_survival,
    launched,
    wait_for_status,
)
from tests.support.processes import children_of

pytestmark = pytest.mark.slow

KEY = "a-key-of-this-test"
FLAGS = (
    "--compat tgi --model-id FOLDER/model --num-shard 2 --port 0 --hostname 127.0.0.1 --dtype float32 "
    "--max-concurrent-requests 8 --max-best-of 3 --max-stop-sequences 5 --max-top-n-tokens 6 "
    "--max-input-tokens 400 --max-total-tokens 512 --max-client-batch-size 3 --validation-workers 2 "
    "--waiting-served-ratio 1.2 --max-waiting-tokens 20 --max-batch-prefill-tokens 256 "
    "--max-batch-total-tokens 4096 --max-batch-size 8 --cuda-graphs 0 --payload-limit 1000000 "
    "--shard-uds-path /tmp/text-generation-server --master-addr localhost --master-port 29500 --json-output "
    "--watermark-gamma 0.5 --watermark-delta 2.0 --cors-allow-origin https://example.com --usage-stats off "
    f"--disable-custom-kernels --api-key {KEY} --graceful-termination-timeout 20"
).split()
VARIABLES = {
    "COMPAT": "tgi",
    "MODEL_ID": "FOLDER/model",
    "NUM_SHARD": "1",
    "PORT": "0",
    "HOSTNAME": "127.0.0.1",
    "DTYPE": "float32",
    "MAX_INPUT_LENGTH": "400",
    "MAX_TOTAL_TOKENS": "512",
    "MAX_CONCURRENT_REQUESTS": "8",
    "MAX_BEST_OF": "3",
    "API_KEY": KEY,
}
STARTS = {"flags, two ranks": (FLAGS, {}), "variables": ([], VARIABLES)}


@pytest.fixture(scope="module", params=STARTS)
def tgi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    flags, env = STARTS[request.param]
    with launched(tmp_path_factory.mktemp("tgi"), flags, env, KEY) as service:
        yield service


def test_info_describes_the_service(tgi: Launched) -> None:
    answer = tgi.ask("/info")
    info = answer.json
    assert answer.status == 200
    assert (info["max_input_tokens"], info["max_total_tokens"], info["max_best_of"]) == (400, 512, 3)
    assert info["max_concurrent_requests"] == 8
    for path in ("/", "/health", "/ping"):
        assert (tgi.ask(path).status, tgi.ask(path).body) == (200, b"")
    assert tgi.ask("/metrics").status == 200


def test_answers_are_those_of_transformers(tgi: Launched) -> None:
    for i, asked in enumerate(tgi.served.completions):
        fields = {"temperature": 0, "max_tokens": asked.max_tokens}
        ways = tgi.apis.ways(fields)
        way = ways[("TGI", "TGI, any", "TGI, streamed")[i % 3]]
        answer = way(asked.prompt, fields)
        assert (answer.text, answer.num_tokens) == (asked.text, len(asked.output_ids))
        assert answer.logprobs == pytest.approx(asked.logprobs, abs=1e-3)


def test_a_key_is_asked_for(tgi: Launched) -> None:
    bare = Launched(tgi.service, replace(tgi.served, api_key="another"))
    assert bare.ask("/generate", {"inputs": "a"}).status == 401
    assert bare.ask("/health").status == 200


def test_it_is_overloaded(tgi: Launched) -> None:
    """It is refused before the request is checked."""
    stream = tgi_body("a girl", {"temperature": 0, "max_tokens": 400})
    with busy(tgi, "/generate_stream", stream, 8):
        for body in ({"inputs": "fox"}, {"inputs": "fox", "parameters": {"top_p": 7}}):
            refusal = tgi.ask("/generate", body)
            assert refusal.status == 429
            assert refusal.json == {"error": "Model is overloaded", "error_type": "overloaded"}
        assert tgi.ask("/health").status == 200


def test_streams_outlive_a_shard(tgi: Launched) -> None:
    check_survival(tgi, "/generate_stream", tgi_body)


def test_lost_shards_are_reported(tgi: Launched) -> None:
    os.kill(children_of(tgi.service.process.pid)["serve"][0], signal.SIGKILL)
    unhealthy = json.loads(wait_for_status(tgi, "/health", 503))
    assert unhealthy == {"error": "unhealthy", "error_type": "healthcheck"}
    wait_for_status(tgi, "/health", 200)
    assert tgi.ask("/generate", {"inputs": "fox", "parameters": {"max_new_tokens": 2}}).status == 200
