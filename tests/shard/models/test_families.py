"""Whole models against transformers: loading, and results of mixed steps."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.shard.checkpoints import CASES, LLAMA3_ROPE, write_llama
from tests.support.shard.stepping import Stepper, load, read_config
from tgis.shard.layers.activation import NAMES
from tgis.shard.models import registry
from tgis.shard.models.interface import UnsupportedModelError

Checkpoint = Callable[[str], Path]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24], [30]]
NEW_TOKENS = 6


def read_oracle(directory: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """Return transformers' model with weights rounded to `dtype` and float32 arithmetic."""
    return transformers.LlamaForCausalLM.from_pretrained(directory, dtype=dtype).eval().float()


@torch.inference_mode()
def generate_oracle(oracle: transformers.PreTrainedModel, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Return the prompt and greedy tokens, and the logprobs after each position."""
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        ids.append(int(oracle(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids, oracle(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


def run(stepper: Stepper, ids: list[list[int]], chunk: int) -> list[Tensor]:
    """Return the logprobs after all positions. Sequence i joins at step i; its prompt is computed in chunks
    and the rest token by token, together with the other sequences."""
    done, parts = [0] * len(ids), [[] for _ in ids]
    for clock in range(1000):
        work = {}
        for i, tokens in enumerate(ids):
            if clock >= i and done[i] < len(tokens):
                in_prompt = min(done[i] + chunk, len(tokens) - NEW_TOKENS)
                work[i] = (tokens[: max(in_prompt, done[i] + 1)], done[i])
        if not work:
            break
        for i, logits in stepper.step(work).items():
            parts[i].append(logits.log_softmax(-1))
            done[i] += len(logits)
    return [torch.cat(logprobs) for logprobs in parts]


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, checkpoint: Checkpoint) -> None:
    directory = checkpoint(case)
    oracle = read_oracle(directory)
    expected = [generate_oracle(oracle, prompt) for prompt in PROMPTS]
    for block_size, chunk in ((4, 4), (16, 100)):
        stepper = Stepper(load(directory), block_size=block_size)
        actual = run(stepper, [ids for ids, _ in expected], chunk)
        for prompt, (ids, logprobs), ours in zip(PROMPTS, expected, actual, strict=True):
            torch.testing.assert_close(ours, logprobs, rtol=1e-4, atol=1e-4)
            assert ours.argmax(-1)[len(prompt) - 1 : -1].tolist() == ids[len(prompt) :]


# Tolerance of logprobs by the types of weights and cache: about three times the measured error.
BOUNDS = {
    (torch.float16, torch.float32): 1e-4,
    (torch.bfloat16, torch.float32): 1e-4,
    (torch.float16, torch.float16): 5e-3,
    (torch.float32, torch.bfloat16): 5e-2,
    (torch.bfloat16, torch.bfloat16): 5e-2,
}


@pytest.mark.parametrize(("weights", "cache"), BOUNDS, ids=str)
def test_half_precision_is_bounded(weights: torch.dtype, cache: torch.dtype, checkpoint: Checkpoint) -> None:
    """Compare with equally rounded weights in float32 arithmetic."""
    directory = checkpoint("biases")
    expected = [generate_oracle(read_oracle(directory, weights), prompt) for prompt in PROMPTS]
    stepper = Stepper(load(directory, dtype=weights), dtype=cache)
    actual = run(stepper, [ids for ids, _ in expected], 4)
    worst = max(
        (ours - logprobs).abs().max().item() for ours, (_, logprobs) in zip(actual, expected, strict=True)
    )
    assert worst < BOUNDS[weights, cache]


def test_stored_type_does_not_matter(tmp_path: Path) -> None:
    """A bfloat16 checkpoint loaded as float32 gives transformers' results."""
    write_llama(tmp_path, dtype=torch.bfloat16)
    ids, logprobs = generate_oracle(read_oracle(tmp_path), PROMPTS[0])
    torch.testing.assert_close(run(Stepper(load(tmp_path)), [ids], 100)[0], logprobs, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that is wide enough for matrix products to select among their algorithms."""
    directory = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 192, "intermediate_size": 1104, "num_attention_heads": 6, "vocab_size": 501}
    write_llama(directory, **sizes, rope_parameters=LLAMA3_ROPE)
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bits_do_not_depend_on_batch_or_chunks(dtype: torch.dtype, wide: Path) -> None:
    torch.manual_seed(1)
    ids = [torch.randint(3, 500, (length,)).tolist() for length in (90, 61, 75, 8)]
    model = load(wide, dtype=dtype)
    whole = [run(Stepper(model, block_size=16, dtype=dtype), [tokens], 1000)[0] for tokens in ids]
    for chunk in (1, 7, 32):
        together = run(Stepper(model, block_size=16, dtype=dtype), ids, chunk)
        assert all(torch.equal(mine, alone) for mine, alone in zip(together, whole, strict=True))


def test_reads_configurations_of_any_age(checkpoint: Checkpoint) -> None:
    config = read_config(checkpoint("llama3_rope"))
    scaling = config.pop("rope_parameters")
    expected = registry.make_spec({**config, "rope_parameters": scaling})
    theta = scaling.pop("rope_theta")
    assert registry.make_spec({**config, "rope_scaling": scaling, "rope_theta": theta}) == expected
    linear = {"type": "linear", "factor": 2.0}
    assert registry.make_spec({**config, "rope_scaling": linear}).rope.scaling.factor == 2.0
    for key in ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "hidden_act"):
        config.pop(key)
    old = registry.make_spec({**config, "rope_scaling": None})
    assert (old.num_kv_heads, old.head_dim, old.rope.theta, old.rope.scaling) == (4, 8, 10000.0, None)


KNOWN = ", ".join(sorted(registry.FAMILIES))
REFUSED = {
    f"model type 'mamba' is not supported; supported are: {KNOWN}": {"model_type": "mamba"},
    f"model type None is not supported; supported are: {KNOWN}": {"model_type": None},
    "hidden_size is missing in the model's configuration": {"hidden_size": None},
    "num_hidden_layers 'two' of the configuration is not a positive integer": {"num_hidden_layers": "two"},
    "vocab_size 1000000000000 of the configuration is larger than 2147483647": {"vocab_size": 10**12},
    "num_hidden_layers 2147483648 of the configuration is larger than 4096": {"num_hidden_layers": 1 << 31},
    "intermediate_size 2147483648 of the configuration is larger than 2147483647": {
        "intermediate_size": 1 << 31
    },
    "rope type 'mrope' is not supported; supported are: default, linear, dynamic, llama3, yarn, longrope, "
    "proportional": {"rope_parameters": {"rope_type": "mrope", "factor": 2.0}},
    "low_freq_factor is missing in the model's configuration": {
        "rope_parameters": {"rope_type": "llama3", "factor": 2.0}
    },
    f"activation 'mish' is not supported; supported are: {', '.join(NAMES)}": {"hidden_act": "mish"},
    "4 attention heads cannot share 3 key/value heads": {"num_key_value_heads": 3},
}


@pytest.mark.parametrize("text", REFUSED)
def test_refuses_in_one_line(text: str, checkpoint: Checkpoint) -> None:
    config = {**read_config(checkpoint("grouped_queries")), **REFUSED[text]}
    with pytest.raises(UnsupportedModelError) as caught:
        registry.make_spec(config)
    assert str(caught.value) == text


@pytest.mark.parametrize(("size", "fits"), [(1, True), (2, True), (4, True), (3, False), (8, False)])
def test_models_that_cannot_be_split(size: int, fits: bool, checkpoint: Checkpoint) -> None:
    spec = registry.make_spec(read_config(checkpoint("grouped_queries")))
    if fits:
        registry.check_sharding(spec, size)
    else:
        with pytest.raises(UnsupportedModelError, match=f"cannot be split over {size} shards"):
            registry.check_sharding(spec, size)
