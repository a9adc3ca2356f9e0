"""Tiny speculators in their published layouts, and plain models of them over transformers' states.

Their last matrices are fitted to given texts, so that most proposals for these texts are right."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Text:
    """Tokens, and the final states after each of them."""

    token_ids: list[int]
    states: Tensor  # [num_tokens, width]


@dataclass(frozen=True)
class Heads:
    """Speculator of one kind."""

    config: dict[str, Any]
    tensors: Tensors
    num_tokens: int
    propose: Callable[[Tensor, int, int], list[int]]
    """Function that returns a number of proposals, given the state before the last token and that token."""
    file: str = "model.safetensors"

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file({name: x.clone() for name, x in self.tensors.items()}, directory / self.file)
        return directory


@torch.inference_mode()
def read_texts(model_path: Path, token_ids: Sequence[list[int]]) -> list[Text]:
    """Return texts with the states that transformers computes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    outputs = (model(torch.tensor([ids]), output_hidden_states=True) for ids in token_ids)
    states = [output.hidden_states[-1][0] for output in outputs]
    return [Text(ids, each) for ids, each in zip(token_ids, states, strict=True)]


def find_targets(texts: Sequence[Text], ahead: int) -> tuple[Tensor, Tensor]:
    """Return the states that have a token `ahead` places after the next one, and these tokens."""
    states = [text.states[: max(len(text.token_ids) - 1 - ahead, 0)] for text in texts]
    return torch.cat(states), torch.cat([torch.tensor(text.token_ids[1 + ahead :]) for text in texts]).long()


