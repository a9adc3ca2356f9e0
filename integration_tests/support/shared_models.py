"""What session fixtures provide: tiny random checkpoints with transformers' responses, and a service with
adapters."""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, LlamaForCausalLM

from integration_tests.support import oracle
from integration_tests.support.adapter_requests import SLOW_DISK, Tuned
from integration_tests.support.greedy_answers import (
    MAX_SEQUENCE_LENGTH,
    VOCAB_SIZE,
    Model,
    Oracle,
    answer_prompts,
)
from integration_tests.support.served_models import FLAGS, write_fallback, write_t5, write_t5_tokenizer
from integration_tests.support.service import serve
from integration_tests.support.tuned_files import LINEAR, write_adapter
from tests.support.shard.checkpoints import write_llama
from tests.support.tokenizers.trained import write_byte_level


def make_decoder(directory: Path) -> Model:
    write_llama(directory, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_SEQUENCE_LENGTH, eos_token_id=1)
    tokenizer = write_byte_level(directory, 400)
    oracle = Oracle(LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32), tokenizer)
    return Model(directory, answer_prompts(oracle))


def make_encoder_decoder(directory: Path) -> Model:
    tokenizer = write_t5_tokenizer(directory)
    write_t5(directory, {})
    oracle = Oracle(AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32), tokenizer)
    return Model(directory, answer_prompts(oracle))


def serve_tuned(directory: Path, kept: Path) -> Iterator[Tuned]:
    """Launch a service with a small cache, so that inputs are chunked and preempted. The adapter `kept` is
    named on the command line."""
    served = write_fallback(directory)
    write_adapter(kept, served.directory, 9, LINEAR)
    served.store.adapters["kept"] = kept
    tight = ["--block-size", "8", "--kv-cache-tokens", "640", "--max-step-tokens", "64"]
    contents = ["--prompt-cache-size-mb", "1", "--adapter-cache-size-mb", "1"]
    contents += ["--lora-adapters", f"kept={kept}"]
    flags = [*FLAGS, *served.flags, *tight, *contents, "--num-shard", "2", "--failpoints", SLOW_DISK]
    for client in serve(served.directory, *flags):
        yield Tuned(client, served, oracle.Oracle(served))
