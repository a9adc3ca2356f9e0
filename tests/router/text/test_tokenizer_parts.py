"""Check that the parts read without a vocabulary equal those that the library writes."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tgis.router.text.tokenizer_parts import read_parts

ENTRIES = {"a": 0, "b": 1, "ab": 2, "<unk>": 3}
MERGES = [("a", "b")]
MODELS = {
    "bpe": models.BPE(ENTRIES, MERGES),
    "bpe with options": models.BPE(
        ENTRIES,
        [],
        dropout=0.5,
        unk_token="<unk>",
        continuing_subword_prefix="##",
        end_of_word_suffix="</w>",
        fuse_unk=True,
        byte_fallback=True,
        ignore_merges=True,
    ),
    "unigram": models.Unigram([("a", -1.0), ("<unk>", -2.0)], 1),
}


def make_tokenizer(name: str) -> Tokenizer:
    tokenizer = Tokenizer(MODELS[name])
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer.post_processor = processors.TemplateProcessing("$A <s>", special_tokens=[("<s>", 9)])
    tokenizer.add_tokens([AddedToken("<z>", lstrip=True, special=True), AddedToken("b", single_word=True)])
    tokenizer.enable_truncation(7)
    tokenizer.enable_padding(pad_token="<z>")
    return tokenizer


@pytest.mark.parametrize("name", MODELS)
def test_parts_are_those_of_the_file(name: str) -> None:
    for tokenizer in (Tokenizer(MODELS[name]), make_tokenizer(name)):
        whole = json.loads(tokenizer.to_str())
        parts = read_parts(tokenizer)
        if whole["model"]["type"] == "BPE":
            whole["model"] |= {"vocab": {}, "merges": []}
        for name in ("truncation", "padding"):  # their values have other names; only None is compared
            assert (parts.pop(name) is None) == (whole.pop(name) is None)
        assert parts == whole
