"""Values read from a model's files."""

import json
from pathlib import Path

import pytest

from tgis.hub import model_files


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_sequence_length_is_the_first_key_that_is_there() -> None:
    keys = "max_position_embeddings n_positions max_seq_len seq_length".split()
    keys += "max_sequence_length max_seq_length seq_len".split()
    for index, key in enumerate(keys):
        assert (
            model_files.max_sequence_length({name: 100 + keys.index(name) for name in keys[index:]})
            == 100 + index
        )
        assert model_files.length_of_model({key: 7}) == 7
    assert model_files.max_sequence_length({"seq_length": 9, "max_seq_len": None}) == 9
    for odd in (True, "8", 8.5, 0, -1):
        assert model_files.length_of_model({"n_positions": odd}) is None
    assert model_files.length_of_model({"text_config": {"n_positions": 5}}) == 5
    assert model_files.length_of_model({"n_positions": 4, "text_config": {"n_positions": 5}}) == 4
    others: list[object] = [None, "x", [], {}, {"n_positions": 0}]
    for other in others:
        assert model_files.length_of_model({"text_config": other}) is None
    assert model_files.max_sequence_length({}) == 2048


def test_end_of_sequence_ids_are_those_of_all_files(tmp_path: Path) -> None:
    assert model_files.eos_token_ids(tmp_path) == []
    write(tmp_path / "generation_config.json", {"eos_token_id": [2, 28, 504]})
    assert model_files.eos_token_ids(tmp_path) == [2, 28, 504]
    write(tmp_path / "config.json", {"eos_token_id": 0})
    assert model_files.eos_token_ids(tmp_path) == [0, 2, 28, 504]
    write(tmp_path / "config.json", {"eos_token_id": 28, "text_config": {"eos_token_id": [7, 2]}})
    assert model_files.eos_token_ids(tmp_path) == [28, 7, 2, 504]
    write(tmp_path / "config.json", {"eos_token_id": None, "text_config": {"eos_token_id": []}})
    assert model_files.eos_token_ids(tmp_path) == [2, 28, 504]


@pytest.mark.parametrize("odd", ["2", 2.0, True, [None], [[2]], {"id": 2}, 2**31, [3, "4"]])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_end_of_sequence_ids_are_integers(tmp_path: Path, name: str, odd: object) -> None:
    write(tmp_path / name, {"eos_token_id": odd})
    with pytest.raises(model_files.ModelNotFoundError, match=rf"{name}: eos_token_id .* is not a token id"):
        model_files.eos_token_ids(tmp_path)


@pytest.mark.parametrize(
    "odd", [[*range(10_000), "2"], "2" * 10_000, 10**4_000], ids=["list", "text", "number"]
)
def test_long_values_are_not_repeated(tmp_path: Path, odd: object) -> None:
    write(tmp_path / "config.json", {"eos_token_id": odd})
    with pytest.raises(model_files.ModelNotFoundError, match=r"eos_token_id .* is not a token id") as caught:
        model_files.eos_token_ids(tmp_path)
    assert len(str(caught.value)) < len(str(tmp_path)) + 200


def test_negative_ids_end_nothing(tmp_path: Path) -> None:
    """Configurations of models without an end have -1."""
    write(tmp_path / "config.json", {"eos_token_id": -1})
    assert model_files.eos_token_ids(tmp_path) == []


def test_the_pad_token(tmp_path: Path) -> None:
    """The first source with a token of the model is used."""
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    added = [{"id": 7, "content": "<pad>"}, {"id": 8, "content": "<fill>"}, {"id": 200, "content": "<far>"}]

    def find(**files: object) -> int:
        for directory, names in ((model, ("config", "generation_config")), (tokenizer, None)):
            for path in directory.glob("*"):
                path.unlink()
            for name in names or files.keys() - {"config", "generation_config"}:
                write(directory / f"{name}.json", files.get(name, {}))
        return model_files.pad_token_id(model, tokenizer, 100)

    named = {"tokenizer_config": {"pad_token": "<pad>"}, "tokenizer": {"added_tokens": added}}
    assert find(config={"pad_token_id": 3}, generation_config={"pad_token_id": 4}, **named) == 3
    assert find(config={"text_config": {"pad_token_id": 3}}, generation_config={"pad_token_id": 4}) == 3
    for odd in (-1, 100, "3", None, True, [3]):
        assert find(config={"pad_token_id": odd}, generation_config={"pad_token_id": 4}, **named) == 4
    assert find(config={"eos_token_id": 5}, **named) == 7
    named["tokenizer_config"] = {"pad_token": {"content": "<fill>", "lstrip": False}}
    assert find(config={"eos_token_id": 5}, **named) == 8
    named["special_tokens_map"], named["tokenizer_config"] = {"pad_token": "<pad>"}, {}
    assert find(config={"eos_token_id": 5}, **named) == 7
    named["special_tokens_map"] = {"pad_token": "<far>"}
    assert find(config={"eos_token_id": [5, 6]}, **named) == 5
    assert find(config={"eos_token_id": 5}, tokenizer_config={"pad_token": "<pad>"}) == 5
    assert find(config={"eos_token_id": -5}) == 0


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b'{"a": "\xff"}', "is not valid JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"a":' * 10**5, "is nested too deep"),
        (b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}", "is nested too deep"),
    ],
    ids=range(6),
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(model_files.ModelNotFoundError, match=rf"config\.json {fault}"):
        model_files.read_json(tmp_path, "config.json")


def test_fingerprints_differ_between_models(tmp_path: Path) -> None:
    """The fingerprint depends on settings and sizes of weights, and on no other files."""
    fingerprints = []
    for size, settings in ((2, {"a": 1}), (2, {"a": 2}), (3, {"a": 1}), (2, {"a": 1})):
        write(tmp_path / "config.json", settings)
        (tmp_path / "model.safetensors").write_bytes(bytes(size))
        (tmp_path / "README.md").write_text(f"{len(fingerprints)}")
        fingerprints.append(model_files.fingerprint(tmp_path))
    assert fingerprints[0] == fingerprints[3]
    assert len(set(fingerprints)) == 3
