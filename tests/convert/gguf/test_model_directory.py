"""The directory from which a GGUF file is served, and inconsistent files."""

import contextlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.support.shard.gguf_writer import add_tokens
from tgis.convert.atomic_write import ConversionError
from tgis.convert.gguf.model_directory import write_model_directory
from tgis.shard.checkpoint.opening import list_gguf

Change = Callable[[gguf.GGUFWriter], None]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write(path: Path, *changes: Change, architecture: str = "llama", width: int = 32) -> Path:
    """Write a file with the metadata of a small model; `changes` are added or replaced."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    add_tokens(writer, 8)
    for change in changes:
        change(writer)
    if not any(change is without_table for change in changes):
        writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def without_table(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))


def with_key(key: str, value: Any, kind: gguf.GGUFValueType) -> Change:
    return lambda writer: replace(writer, key, value, kind)


def replace(writer: gguf.GGUFWriter, key: str, value: Any, kind: gguf.GGUFValueType) -> None:
    writer.kv_data[0].pop(key, None)
    writer.add_key_value(key, value, kind)


U32, TEXT, F32 = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.STRING, gguf.GGUFValueType.FLOAT32

BAD: dict[str, tuple[list[Change], str]] = {
    "width": (
        [with_key("llama.embedding_length", 64, U32)],
        "llama.embedding_length is 64, and token_embd.weight",
    ),
    "vocabulary": ([with_key("llama.vocab_size", 9, U32)], "llama.vocab_size is not 8, the rows of"),
    "many tokens": (
        [lambda writer: retoken(writer, 9)],
        "tokenizer.ggml.tokens are 9, and token_embd.weight has 8",
    ),
    "no table": ([without_table], "tensor token_embd.weight is missing"),
    "heads": ([with_key("llama.attention.head_count", 5, U32)], "head_count is 5, which does not divide 32"),
    "no heads": (
        [with_key("llama.attention.head_count", 0, U32)],
        "head_count is 0, which does not divide 32",
    ),
    "text for a number": (
        [with_key("llama.block_count", "x", TEXT)],
        "llama.block_count is 'x', not a number",
    ),
    "number for a text": (
        [with_key("llama.rope.scaling.type", 1, U32)],
        "rope.scaling.type is 1, not a text",
    ),
    "not a number": (
        [with_key("llama.rope.freq_base", float("nan"), F32)],
        "freq_base is nan, not a positive number",
    ),
    "rope": (
        [with_key("llama.rope.scaling.type", "other", TEXT)],
        "rope.scaling.type 'other' is not supported",
    ),
    "values": (
        [with_key("llama.attention.key_length", 8, U32), with_key("llama.attention.value_length", 4, U32)],
        "llama.attention.value_length is not 8, that of keys",
    ),
    "unknown tensors": (
        [lambda writer: add_unknown(writer)],
        "llama has no place for 2 of the tensors, the first of which is blk.0.attn_sinks.weight",
    ),
    "template": (
        [lambda writer: writer.add_chat_template("{% if %}")],
        "tokenizer.chat_template does not parse: ",
    ),
    "part of a set": (
        [lambda writer: writer.add_uint16("split.count", 2)],
        "split.count is 2, but there are 1 files",
    ),
}


def with_numbers(**values: Any) -> Change:
    """Return a change that adds numbers by the names of the writer's methods."""

    def add(writer: gguf.GGUFWriter) -> None:
        for name, value in values.items():
            getattr(writer, f"add_{name}")(value)

    return add


def with_factors(*factors: float) -> Change:
    return lambda writer: writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


