"""Greedy texts of a service and of transformers."""

from pathlib import Path
from typing import Any

import grpc
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tests.support.processes import Service
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub


def generate(service: Service, text: str, num_tokens: int, **fields: str) -> str:
    """Return greedy text over gRPC."""
    request = pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text=text)],
        params=pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=num_tokens)),
        **fields,
    )
    with grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel:
        return GenerationServiceStub(channel).Generate(request).responses[0].text


def answer(model: Any, tokenizer: PreTrainedTokenizerBase, text: str, num_tokens: int) -> str:
    """Return transformers' greedy text."""
    given = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**given, max_new_tokens=num_tokens, do_sample=False)
    return str(tokenizer.decode(ids[0, given.input_ids.shape[1] :], skip_special_tokens=True))


def load_model(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model
