"""Small tokenizers, trained when they are needed."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a little girl who had no bread.",
    "def function(argument): return argument + 1  # naïve café, 東京, Ünïcödé, 🙂 and 👩‍👩‍👧",
]

ASCII_TEXT = [text.encode("ascii", "ignore").decode() for text in TEXT]
ALPHABET = "A B C a b c d e f ' . , ! 1 2"
SPECIAL_TOKENS = ["<s>", "</s>"]


def write_byte_level(directory: Path, vocab_size: int = 400, bos: bool = True) -> Tokenizer:
    """Write tokenizer.json and tokenizer_config.json; <s> is 0, </s> is 1."""
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


def write_byte_fallback(directory: Path, vocab_size: int = 400, bos: bool = True) -> Tokenizer:
    """Write a tokenizer like Llama 2's: characters outside the vocabulary become byte tokens, with ids 2 to
    257."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    _train(trained, trainers.BpeTrainer(vocab_size=vocab_size - 258, show_progress=False), ASCII_TEXT)
    learned = json.loads(trained.to_str())["model"]
    pieces = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _write(tokenizer, directory, bos)


def write_metaspace(directory: Path, vocab_size: int = 300, bos: bool = True) -> Tokenizer:
    """Write a tokenizer like T5's or BLOOM's predecessors': a unigram model whose pieces include spaces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    return _write(_train(tokenizer, trainer), directory, bos)


def write_wordpiece(directory: Path, vocab_size: int = 300, bos: bool = True) -> Tokenizer:
    """Write a tokenizer like BERT's: pieces within a word begin with ##."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*SPECIAL_TOKENS, "<unk>"], show_progress=False
    )
    return _write(_train(tokenizer, trainer), directory, bos)


def write_suffix_bpe(directory: Path, vocab_size: int = 300, bos: bool = True) -> Tokenizer:
    """Write a tokenizer like GPT-1's: pieces at the end of a word end with </w>."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, "<unk>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    return _write(_train(tokenizer, trainer), directory, bos)


def write_plain(directory: Path, bos: bool = True) -> Tokenizer:
    """Write a tokenizer of whole words without a decoder."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(special_tokens=[*SPECIAL_TOKENS, "<unk>"], show_progress=False)
    return _write(_train(tokenizer, trainer), directory, bos)


def _train(tokenizer: Tokenizer, trainer: trainers.Trainer, text: list[str] = TEXT) -> Tokenizer:
    tokenizer.train_from_iterator([*text, ALPHABET], trainer)
    return tokenizer


def _write(tokenizer: Tokenizer, directory: Path, bos: bool) -> Tokenizer:
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"add_bos_token": bos, "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer
