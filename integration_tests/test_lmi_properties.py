"""A service launched like an LMI container: a folder with a model and its serving.properties, and variables.
Its greedy responses are transformers'."""

from pathlib import Path

import pytest

from integration_tests.clients.served import write_served_model
from tests.support.greedy import generate
from tests.support.http_exchange import HttpReply, exchange
from tests.support.processes import Service

pytestmark = pytest.mark.slow

PROMPT, NUM_TOKENS, LENGTH = "once upon a time a girl", 12, 64
PROPERTIES = f"""\
# As an article about LMI writes it.
engine = MPI
option.tensor_parallel_degree: max
option.rolling_batch=auto
option.dtype fp32
option.max_rolling_batch_size=\\
    4
option.max_model_len={LENGTH}
option.trust_remote_code=False
option.batch_scheduler_policy=guaranteed_no_evict
job_queue_size=3
"""
VARIABLES = {
    "COMPAT": "lmi",
    "OPTION_MAX_MODEL_LEN": "32",
    "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS": "16",
    "SERVING_CHUNKED_READ_TIMEOUT": "60",
    "SM_NUM_GPUS": "7",
    "MAX_CONCURRENT_REQUESTS": "1",
}


def launch(directory: Path, env: dict[str, str]) -> Service:
    log = ["--termination-log", str(directory / "log")]
    ports = ["--bind", "127.0.0.1", "--port", "0", "--grpc-port", "0"]
    env = {"TGIS_DEVICE": "cpu", "OPTION_MODEL_DIR": str(directory / "model"), **VARIABLES, **env}
    return Service(["launcher", *ports, *log], env)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the parent of its folder, and the greedy response to PROMPT."""
    directory = tmp_path_factory.mktemp("lmi")
    oracle = write_served_model(directory / "model")
    (directory / "model" / "serving.properties").write_text(PROPERTIES)
    ids = oracle.tokenizer.encode(PROMPT).ids
    tokens, _ = generate(oracle.model, ids, max_new_tokens=NUM_TOKENS)
    return directory, oracle.tokenizer.decode(tokens)


def ask(url: str, prompt: str) -> HttpReply:
    return exchange(f"{url}/invocations", {"inputs": prompt, "parameters": {"max_new_tokens": NUM_TOKENS}})


def test_a_folder_with_properties_is_served(model: tuple[Path, str]) -> None:
    service = launch(model[0], {}).wait_until_serving()
    try:
        assert exchange(f"{service.http}/ping").status == 200
        answer = ask(service.http, PROMPT)
        assert (answer.status, answer.json["generated_text"]) == (200, model[1])
        refusal = ask(service.http, PROMPT * LENGTH)
        assert (refusal.status, f"must be < {LENGTH}" in refusal.text) == (424, True), refusal.text
    finally:
        code = service.end()
    assert code == 0, service.output
    for text in (
        f"option.max_model_len={LENGTH} (serving.properties:8): used as --max-sequence-length {LENGTH}",
        "OPTION_MAX_MODEL_LEN=32 (environment): overridden by option.max_model_len in serving.properties:8",
        "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS=16 (environment): used as --max-step-tokens 16",
        "SM_NUM_GPUS=7 (environment): overridden by option.tensor_parallel_degree in serving.properties:3",
        "job_queue_size=3 (serving.properties:11): used as --max-concurrent-requests 7",
        "engine=MPI (serving.properties:2): no effect: ",
        "max_message_bytes=67108864",
    ):
        assert text in service.output, service.output


def test_a_start_that_takes_too_long_ends(model: tuple[Path, str]) -> None:
    service = launch(model[0], {"SERVING_MODEL_LOADING_TIMEOUT": "0.1"})
    assert service.process.wait(60) == 1
    assert service.end() == 1
    assert service.lines[-1].endswith("error: the model was not loaded within 0.1 s: see --startup-timeout")
    assert (model[0] / "log").read_text() == "the model was not loaded within 0.1 s: see --startup-timeout\n"
