"""Texts of many kinds, and SentencePiece models trained on them."""

import io
import random
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from tests.support.tokenizers.trained import TEXT

PIECES = [
    *(
        "Hello",
        "world",
        " the",
        " quick",
        "fox",
        "naïve",
        "Ünïcödé",
        "東京",
        "日本語",
        "한국어",
        "العربية",
        "🙂",
        "👩‍👩‍👧",
    ),
    *(
        "é",
        "123",
        "4567890",
        "3.14",
        "'s",
        "'LL",
        "don't",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        ".",
        ",",
    ),
    *(
        "!?",
        "...",
        "()",
        "{}",
        "<>",
        "<s>",
        "</s>",
        "def f(x):\n    return x+1\n",
        "https://a.b/c?d=e&f",
        "ABCdef",
    ),
    *("camelCase", "snake_case", "①", "½", "\u00a0", "\u3000", "ß", "x" * 20, "�", "\x07"),
]


def texts(count: int, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(PIECES, k=rng.randrange(1, 12))) for _ in range(count)]


def train(kind: str, **options: Any) -> Any:
    """Return a SentencePiece model as the message in its file."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXT * 4, *PIECES]),
        model_writer=written,
        model_type=kind,
        vocab_size=420,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    result = sentencepiece_model_pb2.ModelProto()
    result.ParseFromString(written.getvalue())
    return result


def pieces_of(model: Any) -> tuple[list[str], list[int], list[float]]:
    pieces = model.pieces
    return [p.piece for p in pieces], [p.type for p in pieces], [p.score for p in pieces]
