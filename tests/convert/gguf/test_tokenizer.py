"""Tokenizers of GGUF files against the libraries of their vocabularies."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer

from tests.support.tokenizers.trained import write_byte_fallback, write_byte_level
from tests.support.tokenizers.varied import pieces_of, texts, train
from tgis.convert.atomic_write import ConversionError
from tgis.convert.gguf.files import open_gguf
from tgis.convert.gguf.pre_tokenizers import SPLITTINGS
from tgis.convert.gguf.tokenizer import GgufVocabulary, list_merges, make_tokenizer


def convert(path: Path, kind: str, tokens: list[str], types: list[int], **more: Any) -> Tokenizer:
    """Write a vocabulary with the package and further keys, and read it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return make_tokenizer(GgufVocabulary(open_gguf([path]).metadata))


def test_byte_level(tmp_path: Path) -> None:
    theirs = write_byte_level(tmp_path, 600)
    model = json.loads(theirs.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    ours = convert(
        tmp_path / "a.gguf",
        "gpt2",
        tokens,
        [3, 3] + [1] * (len(tokens) - 2),
        tokenizer_pre="gpt-2",
        token_merges=[" ".join(merge) for merge in model["merges"]],
        bos_token_id=0,
        eos_token_id=1,
        add_bos_token=True,
    )
    for text in texts(500):
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        assert ours.decode(ours.encode(text, add_special_tokens=False).ids, False) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_bpe(prefix: bool, tmp_path: Path) -> None:
    model = train(
        "bpe",
        byte_fallback=True,
        add_dummy_prefix=prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    tokens, types, scores = pieces_of(model)
    ours = convert(
        tmp_path / "a.gguf",
        "llama",
        tokens,
        types,
        token_scores=scores,
        unk_token_id=oracle.unk_id(),
        bos_token_id=oracle.bos_id(),
        eos_token_id=oracle.eos_id(),
        add_space_prefix=prefix,
        add_eos_token=True,
    )
    for text in texts(500):
        if "<s>" in text or "</s>" in text:  # which SentencePiece never matches in texts
            continue
        expected = oracle.encode(text)
        assert ours.encode(text).ids == [oracle.bos_id(), *expected, oracle.eos_id()], text
        assert ours.decode(expected, False) == oracle.decode(expected)


def test_merges_of_pieces_with_bytes(tmp_path: Path) -> None:
    """Gemma 4's files have merges instead of scores."""
    trained = json.loads(write_byte_fallback(tmp_path, 500).to_str())["model"]
    merges = [tuple(merge) for merge in trained["merges"]]
    theirs = transformers.GemmaTokenizer(
        trained["vocab"], merges, unk_token="<0x00>", bos_token="<s>", eos_token="</s>", pad_token="<s>"
    )
    tokens = sorted(trained["vocab"], key=trained["vocab"].get)
    ours = convert(
        tmp_path / "a.gguf",
        "gemma4",
        tokens,
        [3, 3] + [6] * 256 + [1] * (len(tokens) - 258),
        token_merges=[" ".join(merge) for merge in merges],
        bos_token_id=0,
        eos_token_id=1,
        add_space_prefix=False,
        add_bos_token=True,
    )
    for text in texts(500):
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text).ids == [0, *expected], text
        assert ours.decode(expected, False) == text


def plain_merges(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that concatenate to a token, sorted by score and ids."""
    ids = {token: id for id, token in enumerate(tokens) if types[id] in (1, 4, 5)}
    merges = []
    for token, id in ids.items():
        for i in range(1, len(token)):
            first, second = token[:i], token[i:]
            if first in ids and second in ids:
                merges.append((-scores[id], ids[first], ids[second], first, second))
    return [(first, second) for *_, first, second in sorted(merges)]


def test_the_merges_of_a_sentencepiece_model(tmp_path: Path) -> None:
    """Some scores are equal, like those of user-defined tokens."""
    tokens, types, scores = pieces_of(train("bpe", byte_fallback=True))
    types[300:320] = [4] * 20
    scores = [max(score, -60.0) for score in scores]
    convert(tmp_path / "a.gguf", "llama", tokens, types, token_scores=scores, unk_token_id=0)
    merges = list_merges(GgufVocabulary(open_gguf([tmp_path / "a.gguf"]).metadata))
    assert merges == plain_merges(tokens, types, scores)
    assert len(merges) > 50


def test_sentencepiece_unigram(tmp_path: Path) -> None:
    model = train("unigram", normalization_rule_name="nmt_nfkc")
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    tokens, types, scores = pieces_of(model)
    ours = convert(
        tmp_path / "a.gguf",
        "t5",
        tokens,
        types,
        token_scores=scores,
        unk_token_id=oracle.unk_id(),
        eos_token_id=oracle.eos_id(),
        precompiled_charsmap=model.normalizer_spec.precompiled_charsmap,
        remove_extra_whitespaces=True,
    )
    different = []
    for text in texts(500):
        if "<s>" in text or "</s>" in text:
            continue
        if ours.encode(text).ids != [*oracle.encode(text), oracle.eos_id()]:
            different.append(text)
    assert different == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt-2", transformers.GPT2Tokenizer),
        ("qwen2", transformers.Qwen2Tokenizer),
        ("olmo", transformers.GPTNeoXTokenizer),
        ("command-r", transformers.CohereTokenizer),
    ],
)
def test_splittings_are_those_of_transformers(name: str, kind: Any) -> None:
    ours, theirs = SPLITTINGS[name].pre_tokenizer(), kind().backend_tokenizer.pre_tokenizer
    for text in texts(500):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


@pytest.mark.parametrize("name", SPLITTINGS)
def test_no_splitting_loses_text(name: str) -> None:
    for text in texts(50):
        pieces = SPLITTINGS[name].pre_tokenizer().pre_tokenize_str(text)
        assert [start for _, (start, _) in pieces] == [0, *(end for _, (_, end) in pieces[:-1])]
        assert pieces[-1][1][1] == len(text)


def test_words_of_deepseek_have_letters_of_some_alphabets() -> None:
    """The others are pieces of their own. ASCII letters are also cut where the pattern of signs has them."""
    splitting = SPLITTINGS["deepseek-llm"].pre_tokenizer()
    cases = {
        "Слово слова": ["Слово", " слова"],
        "жაж": ["ж", "ა", "ж"],
        "ж𝐀": ["ж", "𝐀"],
        "жƻж": ["ж", "ƻ", "ж"],
        "жad": ["ж", "ad"],
        "a, b\n c": ["a", ",", " b", "\n", " c"],
        "x1234y": ["x", "1234", "y"],
        "日本 語": ["日本", " ", "語"],
        "end  ": ["end", "  "],
    }
    for text, pieces in cases.items():
        splits = [text[start:end] for _, (start, end) in splitting.pre_tokenize_str(text)]
        assert splits == pieces, text


def test_unsupported_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("bert", {}, "tokenizer.ggml.model 'bert' is not supported; use one of: gpt2, llama, gemma4, t5"),
        ("gpt2", {"tokenizer_pre": "kimi-k2"}, "tokenizer.ggml.pre 'kimi-k2' is not supported; use one of: "),
        ("gpt2", {}, "tokenizer.ggml.merges is missing"),
        (
            "gpt2",
            {"token_merges": ["ab"]},
            "tokenizer.ggml.merges contains 'ab', which is not a pair of tokens",
        ),
        ("gpt2", {"token_merges": ["a c"]}, "tokenizer.ggml.tokens cannot be used: "),
        ("llama", {}, "tokenizer.ggml.scores is missing"),
        ("llama", {"token_scores": [1.0]}, "tokenizer.ggml.scores has 1 entries for 2 tokens"),
        (
            "llama",
            {"token_scores": [1.0, 1.0], "bos_token_id": 2},
            "bos_token_id is 2, but there are 2 tokens",
        ),
    ]
    for number, (kind, more, text) in enumerate(cases):
        path = tmp_path / f"{number}.gguf"
        with pytest.raises(ConversionError) as caught:
            convert(path, kind, ["a", "b"], [1, 1], **more)
        assert str(caught.value).startswith(f"{path}: ")
        assert text in str(caught.value)
    with pytest.raises(ConversionError, match="token_type has 1 entries for 2 tokens"):
        convert(tmp_path / "a.gguf", "gpt2", ["a", "b"], [1])