EXPERTS = with_numbers(expert_count=4, expert_used_count=2, expert_feed_forward_length=16)
# Metadata of small models whose architectures need more than the usual keys.
RECENT: dict[str, list[Change]] = {
    "deepseek2": [
        EXPERTS,
        with_numbers(kv_lora_rank=8, key_length_mla=12, value_length_mla=8, key_length=12, value_length=8),
        with_numbers(rope_dimension_count=4, expert_gating_func=gguf.ExpertGatingFuncType.SIGMOID),
    ],
    "qwen3next": [
        EXPERTS,
        with_numbers(expert_shared_feed_forward_length=16, head_count_kv=2, key_length=8),
        with_numbers(ssm_conv_kernel=4, ssm_state_size=8, ssm_group_count=2, ssm_time_step_rank=4),
        with_numbers(ssm_inner_size=32),
    ],
    "gemma4": [
        with_numbers(head_count_kv=2, key_length=16, key_length_swa=8, sliding_window=5),
        with_numbers(sliding_window_pattern=[False]),
        with_factors(1, 1, 1e30, 1e30, 1e30, 1e30, 1e30, 1e30),
    ],
    "llama4": [EXPERTS, with_numbers(interleave_moe_layer_step=1)],
}
BAD_RECENT: dict[str, tuple[str, Change, str]] = {
    "scaled queries": (
        "deepseek2",
        with_key("deepseek2.attention.temperature_scale", 0.1, F32),
        "deepseek2.attention.temperature_scale is not supported",
    ),
    "other router": (
        "deepseek2",
        with_key("deepseek2.expert_gating_func", 3, U32),
        "deepseek2.expert_gating_func is not 1, a softmax, or 2, a sigmoid",
    ),
    "only rotated": (
        "deepseek2",
        with_key("deepseek2.rope.dimension_count", 12, U32),
        "deepseek2.rope.dimension_count is 12, not a part of 12 channels",
    ),
    "no period": (
        "qwen3next",
        with_key("qwen3next.full_attention_interval", 0, U32),
        "qwen3next.full_attention_interval is 0, no period of layers",
    ),
    "value heads": (
        "qwen3next",
        with_key("qwen3next.ssm.inner_size", 30, U32),
        "qwen3next.ssm.inner_size is 30, no multiple of 4",
    ),
    "no layers": (
        "gemma4",
        with_key("gemma4.block_count", 0, U32),
        "gemma4.block_count leaves 0 layers",
    ),
    "layer inputs": (
        "gemma4",
        with_key("gemma4.embedding_length_per_layer_input", 8, U32),
        "tensor per_layer_token_embd.weight is missing",
    ),
    "no window": (
        "llama4",
        with_key("llama4.attention.sliding_window", 0, U32),
        "llama4.attention.sliding_window is 0, which is not supported",
    ),
    "other period": (
        "llama4",
        with_key("llama4.attention.sliding_window_pattern", 3, U32),
        "llama4.attention.sliding_window_pattern is not 4",
    ),
}


@pytest.mark.parametrize("case", BAD_RECENT)
def test_contradictions_of_recent_architectures(case: str, tmp_path: Path) -> None:
    architecture, change, text = BAD_RECENT[case]
    plain = write(tmp_path / "plain.gguf", *RECENT[architecture], architecture=architecture)
    path = write(tmp_path / "a.gguf", *RECENT[architecture], change, architecture=architecture)
    (tmp_path / "out").mkdir()
    write_model_directory([plain], tmp_path / "out")
    with pytest.raises(ConversionError) as caught:
        write_model_directory([path], tmp_path / "out")
    assert str(caught.value).startswith(f"{path}: ")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("factors", [(1, 2, 1e30), (1e30, 1, 1), (1e30, 1e30), ()])
def test_factors_that_are_not_those_of_gemma_4(factors: tuple[float, ...], tmp_path: Path) -> None:
    changes = [*RECENT["gemma4"][:-1], *([with_factors(*factors)] if factors else [])]
    path = write(tmp_path / "a.gguf", *changes, architecture="gemma4")
    with pytest.raises(
        ConversionError, match=r"rope_freqs\.weight, which is missing|factors 1.*not supported"
    ):
        write_model_directory([path], tmp_path)


def test_the_tokenizer_is_written_last(tmp_path: Path) -> None:
    """If it cannot be written, everything else is there, because shards may load the model meanwhile."""
    names = {"config.json", "generation_config.json", "tokenizer_config.json", "a.gguf"}
    for folder, changes, last in (
        ("good", [], "tokenizer.json"),
        ("bad", [lambda writer: remerge(writer, ["ab"])], "unfinished-gguf-tokenizer.json"),
    ):
        directory = tmp_path / folder
        directory.mkdir()
        path = write(tmp_path / "a.gguf", *changes)
        with contextlib.suppress(ConversionError):
            write_model_directory([path], directory)
        assert {file.name for file in directory.iterdir()} == names | {last}


LONG_TEXT = "a" * 100_000
LONG: dict[str, Change] = {
    "architecture": with_key("general.architecture", LONG_TEXT, TEXT),
    "number": with_key("llama.block_count", LONG_TEXT, TEXT),
    "rope": with_key("llama.rope.scaling.type", LONG_TEXT, TEXT),
    "tokenizer": with_key("tokenizer.ggml.model", LONG_TEXT, TEXT),
    "words": with_key("tokenizer.ggml.pre", LONG_TEXT, TEXT),
    "template": with_key("tokenizer.chat_template", f"{{% {LONG_TEXT} %}}", TEXT),
    "merges": lambda writer: remerge(writer, [f"{LONG_TEXT} b"]),
}


def remerge(writer: gguf.GGUFWriter, merges: list[str]) -> None:
    writer.kv_data[0].pop("tokenizer.ggml.merges")
    writer.add_token_merges(merges)


def add_unknown(writer: gguf.GGUFWriter) -> None:
    for name in ("blk.0.attn_sinks.weight", "v.blk.0.attn_q.weight"):
        writer.add_tensor(name, np.zeros(32, np.float32))


def retoken(writer: gguf.GGUFWriter, size: int) -> None:
    for key in [key for key in writer.kv_data[0] if key.startswith("tokenizer.")]:
        writer.kv_data[0].pop(key)
    add_tokens(writer, size)


