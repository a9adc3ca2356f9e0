"""Check encoding, truncation and offsets for every kind of tokenizer."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, processors

from tests.support.plain_text import begin_of_all
from tests.support.tokenizers.decoder_kinds import ALPHABET, KINDS
from tests.support.tokenizers.trained import write_byte_fallback, write_byte_level
from tgis.pb import generation_pb2 as pb
from tgis.router.errors import RequestError, StartupError
from tgis.router.text.tokenization import TokenIds, TokenizeOptions, byte_offsets, tokenize_job
from tgis.router.text.tokenizer import LONG_TEXT_BYTES, Tokenizer, default_workers

TEXT = "The fox, naïve 東京 🙂\r\n e\u0301 👩\u200d👩\u200d👧 fox"


@pytest.mark.parametrize(
    ("cores", "num_sharing", "expected"),
    [(1, 1, 1), (2, 1, 1), (4, 1, 3), (64, 1, 8), (2, 3, 1), (8, 2, 3), (16, 4, 3), (64, 8, 7), (256, 8, 8)],
)
def test_threads_of_router_workers_share_the_cores(cores: int, num_sharing: int, expected: int) -> None:
    assert default_workers(cores, num_sharing) == expected


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_truncation_keeps_the_last_tokens(tmp_path: Path, kind: str, bos: bool) -> None:
    fast = KINDS[kind](tmp_path)
    if not bos:
        set_post_processor(tmp_path, fast, None)
    rewrite_settings(tmp_path, add_bos_token=False)
    tokenizer = Tokenizer(tmp_path, 1)
    ids = fast.encode(TEXT).ids
    assert (ids[0] == 0) == bos
    for num_last in (len(ids), len(ids) // 2):
        for max_tokens in range(1, num_last):
            kept = tokenizer.truncate(TokenIds(len(ids), ids[-num_last:]), max_tokens)
            assert kept == (max_tokens, ([0] if bos else ids[-max_tokens:][:1]) + ids[-max_tokens:][1:])
    whole = TokenIds(len(ids), list(ids))
    for max_tokens in (0, len(ids), len(ids) + 1, 2**32 - 1):
        assert tokenizer.truncate(whole, max_tokens) == (len(ids), ids)
    assert tokenizer.truncate(TokenIds(2, [2, 3]), 2) == (2, [2, 3])
    tokenizer.close()


def template(single: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single, special_tokens=[("<s>", 0), ("</s>", 1)])


BYTE_LEVEL = processors.ByteLevel(trim_offsets=False)
BERT = processors.BertProcessing(("</s>", 1), ("<s>", 0))
GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
POST_PROCESSORS: dict[str, tuple[Any, dict[str, Any], list[int]]] = {
    "Llama 2": (template("<s> $A"), GENERIC | {"tokenizer_class": "LlamaTokenizer"}, [0]),
    "Llama 3": (processors.Sequence([BYTE_LEVEL, template("<s> $A")]), GENERIC, [0]),
    "Mistral": (template("<s> $A"), GENERIC | {"tokenizer_class": "TokenizersBackend"}, [0]),
    "Gemma": (template("<s> $A"), GENERIC | {"add_bos_token": True}, [0]),
    "Cohere": (template("<s> $A"), GENERIC | {"add_bos_token": False}, [0]),
    "OPT": (template("</s> $A"), GENERIC | {"add_bos_token": True, "bos_token": "</s>"}, [1]),
    "GPT-2, Granite": (BYTE_LEVEL, GENERIC | {"tokenizer_class": "GPT2Tokenizer"}, []),
    "BLOOM": (BYTE_LEVEL, GENERIC, []),
    "Falcon": (None, GENERIC, []),
    "Qwen": (BYTE_LEVEL, {"add_bos_token": False, "bos_token": None}, []),
    "T5": (template("$A </s>"), {"tokenizer_class": "T5TokenizerFast"}, []),
    "BERT": (BERT, {"cls_token": "<s>"}, [0]),
    "BART": (processors.RobertaProcessing(("</s>", 1), ("<s>", 0)), {"bos_token": "<s>"}, [0]),
    "GLM": (template("</s> <s> $A"), GENERIC, [1, 0]),
    "two processors that add": (processors.Sequence([template("<s> $A"), BERT]), {}, [0, 0, 1]),
}


@pytest.mark.parametrize("name", POST_PROCESSORS)
def test_tokens_that_begin_every_text_survive_truncation(tmp_path: Path, name: str) -> None:
    post_processor, settings, before = POST_PROCESSORS[name]
    fast = write_byte_level(tmp_path)
    set_post_processor(tmp_path, fast, post_processor)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(tmp_path, 1)
    texts = [TEXT, "fox", "", "</s><s>fox", "<s>"]
    assert begin_of_all(fast, texts) == before
    for ids in [fast.encode(text).ids for text in texts]:
        for max_tokens in range(1, len(ids)):
            last = ids[-max_tokens:]
            expected = [*before, *last[len(before) :]][:max_tokens]
            assert tokenizer.truncate(TokenIds(len(ids), last), max_tokens) == (max_tokens, expected)
    tokenizer.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_offsets_cut_the_same_characters_out_of_bytes(tmp_path: Path, kind: str) -> None:
    fast = KINDS[kind](tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    r = random.Random(0)
    texts = [TEXT, "", *("".join(r.choices(ALPHABET, k=r.randint(1, 8))) for _ in range(200))]
    for text, response in zip(texts, await tokenize(tokenizer, texts), strict=True):
        for place, (first, last) in zip(response.offsets, fast.encode(text).offsets, strict=True):
            assert text.encode()[place.start : place.end].decode() == text[first:last]
        assert (response.offsets[0].start, response.offsets[0].end) == (0, 0)
    tokenizer.close()


async def test_tokens_of_one_character_have_all_of_its_bytes(tmp_path: Path) -> None:
    """Check the library's offsets in bytes: three byte tokens of a character have the same position."""
    write_byte_fallback(tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    [response] = await tokenize(tokenizer, ["é東"])
    *_, e1, e2, t1, t2, t3 = ((place.start, place.end) for place in response.offsets)
    assert (e1, e2) == ((0, 2), (0, 2))
    assert (t1, t2, t3) == ((2, 5), (2, 5), (2, 5))
    tokenizer.close()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
async def test_long_texts_are_tokenized_as_short_ones_are(tmp_path: Path, kind: str) -> None:
    fast = KINDS[kind](tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    texts = [TEXT * (LONG_TEXT_BYTES // len(TEXT)), "", TEXT]
    for max_ids in (5, 10**6):
        for text, ids in zip(texts, await tokenizer.encode_ids(texts, max_ids, "a"), strict=True):
            assert ids == (len(fast.encode(text)), fast.encode(text).ids[-max_ids:])
    for truncated in (0, 7):
        for text, response in zip(texts, await tokenize(tokenizer, texts, truncated), strict=True):
            expected = fast.encode(text)
            assert response.token_count == min(len(expected), truncated or len(expected))
            assert list(response.tokens) == expected.tokens[-truncated:]
            offsets = byte_offsets(text, expected.offsets[-truncated:])
            assert [(place.start, place.end) for place in response.offsets] == offsets
    tokenizer.close()


def test_byte_offsets() -> None:
    text = "aé東🙂b"
    offsets = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 0)]
    assert byte_offsets(text, offsets) == [(0, 1), (1, 3), (3, 6), (6, 10), (10, 11), (0, 0)]
    assert byte_offsets("abc", [(0, 2)]) == [(0, 2)]


@pytest.mark.parametrize(
    ("settings", "before"),
    [
        ({"add_bos_token": True, "bos_token": "<s>"}, [0]),
        ({"add_bos_token": True, "bos_token": {"content": "<s>", "lstrip": False}}, [0]),
        ({"add_bos_token": True, "bos_token": None}, []),
        ({"add_bos_token": True, "bos_token": "<absent>"}, []),
        ({"add_bos_token": True}, []),
        ({"add_bos_token": False, "bos_token": "<s>"}, []),
        ({"bos_token": "<s>", "tokenizer_class": "LlamaTokenizer"}, []),
    ],
)
def test_settings_may_ask_for_a_token_that_the_tokenizer_does_not_add(
    tmp_path: Path, settings: dict[str, object], before: list[int]
) -> None:
    write_byte_level(tmp_path, bos=False)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer(tmp_path, 1).truncate(TokenIds(3, [7, 8, 9]), 2) == (2, [*(before or [8]), 9])


def test_special_tokens_may_be_named_in_a_file_of_their_own(tmp_path: Path) -> None:
    write_byte_level(tmp_path, bos=False)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    (tmp_path / "special_tokens_map.json").write_text(
        '{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}'
    )
    tokenizer = Tokenizer(tmp_path, 1)
    assert (tokenizer.ids_before_text, tokenizer.eos_token_ids) == ([0], {1})


async def test_a_text_that_is_no_unicode_is_a_request_error(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    with pytest.raises(RequestError, match="tokenizer error"):
        await tokenizer.encode_ids(["\ud800"], 9, "a")
    with pytest.raises(RequestError, match="tokenizer error"):
        await tokenizer.encode_ids(["\ud800" * LONG_TEXT_BYTES], 9, "a")
    tokenizer.close()


@pytest.mark.parametrize("length", [1, LONG_TEXT_BYTES])
async def test_a_text_that_the_library_panics_at_is_a_request_error(tmp_path: Path, length: int) -> None:
    """Check that a panic of the library, which is not an Exception, is handled."""
    library = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    library.normalizer = normalizers.Strip()
    library.add_tokens([AddedToken("  ", normalized=True)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path, 1)
    with pytest.raises(RequestError, match="tokenizer error the text could not be encoded"):
        await tokenizer.encode_ids(["é" * length], 9, "a")
    assert [ids.num_tokens for ids in await tokenizer.encode_ids(["a" * length], 9, "a")] == [length]
    tokenizer.close()


@pytest.mark.parametrize(
    ("content", "text"), [(None, "No existing fast tokenizer"), ("{}", "Problem loading tokenizer for model")]
)
def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path, content: str | None, text: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=text):
        Tokenizer(tmp_path, 1)


async def tokenize(tokenizer: Tokenizer, texts: list[str], truncated: int = 0) -> list[pb.TokenizeResponse]:
    requests = [pb.TokenizeRequest(text=text) for text in texts]
    request = pb.BatchedTokenizeRequest(
        requests=requests, return_tokens=True, return_offsets=True, truncate_input_tokens=truncated
    )
    answer, num_tokens = await tokenizer.tokenize(tokenize_job(request, TokenizeOptions()), "a")
    responses = list(pb.BatchedTokenizeResponse.FromString(answer).responses)
    assert num_tokens == sum(response.token_count for response in responses)
    return responses


def rewrite_settings(directory: Path, **changes: object) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def set_post_processor(directory: Path, fast: tokenizers.Tokenizer, post_processor: Any) -> None:
    fast.post_processor = post_processor
    fast.save(str(directory / "tokenizer.json"))
