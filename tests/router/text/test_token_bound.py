"""Check the bound on bytes per token against the library's tokens for adversarial texts."""

import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from tgis.router.text.token_bound import NFC_FACTOR, max_bytes_per_token

TO_BYTES = normalizers.ByteLevel()
SHRINKING = "\u1fbe\u0308\u0301"
"""A text of 7 bytes that NFC shortens to U+0390, which has 2 bytes."""
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
UNITS = [" ", "ab", "1", "k", "K", "\n", "=-", "é", "\u0390", "각", "\u1e69", "東", "🙂", "▁", "\u00c5"]
"""Units that long vocabulary entries repeat."""
CONTENTS = [
    "<x>",
    "<|end of text|>",
    " " * 30,
    "\u212b" * 4,
    "naïve e\u0301",
    "K",
    "a b c",
    "\n\n",
    "\u0390" * 9,
]
ODD = (
    "\u212a \u2126 \u1fef \u0344 \u1d7f \u3000 \u0301 \u2460 \ufdfa \U0001d7cf \u200b \0 \x7f \t x . 7".split(
        " "
    )
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


class Vocabulary:
    """The entries and merges of a BPE model."""

    def __init__(self, entries: Iterable[str]) -> None:
        self.entries = {entry: i for i, entry in enumerate(["<s>", *entries])}
        self.merges: list[tuple[str, str]] = []

    def add_run(self, unit: str, doublings: int) -> None:
        """Add 2 ** `doublings` repetitions of the unit, and all entries that merge into it."""
        word = unit[0]
        self._add(word)
        for character in unit[1:]:
            self._add(character)
            word = self._merge(word, character)
        for _ in range(doublings):
            word = self._merge(word, word)

    def model(self, **options: Any) -> models.BPE:
        return models.BPE(self.entries, self.merges, **options)

    def _merge(self, left: str, right: str) -> str:
        self._add(left + right)
        if (left, right) not in self.merges:
            self.merges.append((left, right))
        return left + right

    def _add(self, entry: str) -> None:
        self.entries.setdefault(entry, len(self.entries))


def byte_level(*units: str, doublings: int = 4, **options: Any) -> Tokenizer:
    """Build a tokenizer like GPT-2's, without a leading space or splitting, so that any run is one token."""
    vocabulary = Vocabulary(sorted(pre_tokenizers.ByteLevel.alphabet()))
    for unit in units:
        vocabulary.add_run(TO_BYTES.normalize_str(unit), doublings)
    tokenizer = Tokenizer(vocabulary.model(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


def byte_fallback(*units: str, doublings: int = 4, **options: Any) -> Tokenizer:
    """Build a tokenizer like Llama 2's: spaces are ▁, and unknown characters are spelled in bytes."""
    vocabulary = Vocabulary(["<unk>", *BYTE_TOKENS])
    for unit in units:
        vocabulary.add_run(unit.replace(" ", "▁"), doublings)
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True} | options
    tokenizer = Tokenizer(vocabulary.model(**options))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def changed(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    """Set parts of the tokenizer."""
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def rewritten(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    """Return the tokenizer with parts that only its file can express."""
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | parts))


def with_added(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def count(tokenizer: Tokenizer, text: str) -> int:
    """Return the number of tokens as the router counts them."""
    [encoding] = tokenizer.encode_batch_fast([text])
    return len(encoding.ids)


def least(text: str, bound: int) -> int:
    return -(-len(text.encode()) // bound)


def test_no_text_has_more_bytes_for_each_of_its_composition_than_the_factor_says() -> None:
    """Check the bound for NFC by an exhaustive search of Unicode, as the library implements it.

    A text and its NFC have the same decomposition. Each decomposed character is weighted with the most bytes
    of any character that decomposes to it alone. No text then has more bytes than the weight of its
    decomposition, so it is enough to weigh the characters that NFC keeps."""
    nfc, nfd = normalizers.NFC(), normalizers.NFD()
    everything = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000 and i != ord("\n")]
    pairs = zip(everything, nfd.normalize_str("\n".join(everything)).split("\n"), strict=True)
    decomposed = {character: parts for character, parts in pairs if parts != character}
    weights: dict[str, int] = {}
    for character, parts in decomposed.items():
        if len(parts) == 1:
            weights[parts] = max(len(character.encode()), weights.get(parts, 0))

    def weigh(parts: str) -> int:
        return sum(max(len(part.encode()), weights.get(part, 0)) for part in parts)

    assert all(len(character.encode()) <= weigh(parts) for character, parts in decomposed.items())
    # All other characters stay unchanged and weigh their own bytes.
    left = [
        character
        for character in decomposed.keys() | weights.keys()
        if nfc.normalize_str(character) == character
    ]
    ratios = {c: weigh(decomposed.get(c, c)) / len(c.encode()) for c in left}
    assert max(ratios.values()) == NFC_FACTOR
    assert len(nfc.normalize_str(SHRINKING).encode()) * NFC_FACTOR == len(SHRINKING.encode())


def test_a_text_and_its_composition_decompose_to_the_same_characters() -> None:
    """Check the assumptions of the search above."""
    r, nfc, nfd = random.Random(0), normalizers.NFC(), normalizers.NFD()
    marks = [
        "\u0301",
        "\u0308",
        "\u0345",
        "\u0323",
        "\u0338",
        "\u093c",
        "\u1161",
        "\u11a8",
        "\u0344",
        "\u3099",
    ]
    for _ in range(3000):
        text = "".join(r.choices([*UNITS, *ODD, *marks, *marks, chr(r.randrange(0x20, 0xD800))], k=12))
        assert sorted(nfd.normalize_str(nfc.normalize_str(text))) == sorted(nfd.normalize_str(text))


SPACES = AddedToken(" " * 24, normalized=True)
END = AddedToken("<|endoftext|>", special=True, normalized=False)
TEMPLATE = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
LIKE_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
LIKE_LLAMA3 = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
)
LIKE_FALCON = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(False),
        pre_tokenizers.Digits(),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
)


def one_id_for_two() -> Tokenizer:
    """Build a tokenizer whose entry and next added token share an ID.

    The entry is itself an added token, so the library confuses the normal forms of the two."""
    parts = json.loads(changed(byte_level(), normalizer=normalizers.Replace(" ", "▁")).to_str())
    vocab, flags = parts["model"]["vocab"], {"special": False, "single_word": False, "normalized": True}
    size = len(vocab) + 1
    vocab["Z Z Z"] = size
    flags |= {"lstrip": False, "rstrip": False}
    added = [{"id": size + i, "content": content, **flags} for i, content in enumerate(["Z Z Z", "ab"])]
    return Tokenizer.from_str(json.dumps(parts | {"added_tokens": added}))


# A tokenizer, its bound, and a text with as few tokens as the bound allows.
BOUNDED: dict[str, tuple[Tokenizer, int, str]] = {
    "GPT-2": (with_added(changed(byte_level(" "), pre_tokenizer=LIKE_GPT2), END), 16, " " * 160),
    "GPT-NeoX": (with_added(changed(byte_level(" "), normalizer=normalizers.NFC()), SPACES, END), 84, ""),
    "Llama 3": (
        changed(
            byte_level(" ", doublings=7, ignore_merges=True),
            pre_tokenizer=LIKE_LLAMA3,
            post_processor=processors.Sequence([processors.ByteLevel(), TEMPLATE]),
        ),
        128,
        " " * 128,
    ),
    "Qwen": (changed(byte_level("\u0390"), normalizer=normalizers.NFC()), 112, SHRINKING * 160),
    "Falcon": (changed(byte_level("a"), pre_tokenizer=LIKE_FALCON), 16, "a" * 160),
    "Llama 2": (with_added(byte_fallback(" "), AddedToken("<s>", special=True)), 48, "▁" * 159),
    "Mistral": (
        changed(
            byte_fallback(" "),
            normalizer=None,
            pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"),
        ),
        48,
        "",
    ),
    "Gemma": (
        changed(
            byte_fallback("東"),
            normalizer=normalizers.Replace(" ", "▁"),
            pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
        ),
        48,
        "東" * 160,
    ),
    "added tokens are the longest": (with_added(byte_level("ab"), AddedToken("x" * 50)), 50, "x" * 500),
    "an added token that is found decomposed": (
        with_added(changed(byte_level(), normalizer=normalizers.NFC()), AddedToken("\u0390" * 9)),
        63,
        SHRINKING * 90,
    ),
    "an added token that grows": (
        with_added(changed(byte_level(), normalizer=normalizers.Replace(" ", "▁")), AddedToken(" " * 9)),
        27,
        "▁" * 90,
    ),
    "an added token that is found as another": (one_id_for_two(), 9, "Z▁Z▁Z" * 10),
    "an added token of single words": (
        with_added(byte_level(), AddedToken("x" * 20, single_word=True)),
        20,
        "x" * 20,
    ),
    "a roberta": (
        changed(byte_level(" "), post_processor=processors.RobertaProcessing(("</s>", 2), ("<s>", 0))),
        16,
        "",
    ),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_are_as_low_as_they_can_be(name: str) -> None:
    tokenizer, bound, text = BOUNDED[name]
    assert max_bytes_per_token(tokenizer) == bound
    if text:
        tokenizer.post_processor = None
        assert count(tokenizer, text) == least(text, bound)


def shared_ids() -> Tokenizer:
    """Build a tokenizer in which entries of 2 and 8 characters share an ID, so that merges confuse them."""
    tokenizer = byte_level("a", "b", doublings=3)
    model = json.loads(tokenizer.to_str())["model"]
    model["vocab"]["aa"] = model["vocab"]["bbbbbbbb"]
    return rewritten(tokenizer, model=model)


def without(tokenizer: Tokenizer, *entries: str) -> Tokenizer:
    model = json.loads(tokenizer.to_str())["model"]
    for entry in entries:
        del model["vocab"][entry]
    model["merges"] = [merge for merge in model["merges"] if not {*merge} & {*entries}]
    return rewritten(tokenizer, model=model)


def template(single: list[Any], pair: list[Any]) -> dict[str, Any]:
    special = {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def normalized_by(*parts: normalizers.Normalizer, unit: str = "k") -> Tokenizer:
    return changed(byte_level(unit), normalizer=normalizers.Sequence(list(parts)))


def split_by(*parts: pre_tokenizers.PreTokenizer) -> Tokenizer:
    steps = [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return changed(byte_level("a", " "), pre_tokenizer=pre_tokenizers.Sequence(steps))


def truncated() -> Tokenizer:
    tokenizer = byte_level("a")
    tokenizer.enable_truncation(5)
    return tokenizer


A, B = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
BEGIN = {"SpecialToken": {"id": "<s>", "type_id": 0}}
TWO_TEMPLATES = {"type": "Sequence", "processors": [template([BEGIN, A], [A, B]), template([A], [A])]}
NFC, NFD, KELVINS = normalizers.NFC(), normalizers.NFD(), "\u212a" * 1000

# Tokenizers without a bound, and a text with fewer tokens than the entries suggest.
UNBOUNDED: dict[str, tuple[Tokenizer, str]] = {
    "strips on the left": (with_added(byte_level(" "), AddedToken("<x>", lstrip=True)), " " * 1000 + "<x>"),
    "strips on the right": (
        with_added(byte_level(" "), AddedToken("<x>", rstrip=True, special=True)),
        "<x>" + "\n \u3000" * 1000,
    ),
    "NFD": (normalized_by(NFD, unit="K"), KELVINS),
    "NFKD": (normalized_by(normalizers.NFKD(), unit="1"), "\U0001d7cf" * 1000),
    "NFKC": (normalized_by(normalizers.NFKC(), unit="1"), "\U0001d7cf" * 1000),
    "Lowercase": (normalized_by(normalizers.Lowercase()), KELVINS),
    "Strip": (normalized_by(normalizers.Strip(), unit=" "), " " * 1000),
    "StripAccents": (normalized_by(normalizers.StripAccents()), "\u0301" * 1000),
    "Nmt": (normalized_by(normalizers.Nmt()), "\x7f" * 1000),
    "BertNormalizer": (normalized_by(normalizers.BertNormalizer()), "\x7f" * 1000),
    "Replace with less": (normalized_by(normalizers.Replace("kk", "k")), "k" * 1000),
    "Replace by an expression": (normalized_by(normalizers.Replace(Regex("k+"), "k" * 9)), "k" * 1000),
    "one of several normalizers": (
        normalized_by(NFC, normalizers.Sequence([normalizers.Lowercase()])),
        KELVINS,
    ),
    "Whitespace": (split_by(pre_tokenizers.Whitespace()), " " * 1000),
    "WhitespaceSplit": (split_by(pre_tokenizers.WhitespaceSplit()), " " * 1000),
    "BertPreTokenizer": (split_by(pre_tokenizers.BertPreTokenizer()), " " * 1000),
    "CharDelimiterSplit": (split_by(pre_tokenizers.CharDelimiterSplit("a")), "a" * 1000),
    "Split that removes": (split_by(pre_tokenizers.Split("a", "removed")), "a" * 1000),
    "Punctuation that removes": (split_by(pre_tokenizers.Punctuation("removed")), "." * 1000),
    "one of several pre-tokenizers": (
        split_by(pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.WhitespaceSplit()])),
        " " * 1000,
    ),
    "bytes without a pre-tokenizer": (changed(byte_level("a"), pre_tokenizer=None), "東" * 1000),
    "a byte is missing and dropped": (without(byte_level(), "Ġ"), " " * 1000),
    "a byte is missing and fused": (without(byte_level(unk_token="<s>", fuse_unk=True), "Ġ"), " " * 1000),
    "a fallback byte is missing and dropped": (without(byte_fallback(unk_token=None), "<0xE6>"), "東" * 1000),
    "a fallback byte is missing and fused": (without(byte_fallback(), "<0xE6>"), "東" * 1000),
    "byte tokens without fallback": (byte_fallback(byte_fallback=False), "東" * 1000),
    "a suffix": (changed(byte_level(end_of_word_suffix="</w>"), pre_tokenizer=LIKE_GPT2), "a." * 1000),
    "a prefix": (byte_level(continuing_subword_prefix="##"), "a" * 1000),
    "entries that share an id": (shared_ids(), "b" * 1600),
    "Unigram": (
        Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, byte_fallback=False)),
        "東" * 1000,
    ),
    "WordPiece": (Tokenizer(models.WordPiece({"<unk>": 0, "a": 1}, unk_token="<unk>")), "東" * 1000),
    "WordLevel": (Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")), "東" * 1000),
    "truncation": (truncated(), "a" * 1000),
    "a template without the text": (
        rewritten(byte_level("a"), post_processor=template([BEGIN], [A, B])),
        "a" * 1000,
    ),
    "a template after another": (rewritten(byte_level("a"), post_processor=TWO_TEMPLATES), "a" * 1000),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_there_is_no_bound_where_text_gets_lost(name: str) -> None:
    tokenizer, text = UNBOUNDED[name]
    longest = max(len(entry.encode()) for entry in tokenizer.get_vocab())
    assert count(tokenizer, text) < least(text, longest)
    assert max_bytes_per_token(tokenizer) is None


@pytest.mark.parametrize(
    "step",
    [pre_tokenizers.FixedLength(5), pre_tokenizers.UnicodeScripts()],
    ids=lambda step: type(step).__name__,
)
def test_there_is_no_bound_for_unknown_parts(step: pre_tokenizers.PreTokenizer) -> None:
    assert max_bytes_per_token(split_by(step)) is None


# The random search. Most tokenizers it draws have a bound, and they are as unusual as files may be.
NORMALIZERS: list[tuple[normalizers.Normalizer, int]] = [
    (NFC, 8),
    (normalizers.Prepend("▁"), 2),
    (normalizers.Prepend("\u0301"), 1),
    (normalizers.Replace(" ", "▁"), 4),
    (normalizers.Replace("a", "A\u030a"), 2),
    (normalizers.Replace("\u0301", "\u0308\u0301"), 2),
    (normalizers.Replace("▁", " "), 1),
    (normalizers.Replace("ab", "1"), 1),
    (normalizers.Replace(Regex(r"\s+"), "  "), 1),
    *((kind(), 1) for kind in (normalizers.NFD, normalizers.NFKC, normalizers.Lowercase, normalizers.Strip)),
]
STEPS: list[tuple[pre_tokenizers.PreTokenizer, int]] = [
    (pre_tokenizers.ByteLevel(add_prefix_space=True), 2),
    (pre_tokenizers.ByteLevel(add_prefix_space=False), 2),
    *(
        (pre_tokenizers.Metaspace("▁", scheme, split), 1)
        for scheme in ("always", "first", "never")
        for split in (True, False)
    ),
    *((pre_tokenizers.Split(Regex(r"\s|k+|"), how), 1) for how in ("isolated", "contiguous")),
    *(
        (pre_tokenizers.Split("ab", how, invert=True), 1)
        for how in ("merged_with_previous", "merged_with_next")
    ),
    (pre_tokenizers.Split(Regex(LLAMA3), "isolated"), 2),
    (pre_tokenizers.Digits(individual_digits=True), 1),
    (pre_tokenizers.Punctuation("contiguous"), 1),
    (pre_tokenizers.Split(" ", "removed"), 1),
    (pre_tokenizers.WhitespaceSplit(), 1),
]
FORMS: list[Callable[[str], str]] = [
    NFC.normalize_str,
    NFD.normalize_str,
    lambda text: text.replace("\u0390", SHRINKING).replace("K", "\u212a").replace(" ", "▁"),
]
PROCESSORS = [None, TEMPLATE, processors.ByteLevel(), processors.BertProcessing(("<s>", 0), ("<s>", 0))]


def draw_some(r: random.Random, parts: list[tuple[Any, int]], max_count: int) -> list[Any]:
    return r.choices([part for part, _ in parts], [weight for _, weight in parts], k=r.randint(0, max_count))


def draw_tokenizer(r: random.Random) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer, and the units of its long entries and added tokens."""
    options = {
        "fuse_unk": r.random() < 0.5,
        "ignore_merges": r.random() < 0.3,
        "dropout": r.choice([None, None, 0.3]),
    }
    options["unk_token"] = r.choice([None, "<s>"])
    units = r.sample(UNITS, r.choice([0, 1, 1, 2, 4]))
    if r.random() < 0.5:
        tokenizer = byte_level(*units, doublings=r.randint(0, 5), **options)
        last = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        options["byte_fallback"] = r.random() < 0.9
        tokenizer = byte_fallback(*units, doublings=r.randint(0, 5), **options)
        last = []
    if r.random() < 0.15:
        tokenizer = without(tokenizer, *{"Ġ", "<0x20>"} & tokenizer.get_vocab().keys())
    tokenizer.normalizer = normalizers.Sequence(draw_some(r, NORMALIZERS, 3))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*draw_some(r, STEPS, 2), *last])
    tokenizer.post_processor = r.choice(PROCESSORS)
    contents = r.sample(CONTENTS, r.randint(0, 3))
    for content in contents:
        flags = {name: r.random() < 0.5 for name in ("normalized", "special", "single_word")}
        strips = {name: r.random() < 0.1 for name in ("lstrip", "rstrip")}
        tokenizer.add_tokens([AddedToken(content, **flags, **strips)])
    return tokenizer, units + contents


def draw_text(r: random.Random, own: list[str]) -> str:
    """Return a run of one unit or of several, composed or not; half of them from the tokenizer's own
    units."""
    if own and r.random() < 0.5:
        spaces = r.choice(["", "", " " * 400, " \n\u3000" * 99])
        text = spaces + r.choice(own) * r.choice([1, 64, 320]) + spaces
    else:
        things = [*UNITS, *CONTENTS, *ODD, SHRINKING, *own]
        text = "".join(part * r.choice([1, 3, 40]) for part in r.choices(things, k=r.choice([1, 2, 6])))
    return r.choice(FORMS)(text)


def search(seeds: range) -> tuple[int, int]:
    """Return how many tokenizers have a bound, and how many texts come close to it."""
    num_bounded = num_close = 0
    for seed in seeds:
        r = random.Random(seed)
        tokenizer, own = draw_tokenizer(r)
        bound = max_bytes_per_token(tokenizer)
        if bound is None:
            continue
        num_bounded += 1
        for text in [draw_text(r, own) for _ in range(12)]:
            num_tokens = count(tokenizer, text)
            assert num_tokens >= least(text, bound), (seed, bound, text[:80], tokenizer.to_str()[:2000])
            num_close += len(text) > 10 * bound and num_tokens < 1.1 * least(text, bound)
    return num_bounded, num_close


@pytest.mark.slow
def test_a_random_search_finds_no_text_with_fewer_tokens() -> None:
    num_bounded, num_close = search(range(1000))
    assert num_bounded > 250
    assert num_close > 30


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_long_random_search_finds_no_text_with_fewer_tokens() -> None:
    num_bounded, num_close = search(range(1000, 31000))
    assert num_bounded > 8000
    assert num_close > 1000
