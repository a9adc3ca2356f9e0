"""transformers' continuous batching on the same checkpoint, 64 sequences at once."""

import time

import torch
import transformers

from bench.gpu.checkpoint import written_checkpoint
from bench.gpu.results import find_figure
from bench.gpu.target import Target, parse_target

NUM_SEQUENCES, INPUT_TOKENS, NEW_TOKENS = 64, 512, 256
OURS = "8b stream 64: output"


def main() -> None:
    target = parse_target("peers")
    with written_checkpoint(target, "8b") as path:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model = model.to(target.device).eval()
    measure(target, model)


def measure(target: Target, model: transformers.PreTrainedModel) -> None:
    input_tokens, new_tokens = (24, 8) if target.is_rehearsal else (INPUT_TOKENS, NEW_TOKENS)
    size = (NUM_SEQUENCES, input_tokens)
    input_ids = torch.randint(2, model.config.vocab_size, size).tolist()
    settings = transformers.GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    generate = getattr(model, "generate_batch", None)
    if generate is None:
        target.recorder.problem("transformers", "this version has no continuous batching")
        return
    try:
        start = time.perf_counter()
        outputs = generate(inputs=input_ids, generation_config=settings)
        seconds = time.perf_counter() - start
    except Exception as error:  # a peer that fails is named, and ours is measured without it
        target.recorder.problem("transformers", f"{type(error).__name__}: {error}".splitlines()[0])
        return
    num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
    target.recorder.figure("transformers 64: output", num_tokens / seconds, "tokens/s")
    ours = find_figure(target.path, OURS)
    if ours is not None:
        target.recorder.figure("transformers 64: ratio", ours / (num_tokens / seconds), "", "ours to theirs")


if __name__ == "__main__":
    main()
