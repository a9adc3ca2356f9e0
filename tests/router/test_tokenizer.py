"""Encoding, truncation and offsets, for every kind of tokenizer."""

import json
import random
from pathlib import Path

import pytest

from tests.router.kinds_of_tokenizer import ALPHABET, KINDS
from tests.tokenizers_for_tests import write_byte_fallback, write_byte_level
from tgis.router.errors import RequestError, StartupError
from tgis.router.tokenizer import Tokenizer, byte_offsets

TEXT = "The fox, naïve 東京 🙂\r\n e\u0301 👩\u200d👩\u200d👧 fox"


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_truncation_keeps_the_last_tokens(tmp_path: Path, kind: str, bos: bool) -> None:
    fast = KINDS[kind](tmp_path)
    rewrite_settings(tmp_path, add_bos_token=bos)
    tokenizer = Tokenizer(tmp_path, 1)
    ids = fast.encode(TEXT).ids
    assert ids[0] == 0
    for max_tokens in range(1, len(ids)):
        kept = tokenizer.truncate(list(ids), max_tokens)
        assert kept == ([0] if bos else ids[-max_tokens:][:1]) + ids[-max_tokens:][1:]
    for max_tokens in (0, len(ids), len(ids) + 1, 2**32 - 1):
        assert tokenizer.truncate(list(ids), max_tokens) == ids
    assert tokenizer.truncate([2, 3], 2) == [2, 3]


@pytest.mark.parametrize("kind", KINDS)
async def test_offsets_cut_the_same_characters_out_of_bytes(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    r = random.Random(0)
    texts = [TEXT, "", *("".join(r.choices(ALPHABET, k=r.randint(1, 8))) for _ in range(200))]
    for text, encoding in zip(texts, await tokenizer.encode(texts), strict=True):
        for (start, end), (first, last) in zip(
            byte_offsets(text, encoding.offsets), encoding.offsets, strict=True
        ):
            assert text.encode()[start:end].decode() == text[first:last]
        assert encoding.offsets[0] == (0, 0)
    tokenizer.close()


async def test_tokens_of_one_character_have_all_of_its_bytes(tmp_path: Path) -> None:
    """As the library counts bytes itself: a character in three byte tokens is three times the same place."""
    write_byte_fallback(tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    [encoding] = await tokenizer.encode(["é東"])
    *_, e1, e2, t1, t2, t3 = byte_offsets("é東", encoding.offsets)
    assert (e1, e2) == ((0, 2), (0, 2))
    assert (t1, t2, t3) == ((2, 5), (2, 5), (2, 5))
    tokenizer.close()


def test_byte_offsets() -> None:
    text = "aé東🙂b"
    offsets = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 0)]
    assert byte_offsets(text, offsets) == [(0, 1), (1, 3), (3, 6), (6, 10), (10, 11), (0, 0)]
    assert byte_offsets("abc", [(0, 2)]) == [(0, 2)]


@pytest.mark.parametrize(
    ("settings", "bos_token_id"),
    [
        ({"add_bos_token": True, "bos_token": "<s>"}, 0),
        ({"add_bos_token": True, "bos_token": {"content": "<s>", "lstrip": False}}, 0),
        ({"add_bos_token": True, "bos_token": None}, None),
        ({"add_bos_token": True, "bos_token": "<absent>"}, None),
        ({"add_bos_token": True}, None),
        ({"add_bos_token": False, "bos_token": "<s>"}, None),
        ({"bos_token": "<s>"}, None),
        ({"bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}, None),
        ({"bos_token": "<s>", "tokenizer_class": "LlamaTokenizer"}, 0),
        ({"bos_token": "<s>", "tokenizer_class": "GemmaTokenizerFast"}, 0),
        ({"bos_token": "<s>", "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, None),
    ],
)
def test_the_settings_say_whether_inputs_begin_with_a_token(
    tmp_path: Path, settings: dict[str, object], bos_token_id: int | None
) -> None:
    write_byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer(tmp_path, 1).bos_token_id == bos_token_id


def test_special_tokens_may_be_named_in_a_file_of_their_own(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    (tmp_path / "special_tokens_map.json").write_text(
        '{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}'
    )
    tokenizer = Tokenizer(tmp_path, 1)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


async def test_a_text_that_is_no_unicode_is_a_request_error(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    with pytest.raises(RequestError, match="tokenizer error"):
        await tokenizer.encode(["\ud800"])
    tokenizer.close()


@pytest.mark.parametrize(
    ("content", "text"), [(None, "No existing fast tokenizer"), ("{}", "Problem loading tokenizer for model")]
)
def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path, content: str | None, text: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=text):
        Tokenizer(tmp_path, 1)


def rewrite_settings(directory: Path, **changes: object) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
