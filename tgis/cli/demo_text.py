"""Provides the demo model's training text, prose from Python's documentation, and trains its tokenizer."""

import re
from collections.abc import Iterable
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PROMPT = "The with statement is used to"
"""Beginning of a sentence in the training text."""

VOCAB_SIZE = 2048

# The fixed order keeps training independent of a dictionary's order.
TOPICS = (
    "objects numbers booleans truth lists dict sequence-types typesmethods exceptions naming identifiers "
    "atom-identifiers if while for try with function class return raise pass break continue del assert "
    "assignment augassign global nonlocal lambda yield async context-managers conversions binary unary power "
    "shifting bitwise in slicings subscriptions calls id-classes"
).split()

NOT_PROSE = re.compile(r"::=|>>>|->|\\|\[\d+\]|^\W+$|^ ", re.MULTILINE)
ASIDES = re.compile(r"(Changed|New|Added|Deprecated|See also|Notes?|Prior|In Python)\b")


def read_documents() -> list[str]:
    """Return one text of plain prose per topic, with one line per paragraph.

    Markup, code and quotation marks are removed; quotation marks would need escapes in a shell."""
    known: set[str] = set()
    documents = []
    for name in TOPICS:
        # Python releases add and remove topics.
        paragraphs = re.split(r"\n\s*\n", topics.get(name, "").strip())
        prose = [_strip_markup(paragraph) for paragraph in paragraphs if _is_prose(paragraph)]
        unique = [paragraph for paragraph in prose if paragraph not in known]
        known.update(unique)
        if unique:
            documents.append("\n\n".join(unique))
    return documents


def train_tokenizer(documents: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer that begins every text with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def _is_prose(paragraph: str) -> bool:
    return (
        len(paragraph) > 40
        and paragraph[-1] in ".:"
        and (paragraph[0].isupper() or paragraph[0] in '"*')
        and not NOT_PROSE.search(paragraph)
        and not ASIDES.match(paragraph)
    )


def _strip_markup(paragraph: str) -> str:
    joined = re.sub(r"\s+", " ", paragraph.replace("-\n", "-")).replace('"', "")
    return re.sub(r"\*(\S[^*]*?\S|\S)\*", r"\1", joined)
