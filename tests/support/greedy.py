"""transformers' greedy answer to one unpadded input, the basis of all oracles."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# For scores this close, either token may be chosen.
CLOSE = 1e-4


@torch.inference_mode()
def generate(model: Any, input_ids: Sequence[int], **settings: Any) -> tuple[list[int], Tensor]:
    """Return the generated tokens, and their log-probabilities [num_tokens, vocab_size]."""
    out = model.generate(
        input_ids=torch.tensor([list(input_ids)]),
        attention_mask=torch.ones(1, len(input_ids), dtype=torch.int64),
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **settings,
    )
    return out.sequences[0, -len(out.logits) :].tolist(), torch.stack(out.logits)[:, 0].log_softmax(-1)


def count_certain(logprobs: Tensor) -> int:
    """Return the number of tokens before the first one whose two best scores are too close."""
    best = logprobs.topk(2).values
    close = (best[:, 0] - best[:, 1] < CLOSE).nonzero().flatten().tolist()
    return min(close, default=len(logprobs))
