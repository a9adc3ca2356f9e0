"""Token ids of 2,000 varied texts for real GGUF files: the service's against llama.cpp's and
transformers'."""

import random
import unicodedata
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.support import llama_cpp
from tests.support.real_models import SMOLLM2
from tests.support.tokenizers.varied import PIECES
from tgis.convert.gguf.model_directory import write_model_directory

NUM_TEXTS = 2000
CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<bos>",
    "<eos>",
    "<unk>",
    "<pad>",
)
SENTENCES = (
    "The quick brown fox jumps over the lazy dog, didn't it?",
    "Die Straße führt über den Fluß; Äpfel kosten 3,50 €.",
    "L'été dernier, j'ai mangé des crêpes à Besançon.",
    "El niño comió piñas mañana; ¿por qué? ¡Olé!",
    "Съешь ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "敏捷的棕色狐狸跳过了懒狗。",
    "いろはにほへと ちりぬるを、カタカナ。",
    "키스의 고유조건은 입술끼리 만나야 한다.",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "עטלף אבק נס דרך מזגן שהתפוצץ",
    "Việt Nam: Tôi không hiểu tiếng Anh.",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; }",
    "SELECT * FROM t WHERE x >= 10 AND y LIKE '%z';",
    '{"a": [1, 2.5e-3, null], "b": {"c": "\\u00e9"}}',
    '<div class="x">&nbsp;</div>\n\t\t<!-- end -->',
    "1234567890 3.14159 1,000,000 0x1F 10^6 2026-11-28",
    "🙂👍🏽👩‍👩‍👧‍👦🇫🇷 ❤️ ✓ → ∑ ∞ √2",
)


def draw_texts() -> Iterator[str]:
    rng = random.Random(7)
    for number in range(NUM_TEXTS):
        kind = number % 5
        if kind == 0:
            yield "".join(rng.choices(PIECES, k=rng.randrange(1, 12)))
        elif kind == 1:
            yield " ".join(rng.choices(SENTENCES, k=rng.randrange(1, 4)))
        elif kind == 2:  # split anywhere
            text = rng.choice(SENTENCES)
            first, last = sorted(rng.choices(range(len(text) + 1), k=2))
            yield text[first : last + 1]
        elif kind == 3:
            yield "".join(rng.choices((*CONTROL, " ", "\n", "user", "Hi", *PIECES), k=rng.randrange(1, 8)))
        else:
            yield "".join(rng.choice((" ", "  ", "\n", "\t", "a", "1", "é", ".", "字")) for _ in range(12))


@pytest.fixture(scope="module")
def directory(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made")
    write_model_directory([gguf_file], made)
    return made


@pytest.mark.slow
def test_tokens_are_those_of_llama_cpp(gguf_file: Path, directory: Path) -> None:
    texts = list(draw_texts())
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    theirs = llama_cpp.ask(llama_cpp.find_python(), gguf_file, texts=texts)["texts"]
    different = [
        (text, encoding.ids, expected)
        for text, encoding, expected in zip(texts, ours.encode_batch(texts), theirs, strict=True)
        if encoding.ids != expected
    ]
    assert different == []


@pytest.mark.slow
def test_tokens_are_those_of_transformers(gguf_file: Path, directory: Path) -> None:
    """Load the file with transformers. It ignores the name of the splitting pattern, by which SmolLM2 splits
    digits from preceding white space."""
    texts = list(draw_texts())
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    different = [
        text
        for text, encoding in zip(texts, ours.encode_batch(texts), strict=True)
        if encoding.ids != theirs(text).input_ids
    ]
    if gguf_file == SMOLLM2:
        assert different, "transformers splits these texts as well: compare all"
        different = [text for text in different if not has_number_after_space(text)]
    assert different == []


def has_number_after_space(text: str) -> bool:
    return any(a.isspace() and unicodedata.category(b)[0] == "N" for a, b in pairwise(text))
