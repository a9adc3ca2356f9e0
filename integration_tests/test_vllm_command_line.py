"""A service launched with vLLM's command line and environment, and adapters whose names are added and removed
during requests. The responses are those of transformers and PEFT."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from integration_tests.clients.served import write_served_model
from integration_tests.support.greedy_answers import Oracle
from integration_tests.support.tuned_files import LINEAR, read_model, write_adapter, write_misfit
from tests.support.greedy import generate
from tests.support.http_exchange import exchange
from tests.support.processes import Service, children_of

pytestmark = pytest.mark.slow

PROMPT, NUM_TOKENS = "once upon a time a girl", 12
KEY = "a-key-of-this-test"
NAMES = ("sql", "code", "given")


@dataclass(frozen=True)
class VllmService:
    url: str
    pid: int
    adapters: Path
    texts: dict[str, str]
    """Return the greedy responses to PROMPT, by the adapter's folder; the bare model's name is tiny."""

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def post(self, route: str, **body: object) -> tuple[int, str]:
        path = f"{self.url}/v1/{route}_lora_adapter"
        reply = exchange(path, body, {"authorization": f"Bearer {KEY}"})
        return reply.status, reply.text

    def text(self, client: openai.OpenAI, model: str) -> str:
        answer = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text


def greedy(oracle: Oracle) -> str:
    ids = oracle.tokenizer.encode(PROMPT).ids
    tokens, _ = generate(oracle.model, ids, max_new_tokens=NUM_TOKENS, eos_token_id=None)
    return oracle.tokenizer.decode(tokens)


@pytest.fixture(scope="module", params=["1", "2"])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmService]:
    directory = tmp_path_factory.mktemp("vllm")
    model, adapters = directory / "model", directory / "adapters"
    oracle = write_served_model(model)
    texts = {"tiny": greedy(oracle)}
    for seed, name in enumerate(NAMES):
        write_adapter(adapters / name, model, seed, LINEAR)
        texts[name] = greedy(Oracle(read_model(model, adapters / name), oracle.tokenizer))
    write_misfit(adapters / "misfit", model)
    assert len(set(texts.values())) == len(texts), "the adapters change nothing"
    flags = (
        f"--served-model-name tiny tiny-too -tp {request.param} --dtype float --max-model-len 512 --port 0 "
        "--host 127.0.0.1 --grpc-port 0 --gpu-memory-utilization 0.9 --enable-lora --max-loras 4 "
        "--enable-prefix-caching --max_num_seqs 8 --disable-log-requests "
        f"--lora-modules given={adapters}/given"
    )
    env = {
        "COMPAT": "vllm",
        "VLLM_API_KEY": f"another\n{KEY}",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_PLUGINS": "lora_filesystem_resolver",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(adapters),
        "TERMINATION_LOG": str(directory / "log"),
    }
    launched = Service(["launcher", str(model), *flags.split()], env).wait_until_serving()
    try:
        yield VllmService(launched.http, launched.process.pid, adapters, texts)
    finally:
        code = launched.end()
    assert code == 0, launched.output
    assert KEY not in launched.output
    assert "--enable-lora has no effect" in launched.output


def test_models_and_answers(service: VllmService) -> None:
    with service.client() as client:
        assert [model.id for model in client.models.list()] == ["tiny", "tiny-too", "given"]
        assert service.text(client, "tiny-too") == service.texts["tiny"]
        for name in NAMES:  # also those that were not loaded
            assert service.text(client, name) == service.texts[name]


def test_requests_need_a_key(service: VllmService) -> None:
    for key in ("", "none", KEY[:-1]):
        with openai.OpenAI(base_url=f"{service.url}/v1", api_key=key or "x", max_retries=0) as client:
            for call in (client.models.list, lambda client=client: service.text(client, "tiny")):
                with pytest.raises(openai.AuthenticationError):
                    call()


def test_children_do_not_show_the_key(service: VllmService) -> None:
    children = children_of(service.pid)
    assert {"router", "serve"} <= children.keys()
    for pid in (one for pids in children.values() for one in pids):
        for name in ("cmdline", "environ"):
            assert KEY not in Path(f"/proc/{pid}/{name}").read_text(), (pid, name)


def test_bad_adapters_get_no_name(service: VllmService) -> None:
    for path, status in (("misfit", 400), ("missing", 404), ("/etc", 400), (str(service.adapters), 400)):
        actual, text = service.post("load", lora_name="bad", lora_path=path)
        assert actual == status, text
    with service.client() as client, pytest.raises(openai.NotFoundError):
        service.text(client, "bad")


def test_names_come_and_go_under_traffic(service: VllmService) -> None:
    """A name stands for one adapter or the other, or is unknown, and every response is one of those."""
    stopped = threading.Event()

    def ask() -> set[str]:
        texts: set[str] = set()
        with service.client() as client:
            while not stopped.is_set():
                assert service.text(client, "tiny") == service.texts["tiny"]
                try:
                    texts.add(service.text(client, "moving"))
                except openai.NotFoundError:
                    texts.add("unknown")
        return texts

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask) for _ in range(4)]
        try:
            for turn in range(12):
                name = NAMES[turn % 2]
                path = name if turn % 3 else str(service.adapters / name)
                status, text = service.post("load", lora_name="moving", lora_path=path, load_inplace=True)
                assert (status, text) == (200, "Success: LoRA adapter 'moving' added successfully.")
                with service.client() as client:
                    assert service.text(client, "moving") == service.texts[name]
                if turn % 4 == 3:
                    status, text = service.post("unload", lora_name="moving")
                    assert (status, text) == (200, "Success: LoRA adapter 'moving' removed successfully.")
                    with service.client() as client, pytest.raises(openai.NotFoundError):
                        service.text(client, "moving")
        finally:
            stopped.set()
        texts = set().union(*(each.result() for each in asking))
    assert texts <= {service.texts["sql"], service.texts["code"], "unknown"}
    assert len(texts) >= 2
