"""Small tokenizers, trained on the spot."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a little girl who had no bread.",
    "def function(argument): return argument + 1  # naïve café, 東京, Ünïcödé, 🙂 and 👩‍👩‍👧",
]


def write_byte_level(directory: Path, vocab_size: int = 400, bos: bool = True) -> Tokenizer:
    """tokenizer.json and tokenizer_config.json; <s> is 0, </s> is 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"add_bos_token": bos, "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer
