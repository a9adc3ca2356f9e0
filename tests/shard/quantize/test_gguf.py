"""Checkpoints written as GGUF files and read by the service, by the `gguf` package, and by llama.cpp."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import SentencePieceExtractor

from tests.support import llama_cpp
from tests.support.shard.checkpoints import SMALL, edit_config, write_llama, write_model
from tests.support.shard.driver import Request
from tests.support.shard.family_oracle import NEW_TOKENS, Oracle, check, draw_inputs
from tests.support.shard.gguf_cases import CASES
from tests.support.shard.messages import GREEDY
from tests.support.shard.ranks import Ranks
from tests.support.shard.relay import serve
from tests.support.tokenizers.trained import write_byte_level, write_wordpiece
from tests.support.tokenizers.varied import texts, train
from tgis.cli.quantize import quantize
from tgis.convert.gguf.files import open_gguf
from tgis.convert.gguf.model_directory import write_model_directory
from tgis.convert.gguf.pre_tokenizers import SPLITTINGS
from tgis.convert.gguf.tokenizer import GgufVocabulary, make_tokenizer
from tgis.shard.checkpoint.gguf.checkpoint import GgufCheckpoint
from tgis.shard.quantize.gguf import tensors
from tgis.shard.quantize.gguf.metadata import WRITTEN
from tgis.shard.quantize.gguf.output import write_gguf
from tgis.shard.quantize.settings import QuantizeError

WRITTEN_CASES = [
    name
    for name, (architecture, _) in CASES.items()
    if architecture in {name for name, _ in WRITTEN.values()}
]
# Permuted rows; norms with an offset and windows; stacked and joined experts; transposed matrices.
QUICK = {"grouped_queries", "gemma3", "granitemoe", "gpt2"}
WITHOUT_WINDOWS = ("starcoder2", "phi3")  # whose windows llama.cpp does not support
DETAILS = {"logprobs": True, "ranks": True}
KINDS = {"q8_0": Type.Q8_0, "q4_0": Type.Q4_0, "q4_1": Type.Q4_1}
TABLES = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "lm_head.weight", "embed_out.weight")


def write_little_tokenizer(directory: Path, size: int = SMALL["vocab_size"]) -> None:
    """Write a byte-level tokenizer that fits the vocabulary of small models."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = ["<unk>", "<s>", "</s>", *letters, "Ġ", "th", "the", "Ġa"]
    vocab = {token: id for id, token in enumerate(tokens + [f"<{id}>" for id in range(len(tokens), size)])}
    tokenizer = Tokenizer(models.BPE(vocab, [("t", "h"), ("th", "e"), ("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{{ messages }}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write_case(directory: Path, case: str, **changes: Any) -> transformers.PretrainedConfig:
    config = CASES[case][1]()
    for name, value in changes.items():
        setattr(config, name, value)
    write_model(directory, config)
    write_little_tokenizer(directory)
    return config


def round_weights(directory: Path, kind: str) -> dict[str, torch.Tensor]:
    """Return the weights that the file represents, rounded by the package."""
    config = json.loads((directory / "config.json").read_text())
    result = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        is_transposed = config["model_type"] == "gpt2" and name.endswith(".weight") and ".c_" in name
        weight = np.ascontiguousarray((tensor.T if is_transposed else tensor).numpy())
        back = gguf.dequantize(
            gguf.quantize(weight, found_type := choose_type(name, weight, kind)), found_type
        )
        if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
            back = (weight + np.float32(1)) - np.float32(1)
        rounded = torch.from_numpy(back).reshape(weight.shape)
        result[name] = (rounded.T if is_transposed else rounded).contiguous()
    return result


def choose_type(name: str, weight: np.ndarray[Any, Any], kind: str) -> Type:
    routers = (".gate.weight", "router.layer.weight", "wpe.weight")
    if weight.ndim == 1 or name.endswith(routers):
        return Type.F32
    if weight.shape[-1] % 32:
        return Type.F16
    return Type.Q8_0 if name.endswith(TABLES) else KINDS[kind]


def test_every_architecture_that_is_written_has_a_case() -> None:
    models_of_cases = {CASES[name][1]().model_type for name in WRITTEN_CASES}
    assert models_of_cases == {*WRITTEN} - {"mistral"}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in WRITTEN_CASES]
)
def test_equals_transformers(case: str, ranks: Ranks, tmp_path: Path) -> None:
    """Each tensor has the bits of the package's rounding, and transformers generates the same tokens from
    it."""
    written, file, made = tmp_path / "written", tmp_path / "model.gguf", tmp_path / "made"
    config = write_case(written, case)
    kind = [*KINDS][WRITTEN_CASES.index(case) % len(KINDS)]
    write_gguf(written, file, kind)  # type: ignore[arg-type]
    rounded = round_weights(written, kind)
    compare_tensors(file, rounded)
    save_file(rounded, written / "model.safetensors", metadata={"format": "pt"})
    made.mkdir()
    write_model_directory([file], made)
    oracle = Oracle(written, config)
    answers = [oracle.answer(ids) for ids in draw_inputs()]
    requests = [Request(answer.input_ids, NEW_TOKENS, sampling=GREEDY, details=DETAILS) for answer in answers]
    [([served], _)] = ranks.run(1, serve, made, 1, [requests], 16)
    for request, answer in zip(served, answers, strict=True):
        check(request, answer)


def compare_tensors(file: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Compare the tensors of the service's reader. Experts that transformers joins are read one by one."""
    checkpoint = GgufCheckpoint([file])
    names = {*checkpoint.list_names()}
    assert names == {*wanted}
    for name in names:
        assert torch.equal(checkpoint.fetch(name).read().float(), wanted[name]), name


def test_the_file_has_the_metadata_of_llama_cpp(tmp_path: Path) -> None:
    write_case(tmp_path, "llama3_rope")
    write_gguf(tmp_path, tmp_path / "model.gguf", "q4_0")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    values = {key: field.contents() for key, field in reader.fields.items()}
    expected = {
        "general.architecture": "llama",
        "general.file_type": gguf.LlamaFileType.MOSTLY_Q4_0,
        "llama.context_length": 512,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 8,
        "llama.vocab_size": 99,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    assert {key: values[key] for key in expected} == expected
    assert values["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    types = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    assert types["token_embd.weight"] == types["output.weight"] == Type.Q8_0
    assert types["blk.0.attn_q.weight"] == Type.Q4_0
    assert types["blk.0.ffn_down.weight"] == Type.F16  # of 48 columns
    assert types["blk.0.attn_norm.weight"] == types["rope_freqs.weight"] == Type.F32


def read_tokenizer(file: Path) -> Tokenizer:
    return make_tokenizer(GgufVocabulary(open_gguf([file]).metadata))


@pytest.mark.parametrize(
    "name", ["gpt-2", "starcoder", "llama3", "qwen2", "tekken", "gpt-4o", "deepseek-coder"]
)
def test_byte_level_tokens(name: str, tmp_path: Path) -> None:
    theirs = write_byte_level(tmp_path, 400)
    splitting = SPLITTINGS[name]
    theirs.pre_tokenizer = splitting.pre_tokenizer()
    theirs.model.ignore_merges = splitting.merges_last
    if splitting.is_composed:
        theirs.normalizer = normalizers.NFC()
    if name == "starcoder":  # as it is published
        steps = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        theirs.pre_tokenizer = pre_tokenizers.Sequence(steps)
    theirs.add_special_tokens(["<|im_end|>"])
    theirs.add_tokens(["<tool_call>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    write_llama(tmp_path, vocab_size=410, eos_token_id=[1, 400])
    write_gguf(tmp_path, tmp_path / "model.gguf", "q8_0")
    metadata = open_gguf([tmp_path / "model.gguf"]).metadata
    assert SPLITTINGS[metadata.text("tokenizer.ggml.pre")] == splitting or name == "llama3"
    assert metadata.integer("tokenizer.ggml.eot_token_id") == 400
    ours = read_tokenizer(tmp_path / "model.gguf")
    for text in [*texts(300), "<tool_call>a<|im_end|> b"]:
        assert ours.encode(text).ids == theirs.encode(text).ids, text


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_tokens(has_prefix: bool, tmp_path: Path) -> None:
    """transformers makes the tokenizer from the SentencePiece model."""
    model = train(
        "bpe",
        byte_fallback=True,
        add_dummy_prefix=has_prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    theirs = convert_sentencepiece(model, tmp_path / "tokenizer.model", has_prefix)
    theirs.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    write_llama(tmp_path, vocab_size=len(model.pieces))
    write_gguf(tmp_path, tmp_path / "model.gguf", "q8_0")
    ours = read_tokenizer(tmp_path / "model.gguf")
    for text in texts(300):
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        assert ours.decode(theirs.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


def convert_sentencepiece(model: Any, file: Path, has_prefix: bool) -> Tokenizer:
    file.write_bytes(model.SerializeToString())
    vocab, merges = (
        SentencePieceExtractor(str(file)).extract(models.BPE)[key] for key in ("vocab", "merges")
    )
    result = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    result.add_special_tokens(["<unk>", "<s>", "</s>"])
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    result.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    result.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    result.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return result


def call(*words: object) -> tuple[int, str]:
    """Return the status and the output of the command without its log."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        result = CliRunner().invoke(quantize, [str(word) for word in words], catch_exceptions=False)
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
    lines = [line for line in result.output.splitlines() if " INFO " not in line]
    return result.exit_code, "\n".join(lines).removeprefix("error: ")


def test_end_tokens_without_a_key_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GGUF has keys for three."""
    write_case(tmp_path, "grouped_queries")
    for name in ("config.json", "generation_config.json"):
        if (path := tmp_path / name).is_file():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, 5, 6, 7, 8]}))
    write_gguf(tmp_path, tmp_path / "model.gguf", "q8_0")
    metadata = open_gguf([tmp_path / "model.gguf"]).metadata
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    assert [metadata.integer(f"tokenizer.ggml.{key}") for key in keys] == [2, 5, 6]
    [warning] = [message for message in caplog.messages if "end-of-sequence ids" in message]
    assert "[7, 8]" in warning


def test_the_command(tmp_path: Path) -> None:
    model, file = tmp_path / "model", tmp_path / "model.gguf"
    write_case(model, "tied")
    words = (model, file, "--method", "gguf", "--gguf-type", "q4_1")
    assert call(*words) == (0, f"Saved quantized model to {file}")
    assert "output.weight" not in open_gguf([file])
    before = file.read_bytes()
    assert call(*words) == (1, f"{file} exists: use another name")
    assert file.read_bytes() == before
    missing = tmp_path / "no" / "model.gguf"
    assert call(model, missing, "--method", "gguf") == (
        1,
        f"{missing} cannot be written: {os.strerror(errno.ENOENT)}",
    )
    code, said = call(model, tmp_path / "b", "--gguf-type", "q8_0")
    assert code == 2
    assert "--gguf-type is for --method gguf only." in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.gguf"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_case(tmp_path / "model", "tied")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensors.PlannedTensor, "write", fail)
    with pytest.raises(QuantizeError, match=r"model\.gguf cannot be written: No space left on device"):
        write_gguf(tmp_path / "model", tmp_path / "model.gguf", "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def refusals() -> Iterator[Any]:
    yield (
        "opt",
        {"model_type": "opt"},
        "models of type 'opt' cannot be written as GGUF; supported are: gemma, ",
    )
    yield "dynamic", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope "
    yield "window", {"model_type": "mistral", "sliding_window": 8}, "windows "
    yield (
        "activation",
        {"hidden_act": "gelu"},
        "activation gelu of this model cannot be represented in a GGUF file",
    )


@pytest.mark.parametrize(("changes", "text"), [pytest.param(*rest, id=id) for id, *rest in refusals()])
def test_models_that_a_file_cannot_represent_are_refused(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    write_case(model, "grouped_queries")
    edit_config(model, json.loads((model / "config.json").read_text()) | changes)
    with pytest.raises(QuantizeError) as caught:
        write_gguf(model, tmp_path / "model.gguf", "q8_0")
    assert text in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tokenizers_that_a_file_cannot_represent_are_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_llama(model, vocab_size=400)
    for number, (write, text) in enumerate(
        [
            (write_wordpiece, "tokenizers of type WordPiece cannot be written as GGUF"),
            (write_with_a_pattern, "llama.cpp has no name for this tokenizer's way of splitting texts"),
            (write_with_spaces, "a GGUF file cannot represent how this tokenizer splits "),
            (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json is missing: run"),
        ]
    ):
        write(model)
        with pytest.raises(QuantizeError) as caught:
            write_gguf(model, tmp_path / f"{number}.gguf", "q8_0")
        assert text in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def write_with_a_pattern(directory: Path) -> None:
    tokenizer = write_byte_level(directory)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = [pre_tokenizers.Split(Regex("x+"), "isolated"), byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.save(str(directory / "tokenizer.json"))


def write_with_spaces(directory: Path) -> None:
    """Add a token that absorbs preceding spaces."""
    tokenizer = write_byte_level(directory)
    tokenizer.add_tokens([transformers.AddedToken("<tool>", lstrip=True)])
    tokenizer.save(str(directory / "tokenizer.json"))


# Not run with llama.cpp: longrope needs longer contexts than a test's.
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in WRITTEN_CASES if case != "phi3_short_and_long"])
def test_llama_cpp_reads_it(case: str, tmp_path: Path) -> None:
    """Its logits equal transformers'. Matrices of 48 columns stay floats, because llama.cpp rounds
    activations to 8 bits in products with codes."""
    python = llama_cpp.find_python()
    directory = tmp_path / "model"  # llama.cpp recognises some models by name
    changes = {"sliding_window": None} if case in WITHOUT_WINDOWS else {}
    config = write_case(directory, case, hidden_size=48, intermediate_size=80, **changes)
    write_gguf(directory, tmp_path / "model.gguf", "q8_0")
    save_file(round_weights(directory, "q8_0"), directory / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = draw_inputs()[1:]
    answers = llama_cpp.ask(python, tmp_path / "model.gguf", scored=prompts)
    for ids, scores in zip(prompts, answers["scored"], strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -1]
        actual = torch.tensor(scores)
        assert torch.cosine_similarity(actual, expected, dim=0) > 0.999, case
    assert config.vocab_size == len(answers["scored"][0])