@pytest.mark.parametrize("case", BAD)
def test_contradictions_are_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, text = BAD[case]
    path = write(tmp_path / "a.gguf", *changes)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConversionError) as caught:
        write_model_directory([path], tmp_path / "out")
    assert str(caught.value).startswith(f"{path}: ")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", LONG)
def test_long_texts_are_not_repeated(case: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", LONG[case])
    (tmp_path / "out").mkdir()
    with pytest.raises(ConversionError) as caught:
        write_model_directory([path], tmp_path / "out")
    assert str(caught.value).startswith(f"{path}: ")
    assert "aaa" in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 700


def test_other_architectures_are_refused_with_the_list(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", architecture="mamba")
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "tgis", "read-gguf", str(path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(
        f"error: {path}: general.architecture 'mamba' is not supported; use one of: bloom, deepseek2, "
    )


def test_flipped_bytes(tmp_path: Path) -> None:
    """Whatever a header contains, the file is read, or refused in one line."""
    rng = random.Random(3)
    for architecture in ("llama", "gemma3", "mpt", "t5", *RECENT):
        changes = RECENT.get(architecture, [])
        path = write(tmp_path / f"{architecture}.gguf", *changes, architecture=architecture)
        content = path.read_bytes()
        places = range(24, len(content) - 1024)
        for _ in range(60):
            changed = bytearray(content)
            for place in rng.choices(places, k=rng.randrange(1, 4)):
                changed[place] = rng.choice((0, 1, 2, 127, 128, 255))
            path.write_bytes(changed)
            out = tmp_path / "out"
            out.mkdir()
            problem = ""
            try:
                write_model_directory([path], out)
            except ConversionError as error:
                problem = str(error)
            assert problem == "" or (problem.startswith(str(path)) and "\n" not in problem)
            shutil.rmtree(out)


def read(directory: Path, name: str) -> Any:
    return json.loads((directory / name).read_text())


def test_the_directory_made_from_a_file(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        retoken(writer, 8)
        writer.kv_data[0].pop("tokenizer.ggml.token_type")
        writer.kv_data[0].pop("tokenizer.ggml.tokens")
        writer.add_token_list(["a", "b", "ab", "<s>", "</s>", "<|im_end|>", "<pad>", "<|end|>"])
        writer.add_token_types([1, 1, 1, 3, 3, 3, 3, 1])
        writer.add_bos_token_id(3)
        writer.add_eos_token_id(4)
        writer.add_pad_token_id(6)
        writer.add_add_bos_token(True)
        writer.add_chat_template(
            [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]
        )

    path, out = write(tmp_path / "a.gguf", add), tmp_path / "out"
    out.mkdir()
    before = sorted(tmp_path.iterdir())
    write_model_directory([path], out)
    assert sorted(tmp_path.iterdir()) == before
    assert list_gguf(out) == [path]
    config = read(out, "config.json")
    assert (config["model_type"], config["vocab_size"], config["head_dim"]) == ("llama", 8, 8)
    assert (config["bos_token_id"], config["eos_token_id"], config["tie_word_embeddings"]) == (3, 4, True)
    # <|end|> is not a control token, so it ends nothing.
    assert read(out, "generation_config.json") == {
        "eos_token_id": [4, 5],
        "bos_token_id": 3,
        "pad_token_id": 6,
    }
    settings = read(out, "tokenizer_config.json")
    assert (settings["bos_token"], settings["eos_token"], settings["pad_token"]) == ("<s>", "</s>", "<pad>")
    assert settings["chat_template"] == [
        {"name": "default", "template": TEMPLATE},
        {"name": "tool_use", "template": "x"},
    ]


def test_messages_of_harmony_do_not_end_the_answer(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        retoken(writer, 7)
        writer.kv_data[0].pop("tokenizer.ggml.token_type")
        writer.kv_data[0].pop("tokenizer.ggml.tokens")
        writer.add_token_list(["a", "b", "ab", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"])
        writer.add_token_types([1, 1, 1, 3, 3, 3, 3])
        writer.add_eos_token_id(4)

    (tmp_path / "out").mkdir()
    write_model_directory([write(tmp_path / "a.gguf", add)], tmp_path / "out")
    assert read(tmp_path / "out", "generation_config.json") == {"eos_token_id": [4, 5, 6]}


def test_a_split_set_is_one_model(tmp_path: Path) -> None:
    names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    first = write(tmp_path / names[0], lambda writer: writer.add_uint16("split.count", 2))
    second = write(tmp_path / names[1], without_table)
    (tmp_path / "out").mkdir()
    write_model_directory([first, second], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.gguf")) == names
    again = write(tmp_path / "m2.gguf")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConversionError, match=f"{again}: tensor token_embd.weight is also in {names[0]}"):
        write_model_directory([first, again], tmp_path / "other")
