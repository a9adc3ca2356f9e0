"""Check incremental text, token by token, against the library's decoding of whole sequences."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models

from tests.support import plain_text
from tests.support.seeds import seed_ranges
from tests.support.tokenizers.decoder_kinds import KINDS, random_ids
from tests.support.tokenizers.trained import write_byte_fallback, write_byte_level, write_wordpiece
from tgis.router.errors import StartupError
from tgis.router.text.detokenizer import MAX_UNIT, REPLACEMENT, Vocabulary
from tgis.router.text.tokenizer import Tokenizer


def pieces_of(vocabulary: Vocabulary, token_ids: list[int]) -> list[str]:
    """Return the text that each token releases, then the text at the end."""
    detokenizer = vocabulary.detokenizer()
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


def text_of(vocabulary: Vocabulary, token_ids: list[int]) -> str:
    return "".join(pieces_of(vocabulary, token_ids))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("output_special_tokens", [False, True])
@seed_ranges(300, 1000)
def test_pieces_are_the_whole_text(
    tmp_path: Path, kind: str, output_special_tokens: bool, seeds: range
) -> None:
    fast = KINDS[kind](tmp_path)
    vocabulary = Vocabulary(Tokenizer(tmp_path, 1), output_special_tokens)
    num_as_library = 0
    for seed in seeds:
        token_ids = random_ids(fast, random.Random(seed))
        text = text_of(vocabulary, token_ids)
        assert text == plain_text.text(fast, token_ids, not output_special_tokens)
        whole = plain_text.continuation(fast, token_ids, not output_special_tokens)
        num_as_library += text == whole
        is_valid = REPLACEMENT not in fast.decode(token_ids)
        assert text == whole or (not is_valid and "fallback" in kind)
    assert num_as_library > 0.7 * len(seeds), "the two differ on invalid bytes alone"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_that_are_shown_are_the_only_ones(tmp_path: Path, kind: str) -> None:
    """Return the library's decoding of the tokens without the skipped ones."""
    fast = KINDS[kind](tmp_path)
    fast.add_special_tokens(["[CALL]", "<|é|>"])
    fast.save(str(tmp_path / "tokenizer.json"))
    num_left_out = 0
    tokenizer = Tokenizer(tmp_path, 1)
    call, accented = map(tokenizer.added_token_id, ("[CALL]", "<|é|>"))
    assert call is not None
    assert accented is not None
    vocabulary = Vocabulary(tokenizer, shown=frozenset({call, accented}))
    for seed in range(300):
        r = random.Random(seed)
        token_ids = random_ids(fast, r)
        for _ in range(r.randint(1, 3)):
            token_ids.insert(r.randint(0, len(token_ids)), r.choice([call, accented, 0, 1]))
        pieces = [(token_id, fast.id_to_token(token_id)) for token_id in token_ids]
        kept = [token_id for token_id, piece in pieces if piece not in ("<s>", "</s>", "<unk>")]
        text = text_of(vocabulary, token_ids)
        assert text == plain_text.text(fast, kept, skip_special_tokens=False), token_ids
        assert text.count("[CALL]") == token_ids.count(call)
        num_left_out += kept != token_ids
    assert num_left_out > 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_its_own_begins_without_a_space(tmp_path: Path, kind: str) -> None:
    """Return the library's decoding with no text before it, as for an encoder-decoder model."""
    fast = KINDS[kind](tmp_path)
    vocabulary = Vocabulary(Tokenizer(tmp_path, 1), is_continuation=False)
    for seed in range(1000):
        token_ids = random_ids(fast, random.Random(seed))
        whole = fast.decode(token_ids)
        if REPLACEMENT not in whole:
            assert text_of(vocabulary, token_ids) == whole
    spaced = fast.encode("fox the fox", add_special_tokens=False).ids
    text = fast.decode(spaced)
    assert text.startswith(" ") is (kind == "byte_fallback_without_strip")
    assert text_of(vocabulary, spaced) == text
    assert text_of(vocabulary, [0, *spaced]) == text, "a token that is no text is not the first"


@pytest.mark.parametrize(
    "kind", ["byte_fallback", "metaspace", "wordpiece", "wordpiece_in_sequence", "plain"]
)
def test_a_continuation_keeps_its_first_space(tmp_path: Path, kind: str) -> None:
    fast = KINDS[kind](tmp_path)
    token_ids = fast.encode("fox the fox", add_special_tokens=False).ids
    assert text_of(Vocabulary(Tokenizer(tmp_path, 1)), token_ids) == " fox the fox"


@pytest.mark.parametrize("write", [write_byte_level, write_byte_fallback])
def test_characters_appear_with_their_last_byte(tmp_path: Path, write: Callable[[Path], Fast]) -> None:
    token_ids = write(tmp_path).encode("🙂", add_special_tokens=False).ids[-4:]
    assert len(token_ids) > 1
    *before, last, end = pieces_of(Vocabulary(Tokenizer(tmp_path, 1)), token_ids)
    assert (set(before), last, end) == ({""}, "🙂", "")


