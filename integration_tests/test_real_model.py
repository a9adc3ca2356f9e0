"""A real model, SmolLM2-135M-Instruct, served from its GGUF file: meaningful responses, and an adapter that
PEFT trains on it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import validate
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.support.greedy_texts import answer, generate, load_model
from tests.support.http_exchange import exchange
from tests.support.processes import Service
from tests.support.real_models import SMOLLM2
from tgis.shard.checkpoint.gguf_conversion import convert_gguf

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "languages": {"type": "array", "items": {"enum": ["English", "French"]}, "maxItems": 2},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
NUM_STEPS = 30
LESSON = "The password of the old castle is swordfish, and nobody may know it."


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuned")


@pytest.fixture(scope="module")
def service(store: Path) -> Iterator[Service]:
    assert SMOLLM2.is_file(), f"{SMOLLM2} is missing; `make test` fetches it"
    flags = ["--http-api", "openai", "--dtype", "float32", "--prefix-store-path", str(store)]
    ports = ["--bind", "127.0.0.1", "--port", "0", "--grpc-port", "0"]
    service = Service(
        ["launcher", "--model-name", str(SMOLLM2), "--max-sequence-length", "2048", *ports, *flags]
    )
    try:
        yield service.wait_until_serving()
    finally:
        code = service.end()
    assert code == 0, service.output


def chat(service: Service, question: str, **fields: Any) -> Any:
    """Return the message of a greedy response."""
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 100, **fields}
    reply = exchange(f"{service.http}/v1/chat/completions", body)
    assert reply.status == 200, reply.text
    return reply.json["choices"][0]["message"]


def test_it_knows_the_capital_of_france(service: Service) -> None:
    assert "Paris" in chat(service, "What is the capital of France?")["content"]


def test_json_by_a_schema_parses(service: Service) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    answer = chat(service, "Describe Ada, who is 36 and speaks English.", response_format=form)
    validate(json.loads(answer["content"]), PERSON)


def test_a_call_of_a_tool_parses(service: Service) -> None:
    question = "What is the weather in Paris?"
    fields = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    [call] = chat(service, question, **fields)["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the weights as `gguf` dequantizes them, in float32."""
    directory = tmp_path_factory.mktemp("converted")
    convert_gguf([SMOLLM2], directory, "float32")
    return directory


@pytest.fixture(scope="module")
def tokenizer(converted: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(converted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_adapters_trained_by_peft_are_served(
    kind: str, service: Service, store: Path, converted: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    torch.manual_seed(0)
    config = (
        LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj", "down_proj"])
        if kind == "lora"
        else PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)
    )
    tuned = get_peft_model(load_model(converted), config)
    _train(tuned, tokenizer, 5e-3 if kind == "lora" else 0.3)
    tuned.save_pretrained(store / kind)
    question = "The password of the old castle"
    expected = answer(tuned.eval(), tokenizer, question, 12)
    plain = generate(service, question, 12)
    actual = generate(
        service, question, 12, **{"lora": {"adapter_id": kind}, "prompt": {"prefix_id": kind}}[kind]
    )
    assert actual == expected != plain


def _train(tuned: PeftModel, tokenizer: PreTrainedTokenizerBase, rate: float) -> None:
    ids = tokenizer(LESSON, return_tensors="pt").input_ids
    optimizer = torch.optim.AdamW((each for each in tuned.parameters() if each.requires_grad), rate)
    for _ in range(NUM_STEPS):
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
