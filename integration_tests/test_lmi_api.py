"""A service launched like DJL's LMI containers, by a folder and by variables: DJL's examples, its refusals at
the limit, and streams that survive a lost shard."""

import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from integration_tests.clients.lmi_examples import EXAMPLES, Example, Reply
from integration_tests.support.inputs_requests import lmi_body
from integration_tests.support.inputs_service import (
    Launched,
    busy,
    check_survival,
    launched,
    wait_for_status,
)
from tests.support.processes import children_of

pytestmark = pytest.mark.slow

PROPERTIES = """\
# As the containers have it
engine=Python
option.model_id=FOLDER/model
option.dtype=fp32
option.tensor_parallel_degree=2
option.rolling_batch=auto
option.max_rolling_batch_size=6
option.max_rolling_batch_prefill_tokens=256
option.max_model_len=512
option.enable_lora=true
option.trust_remote_code=false
option.entryPoint=djl_python.huggingface
option.model_loading_timeout=600
job_queue_size=2
predict_timeout=60
chunked_read_timeout=60
"""
VARIABLES = {
    "COMPAT": "lmi",
    "HF_MODEL_ID": "FOLDER/model",
    "OPTION_DTYPE": "fp32",
    "OPTION_TENSOR_PARALLEL_DEGREE": "1",
    "OPTION_ROLLING_BATCH": "vllm",
    "OPTION_MAX_ROLLING_BATCH_SIZE": "6",
    "OPTION_MAX_MODEL_LEN": "512",
    "SERVING_JOB_QUEUE_SIZE": "2",
}
OWN = ["--port", "0", "--bind", "127.0.0.1"]
NUM_BUSY = 8  # running and waiting requests


@pytest.fixture(scope="module", params=["a file, two ranks", "variables"])
def lmi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    directory = tmp_path_factory.mktemp("lmi")
    flags, env = OWN, VARIABLES
    if request.param != "variables":
        file = directory / "serving.properties"
        file.write_text(PROPERTIES.replace("FOLDER", str(directory)))
        flags, env = [*OWN, "--compat", "lmi", "--properties", str(file)], {}
    with launched(directory, flags, env) as service:
        yield service


def invoke(lmi: Launched, body: Mapping[str, Any]) -> Reply:
    answer = lmi.ask("/invocations", body)
    return Reply(answer.status, answer.headers["content-type"], answer.body)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__name__)
def test_examples_of_djl(example: Example, lmi: Launched) -> None:
    example(lmi.served, lambda body: invoke(lmi, body))


def test_the_model_has_a_name_in_the_path(lmi: Launched) -> None:
    asked = lmi.served.completions[0]
    body = lmi_body(asked.prompt, {"temperature": 0, "max_tokens": asked.max_tokens})
    name = lmi.ask("/v1/models").json["data"][0]["id"]
    answer = lmi.ask(f"/predictions/{name}", body)
    assert (answer.status, answer.json["generated_text"]) == (200, asked.text)
    assert lmi.ask("/predictions/another", body).status == 404


def test_the_queue_is_full(lmi: Launched) -> None:
    stream = {**lmi_body("a girl", {"temperature": 0, "max_tokens": 400, "ignore_eos": True}), "stream": True}
    with busy(lmi, "/invocations", stream, NUM_BUSY):
        refusal = lmi.ask("/invocations", {"inputs": "fox"})
        assert refusal.status == 503
        error = refusal.json
        assert (error["code"], error["type"]) == (503, "WlmCapacityException")
        assert error["message"].startswith("Worker queue capacity exceeded for model: ")
        assert lmi.ask("/ping").status == 200


def test_streams_outlive_a_shard(lmi: Launched) -> None:
    check_survival(lmi, "/invocations", lambda *given: {**lmi_body(*given), "stream": True})


def test_lost_shards_are_reported(lmi: Launched) -> None:
    os.kill(children_of(lmi.service.process.pid)["serve"][0], signal.SIGKILL)
    wait_for_status(lmi, "/ping", 503)
    wait_for_status(lmi, "/ping", 200)
    assert lmi.ask("/invocations", {"inputs": "fox", "parameters": {"max_new_tokens": 2}}).status == 200