BYTE = 2
"""The ID of byte 0 in vocabularies with byte tokens."""


@pytest.mark.parametrize(
    ("spelled", "pieces"),
    [
        (b"\xe6\x9d\xb1", ["", "", "東", ""]),
        (b"a\xffb", ["a", "", "", ""]),
        (b"\xff\xe6\x9d\xb1", ["", "", "", "", ""]),
        (b"\xe6\x9d", ["", "", ""]),
        (b"\xef\xbf\xbd\x41", ["", "", "", "\N{REPLACEMENT CHARACTER}A", ""]),
    ],
)
def test_runs_of_byte_tokens(tmp_path: Path, spelled: bytes, pieces: list[str]) -> None:
    fast = write_byte_fallback(tmp_path)
    vocabulary = Vocabulary(Tokenizer(tmp_path, 1))
    run = [BYTE + byte for byte in spelled]
    assert pieces_of(vocabulary, run) == pieces
    [fox] = [token for token in fast.encode("the fox").ids if fast.id_to_token(token) == "▁fox"]
    unit = len("".join(pieces).encode())
    replaced = REPLACEMENT * (len(spelled) - unit)
    assert text_of(vocabulary, [*run, fox]) == "".join(pieces) + replaced + " fox"


def test_a_replacement_character_that_a_token_spells_is_like_any_other(tmp_path: Path) -> None:
    fast = Fast(models.WordLevel({"ï¿½": 0, "a": 1}, unk_token="a"))  # its three bytes in the byte alphabet
    fast.decoder = decoders.ByteLevel()
    fast.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary(Tokenizer(tmp_path, 1))
    assert fast.decode([0]) == REPLACEMENT
    assert pieces_of(vocabulary, [0, 0, 1, 0]) == ["", "", REPLACEMENT * 2 + "a", "", ""]


def test_special_tokens_are_shown_on_request(tmp_path: Path) -> None:
    token_ids = [*write_byte_level(tmp_path).encode("fox").ids, 1]
    for output_special_tokens, text in ((False, "fox"), (True, "<s>fox</s>")):
        assert text_of(Vocabulary(Tokenizer(tmp_path, 1), output_special_tokens), token_ids) == text


def test_no_space_is_cleaned_up(tmp_path: Path) -> None:
    """Check that only the decoder removes spaces."""
    fast = write_wordpiece(tmp_path)
    fast.decoder = decoders.WordPiece(cleanup=False)
    fast.save(str(tmp_path / "tokenizer.json"))
    token_ids = fast.encode("a fox , a dog .", add_special_tokens=False).ids
    assert text_of(Vocabulary(Tokenizer(tmp_path, 1)), token_ids) == " a fox , a dog ."


@pytest.mark.parametrize(
    ("decoder", "kind"),
    [
        (decoders.CTC(), "CTC"),
        (decoders.Fuse(), "Fuse"),
        (decoders.Sequence([decoders.Fuse(), decoders.CTC()]), "CTC"),
    ],
)
def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path, decoder: decoders.Decoder, kind: str) -> None:
    fast = Fast(models.BPE())
    fast.decoder = decoder
    fast.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(StartupError, match=f"Unsupported tokenizer type: {kind}"):
        Vocabulary(Tokenizer(tmp_path, 1))


def test_a_vocabulary_without_plain_text_is_refused(tmp_path: Path) -> None:
    fast = Fast(models.BPE({"<0x41>": 0, "<0x30>": 1, "▁": 2}, [], byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(StartupError, match="no token is plain text"):
        Vocabulary(Tokenizer(tmp_path, 1))


def test_a_placeholder_is_found_where_a_is_spelt_in_bytes(tmp_path: Path) -> None:
    vocab = {"<0x41>": 0, "<0x30>": 1, "<0xE6>": 2, "<0x9D>": 3, "<0xB1>": 4, "▁": 5, "▁b": 6}
    fast = Fast(models.BPE(vocab, [], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.save(str(tmp_path / "tokenizer.json"))
    assert text_of(Vocabulary(Tokenizer(tmp_path, 1)), [6, 2, 3, 4, 0, 6]) == " b東A b"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_never_spell_a_character_cost_no_more_each(tmp_path: Path, kind: str) -> None:
    fast = KINDS[kind](tmp_path)
    token_id = fast.token_to_id("<0xFF>" if "fallback" in kind else "ÿ") or 2
    detokenizer = Vocabulary(Tokenizer(tmp_path, 1)).detokenizer()
    started = time.thread_time()
    pieces = [detokenizer.push(token_id) for _ in range(20 * MAX_UNIT)]
    assert time.thread_time() - started < 5
    if "fallback" in kind:
        assert max(map(len, pieces)) == MAX_UNIT