def fit(inputs: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the matrix [vocab_size, width] whose products with the inputs are closest to the targets."""
    wanted = F.one_hot(targets, vocab_size).double()
    return torch.linalg.lstsq(inputs.double(), wanted, driver="gelsd").solution.T.float().contiguous()


def norm(x: Tensor, weight: Tensor | float, bias: Tensor | float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight + bias


def make_mlp(
    texts: Sequence[Text],
    vocab_size: int,
    is_tied: bool = False,
    scales_input: bool = False,
    num_tokens: int = 3,
    inner_dim: int = 96,
    prefix: str = "speculator.",
) -> Heads:
    width = texts[0].states.shape[1]
    random = torch.Generator().manual_seed(7)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "n_predict": num_tokens,
        "inner_dim": inner_dim,
        "emb_dim": width,
        "vocab_size": vocab_size,
        "tie_weights": is_tied,
        "scale_input": scales_input,
        "top_k_tokens_per_head": [5, 3, 2][:num_tokens],
    }
    state_weight = 0.5 ** (0.5 / num_tokens)
    embedding_weight = math.sqrt((1 - state_weight**2) * inner_dim / 2)
    tensors: Tensors = {}

    def draw(name: str, *shape: int, center: float = 0.0) -> None:
        tensors[prefix + name] = center + 0.3 * torch.randn(*shape, generator=random)

    def at(name: str, stage: int) -> Tensor:
        last = {"proj": 1}.get(name.partition(".")[0], 0) if is_tied else num_tokens
        first, _, end = name.partition(".")
        return tensors[f"{prefix}{first}.{min(stage, last)}.{end}"]

    for stage in range(num_tokens):
        if stage < 2 or not is_tied:
            draw(f"proj.{stage}.weight", inner_dim, inner_dim if stage else width)
        if stage == 0 or not is_tied:
            draw(f"emb.{stage}.weight", vocab_size, inner_dim)
            draw(f"ln.{stage}.weight", inner_dim, center=1.0)
            draw(f"ln.{stage}.bias", inner_dim)

    def advance(state: Tensor, token_ids: Tensor, stage: int) -> Tensor:
        if stage == 0 and scales_input:
            state = norm(state, 1.0, 0.0) / math.sqrt(2)
        embedded = at("emb.weight", stage)[token_ids] * embedding_weight
        mixed = state @ at("proj.weight", stage).T * state_weight + embedded
        return F.gelu(norm(mixed, at("ln.weight", stage), at("ln.bias", stage)))

    _fit_stages(texts, vocab_size, tensors, prefix, num_tokens, is_tied, advance)

    def propose(state: Tensor, token_id: int, count: int) -> list[int]:
        proposed = []
        for stage in range(count):
            state = advance(state, torch.tensor(token_id), stage)
            token_id = int((at("head.weight", stage) @ state).argmax())
            proposed.append(token_id)
        return proposed

    return Heads(config, tensors, num_tokens, propose)


def _fit_stages(
    texts: Sequence[Text],
    vocab_size: int,
    tensors: Tensors,
    prefix: str,
    num_tokens: int,
    is_tied: bool,
    advance: Callable[[Tensor, Tensor, int], Tensor],
) -> None:
    """Fit the heads, given right tokens before them."""
    fitted = []
    for count in range(1, num_tokens + 1):
        inputs, targets = [], []
        for text in texts:
            ids = torch.tensor(text.token_ids)
            num_states = max(len(ids) - 1 - count, 0)
            state = text.states[:num_states]
            for stage in range(count):
                state = advance(state, ids[1 + stage :][:num_states], stage)
            inputs.append(state)
            targets.append(ids[1 + count :])
        fitted.append((torch.cat(inputs), torch.cat(targets)))
    if is_tied:
        fitted = [(torch.cat([x for x, _ in fitted]), torch.cat([wanted for _, wanted in fitted]))]
    for stage, (x, wanted) in enumerate(fitted):
        tensors[f"{prefix}head.{stage}.weight"] = fit(x, wanted, vocab_size)


def make_medusa(
    texts: Sequence[Text],
    vocab_size: int,
    num_tokens: int = 3,
    num_layers: int = 2,
    head: Tensor | None = None,
    is_vllm: bool = False,
) -> Heads:
    """Return Medusa heads with matrices of their own, or with that of the model, `head`. `is_vllm` writes the
    names of vLLM's models."""
    width = texts[0].states.shape[1]
    random = torch.Generator().manual_seed(8)
    tensors: Tensors = {}
    heads = []
    for i in range(num_tokens):
        blocks = []
        for layer in range(num_layers):
            weight = 0.1 * torch.randn(width, width, generator=random)
            bias = 0.1 * torch.randn(width, generator=random)
            name = f"medusa_heads.blocks.{i}.layers.{layer}" if is_vllm else f"{i}.{layer}.linear"
            tensors |= {f"{name}.weight": weight} | ({} if is_vllm else {f"{name}.bias": bias})
            blocks.append((weight, torch.zeros(width) if is_vllm else bias))
        states, targets = find_targets(texts, i + 1)
        score = fit(_run_blocks(states, blocks), targets, vocab_size) if head is None else head
        if head is None:
            name = f"medusa_heads.lm_heads.{i}" if is_vllm else f"{i}.{num_layers}"
            tensors[f"{name}.weight"] = score
        heads.append((blocks, score))

    def propose(state: Tensor, token_id: int, count: int) -> list[int]:
        return [int((score @ _run_blocks(state, blocks)).argmax()) for blocks, score in heads[:count]]

    own = {"medusa_num_heads": num_tokens, "medusa_num_layers": num_layers, "base_model_name_or_path": "base"}
    vllm = {
        "model_type": "medusa",
        "num_heads": num_tokens,
        "num_hidden_layers": num_layers,
        "hidden_size": width,
        "vocab_size": vocab_size,
        "truncated_vocab_size": vocab_size,
    }
    file = "model.safetensors" if is_vllm else "medusa_lm_head.safetensors"
    return Heads(vllm if is_vllm else own, tensors, num_tokens, propose, file)


def _run_blocks(x: Tensor, blocks: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    for weight, bias in blocks:
        x = x + F.silu(x @ weight.T + bias)
    return x


def set_config(**values: Any) -> Callable[[Heads], None]:
    return lambda heads: heads.config.update(values)


def spoil(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Heads], None]:
    return lambda heads: heads.tensors.update({name: change(heads.tensors[name].clone())})


def remove(name: str) -> Callable[[Heads], None]:
    def change(heads: Heads) -> None:
        del heads.tensors[name]

    return change


def add_nan(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[-1] = float("nan")
    return x
