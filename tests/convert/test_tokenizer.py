"""`convert-to-fast-tokenizer` and `convert-to-onnx`: equal token ids, or a one-line error."""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import tokenizers
import transformers
from click.testing import CliRunner

from tests.support.tokenizers.older_kinds import write_bert, write_gpt2, write_llama, write_t5
from tests.support.tokenizers.trained import TEXT
from tgis.cli import models
from tgis.convert import onnx
from tgis.convert import tokenizer as conversion
from tgis.router.text.tokenizer import Tokenizer as RouterTokenizer

TEXTS = [*TEXT, "  Two  blanks\nand a line.", "The 123 foxes’ 🙂", ""]
HAS_SENTENCEPIECE = find_spec("sentencepiece") is not None


def call(command: click.Command, *words: object, code: int = 0) -> str:
    """Return a command's output."""
    result = CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == code, result.stderr
    lines = [line for line in result.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == (code != 0), result.stderr
    return lines[0].removeprefix("error: ") if lines else result.stdout.removesuffix("\n")


def convert(*words: object, code: int = 0) -> str:
    return call(models.convert_to_fast_tokenizer, *words, code=code)


@pytest.mark.parametrize("write", [write_gpt2, write_bert, write_llama, write_t5])
def test_the_same_ids_as_transformers_gives(
    tmp_path: Path, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output = tmp_path / "model", tmp_path / "output"
    for directory in (model, output):
        directory.mkdir()
    write(model)
    reference = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    expected = [reference(text).input_ids for text in TEXTS]
    before = sorted(model.iterdir())
    assert convert(model, "--output-path", output) == f"Saved tokenizer to {output}"
    assert sorted(model.iterdir()) == before
    fast = tokenizers.Tokenizer.from_file(str(output / "tokenizer.json"))
    assert [encoding.ids for encoding in fast.encode_batch(TEXTS)] == expected
    ours = RouterTokenizer(output)
    assert set(ours.eos_token_ids) == (set() if write is write_bert else {reference.eos_token_id})
    first = {write_bert: [reference.cls_token_id], write_llama: [reference.bos_token_id]}
    assert ours.ids_before_text == first.get(write, [])
    ours.close()

    assert convert(model) == f"Saved tokenizer to {model}"
    assert (model / "tokenizer.json").read_bytes() == (output / "tokenizer.json").read_bytes()
    assert convert(model) == f"Model {model} already has a fast tokenizer"
    again = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    assert [again(text).input_ids for text in TEXTS] == expected


@pytest.mark.skipif(not HAS_SENTENCEPIECE, reason="needs sentencepiece, to compare with")
@pytest.mark.parametrize(("write", "name"), [(write_llama, "tokenizer.model"), (write_t5, "spiece.model")])
def test_the_same_ids_as_sentencepiece_gives(
    tmp_path: Path, write: Callable[[Path], None], name: str
) -> None:
    import sentencepiece

    write(tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / name))
    convert(tmp_path)
    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS[:2]:
        assert fast.encode(text, add_special_tokens=False).ids == reference.encode(text)


def test_settings_stay_as_they_are(tmp_path: Path) -> None:
    write_gpt2(tmp_path)
    settings = {"eos_token": "<|endoftext|>", "add_bos_token": True, "mine": 1}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|endoftext|>"}')
    (tmp_path / "output").mkdir()
    convert(tmp_path, "--output-path", tmp_path / "output")
    written = json.loads((tmp_path / "output" / "tokenizer_config.json").read_text())
    assert written.items() >= settings.items()
    assert not {"is_local", "local_files_only"} & written.keys()
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        assert (tmp_path / "output" / name).stat().st_mode == (tmp_path / "vocab.json").stat().st_mode
    shutil.rmtree(tmp_path / "output")
    convert(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == settings


def test_where_there_is_nothing_to_do_or_to_read(tmp_path: Path) -> None:
    text = "Weights not found in local cache for model nobody/x"
    assert convert("nobody/x", code=1) == text
    assert convert(tmp_path, code=1) == f"{tmp_path} contains no tokenizer"
    (tmp_path / "vocab.json").write_text("{")
    text = f"Output path {tmp_path / 'x'} must exist and be a directory"
    assert convert(tmp_path, "--output-path", tmp_path / "x") == text
    before = sorted(tmp_path.iterdir())
    assert convert(tmp_path, code=1).startswith(f"the tokenizer of {tmp_path} cannot be converted: ")
    assert sorted(tmp_path.iterdir()) == before


def test_code_of_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    write_gpt2(tmp_path)
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'never')!r}, 'w')")
    settings = {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert convert(tmp_path, code=1).startswith(f"the tokenizer of {tmp_path} cannot be converted: ")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(("content", "package"), [(b"\n\x0e", "sentencepiece"), (b"IQ== 0\n", "tiktoken")])
def test_a_package_that_is_missing(
    tmp_path: Path, content: bytes, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "find_spec", lambda name: None)
    (tmp_path / "tokenizer.model").write_bytes(content)
    text = f"the tokenizer of {tmp_path} needs {package}: pip install 'tgis-next[tokenizers]'"
    assert convert(tmp_path, code=1) == text


def test_onnx_needs_an_environment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "find_spec", lambda name: None)
    words = [tmp_path, tmp_path / "onnx", "--merge-graphs", "--no-optimize", "--provider", "X"]
    assert call(models.convert_to_onnx, *words, code=1) == onnx.ELSEWHERE
    assert "onnxenv/bin/pip install 'optimum-onnx[onnxruntime]'" in onnx.ELSEWHERE
    text = "Weights not found in local cache for model nobody/x"
    assert call(models.convert_to_onnx, "nobody/x", "y", code=1) == text
