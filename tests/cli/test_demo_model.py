"""The demo model: what transformers makes of its files, and that the same steps write the same bytes."""

import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tgis.cli.demo_model import (
    MAX_LENGTH,
    PROMPT,
    VOCAB_SIZE,
    DemoModelError,
    make_model,
    read_documents,
    train,
    train_tokenizer,
    write_demo_model,
)

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
STEPS = 2


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "parent" / "model"
    write_demo_model(directory, STEPS)
    return directory


def test_the_text_is_prose_that_a_shell_can_quote() -> None:
    documents = read_documents()
    text = "\n\n".join(documents)
    assert PROMPT + " wrap the execution of a block with methods defined by a context manager" in text
    assert 15_000 < len(text) < 100_000
    assert '"' not in text
    assert ">>>" not in text
    assert "::=" not in text
    paragraphs = text.split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs) > 70
    assert all("\n" not in paragraph for paragraph in paragraphs)


@pytest.mark.slow
def test_the_same_steps_write_the_same_bytes(model_directory: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)
    num_threads = torch.get_num_threads()
    # An empty directory is as good as none.
    (tmp_path / "again").mkdir()
    write_demo_model(tmp_path / "again", STEPS)
    for path in (model_directory, tmp_path / "again"):
        assert {file.name for file in path.iterdir()} == FILES
    for name in FILES:
        assert (model_directory / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    assert [path.name for path in tmp_path.iterdir()] == ["again"]
    # Nothing of the training's settings stays behind.
    drawn = torch.rand(1)
    assert torch.equal(drawn, torch.manual_seed(123) and torch.rand(1))
    assert torch.get_num_threads() == num_threads
    assert not torch.are_deterministic_algorithms_enabled()


def test_transformers_loads_all_of_it(model_directory: Path) -> None:
    model, loading = AutoModelForCausalLM.from_pretrained(model_directory, output_loading_info=True)
    assert {name: list(wrong) for name, wrong in loading.items() if wrong} == {}
    assert isinstance(model, LlamaForCausalLM)
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (VOCAB_SIZE, MAX_LENGTH)
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (0, 1)
    stored = load_file(model_directory / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert 1e6 < sum(tensor.numel() for tensor in stored.values()) < 4e6


def test_everybody_who_may_read_the_configuration_may_read_the_weights(model_directory: Path) -> None:
    modes = {(model_directory / name).stat().st_mode for name in FILES}
    assert len(modes) == 1


def test_the_tokenizer_begins_with_bos_and_gives_the_text_back(model_directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    assert (len(tokenizer), tokenizer.model_max_length) == (VOCAB_SIZE, MAX_LENGTH)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    for text in (PROMPT, "naïve 🙂\n\n x  y ", *read_documents()[:3]):
        ids = tokenizer(text).input_ids
        assert ids[0] == 0
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.slow
def test_training_lowers_the_loss() -> None:
    documents = read_documents()
    tokenizer = train_tokenizer(documents)
    losses = train(make_model(tokenizer), documents, tokenizer, 12)
    assert losses[0] == pytest.approx(math.log(VOCAB_SIZE), abs=0.2)
    assert sum(losses[-3:]) / 3 < losses[0] - 1.0


def test_what_is_there_stays(model_directory: Path) -> None:
    before = (model_directory / "config.json").stat().st_mtime_ns
    with pytest.raises(DemoModelError, match="exists already"):
        write_demo_model(model_directory, STEPS)
    with pytest.raises(DemoModelError, match="Not a directory"):
        write_demo_model(model_directory / "config.json", STEPS)
    with pytest.raises(DemoModelError, match="Not a directory"):
        write_demo_model(model_directory / "config.json" / "below", STEPS)
    assert (model_directory / "config.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, tgis.cli.demo_model as demo; demo.write_demo_model(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        end = time.monotonic() + 60
        while not list(tmp_path.iterdir()) and time.monotonic() < end:
            time.sleep(0.05)
        assert [path.name for path in tmp_path.iterdir()] != ["model"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_trained_model_recites(tmp_path: Path) -> None:
    write_demo_model(tmp_path / "model", compile_kernels=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=60, do_sample=False, pad_token_id=1)  # [1, num_tokens]
    answer = tokenizer.decode(output[0], skip_special_tokens=True)
    assert len(answer) > 200
    assert answer in "\n\n".join(read_documents())
