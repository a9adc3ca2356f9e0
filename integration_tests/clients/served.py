"""Launches a service for clients of all HTTP APIs, with transformers' expected responses."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from integration_tests.clients.expectations import ChatAnswer, Completion, Served
from integration_tests.support.greedy_answers import Oracle
from integration_tests.support.service import Client, serve
from integration_tests.support.tuned_files import LINEAR, write_adapter
from tests.support.greedy import count_certain, generate
from tests.support.shard.checkpoints import write_llama
from tests.support.tokenizers.trained import write_byte_level

VOCAB_SIZE, MAX_SEQUENCE_LENGTH, EOS_ID = 400, 2048, 1
MODEL, OTHER_NAME, ADAPTER = "tiny", "tiny-by-another-name", "tuned"
API_KEY = "a-key-of-this-test"
SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}  # chosen by the model's authors
WORDS = "girl bread fox dog time once upon little quick brown lazy café def return argument".split(" ")
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# In the style of published templates: beginning of text, tools, roles, calls, and the begin of the answer.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for tool in tools or [] %}
{{- (tool | tojson) + '\\n' }}
{%- endfor %}
{%- for message in messages %}
{{- '<|' + message['role'] + '|>\\n' + message['content'] | trim + '\\n' }}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- (call['function']['arguments'] | tojson) + '}\\n</tool_call>\\n' }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}
{{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}"""
FLAGS = ["--dtype", "float32", "--http-api", "tgi,lmi,openai"]


def write_served_model(directory: Path) -> Oracle:
    """Create a random Llama that writes ASCII with greedy sampling, with a chat template."""
    write_llama(directory, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_SEQUENCE_LENGTH, eos_token_id=1)
    tokenizer = write_byte_level(directory, VOCAB_SIZE - len(MARKS))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    pieces = [i for piece, i in tokenizer.get_vocab().items() if not piece.replace("Ġ", " ").isascii()]
    pieces += [tokenizer.token_to_id(mark) for mark in MARKS]  # they occur where a grammar requires them
    tensors["lm_head.weight"][torch.tensor(pieces)] = 0
    tensors["lm_head.weight"][1] *= 2  # the end-of-sequence token, so that some responses end
    save_file(tensors, path, {"format": "pt"})
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_sample": True, **SAMPLING}))
    path = directory / "tokenizer_config.json"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return Oracle(LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32), tokenizer)


@contextmanager
def launch_served(
    directory: Path, *flags: str, max_sequence_length: int = MAX_SEQUENCE_LENGTH, has_key: bool = True
) -> Iterator[tuple[Served, Client]]:
    """Launch the service for a model created in `directory`, with an adapter and a key that clients need
    unless `has_key` is False."""
    model = directory / "model"
    oracle = write_served_model(model)
    write_adapter(directory / ADAPTER, model, 9, LINEAR)
    keys = directory / "keys"
    keys.write_text(f"tenant tested {API_KEY}\n")
    names = [
        "--served-model-name",
        f"{MODEL},{OTHER_NAME}",
        "--lora-adapters",
        f"{ADAPTER}={directory / ADAPTER}",
    ]
    completions, chats = expected_completions(oracle), expected_chats(oracle, model)
    names += ["--max-sequence-length", str(max_sequence_length)]
    if has_key:
        names += ["--auth-tokens-path", str(keys)]
    for client in serve(model, *FLAGS, *names, *flags):
        url = f"{client.service.http}/v1"
        target = f"127.0.0.1:{client.service.grpc_port}"
        limits = (str(model), max_sequence_length)
        yield Served(url, API_KEY, MODEL, *limits, completions, chats, target), client


def expected_completions(oracle: Oracle) -> list[Completion]:
    r = random.Random(3)
    asked = [(" ".join(r.choices(WORDS, k=r.randint(2, 20))), r.randint(8, 24)) for _ in range(24)]
    answers = [complete(oracle, text, oracle.tokenizer.encode(text).ids, limit) for text, limit in asked]
    return _choose(answers, 10)


def expected_chats(oracle: Oracle, directory: Path) -> list[ChatAnswer]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    r = random.Random(4)
    chats = [_converse(r) for _ in range(12)]
    prompts = [_render(tokenizer, messages) for messages in chats]
    encode = oracle.tokenizer.encode
    answers = [complete(oracle, text, encode(text, add_special_tokens=False).ids, 20) for text in prompts]
    good = _choose(answers, 6)
    return [
        ChatAnswer(messages, prompt, answer)
        for messages, prompt, answer in zip(chats, prompts, answers, strict=True)
        if answer in good
    ]


@torch.inference_mode()
def complete(oracle: Oracle, prompt: str, ids: list[int], max_tokens: int) -> Completion | None:
    """Return the greedy continuation; None if two scores are too close to decide, or if it ends within a
    character."""
    output_ids, steps = generate(oracle.model, ids, max_new_tokens=max_tokens)
    text = oracle.tokenizer.decode(output_ids)
    if count_certain(steps) < len(output_ids) or "\ufffd" in text:
        return None
    logits = oracle.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)  # [num_ids - 1, vocab_size]
    return Completion(
        prompt,
        ids,
        max_tokens,
        text,
        output_ids,
        prompt_logprobs=[float(logits[i, token]) for i, token in enumerate(ids[1:])],
        logprobs=[float(steps[i, token]) for i, token in enumerate(output_ids)],
        finish_reason="stop" if output_ids[-1] == EOS_ID else "length",
    )


def _choose(answers: Sequence[Completion | None], least: int) -> list[Completion]:
    good = [answer for answer in answers if answer is not None]
    assert len(good) >= least, f"only {len(good)} of {len(answers)} answers are certain"
    assert {answer.finish_reason for answer in good} == {"stop", "length"}
    return good


def _converse(r: random.Random) -> list[dict[str, str]]:
    """Return chats with a system message or none, and then a user message, or a user, an assistant and a user
    message."""
    roles = [*["system"][: r.randrange(2)], *["user", "assistant"] * r.randrange(2), "user"]
    return [{"role": role, "content": " ".join(r.choices(WORDS, k=r.randint(1, 8)))} for role in roles]


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(prompt, str)
    return prompt
