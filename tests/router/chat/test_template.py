"""Check that templates and special tokens are read from the files that transformers reads."""

import json
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.support.chats import template_text
from tgis.errors import OperatorError
from tgis.router.chat.environment import make_environment
from tgis.router.chat.template import TOOL_USE, ChatTemplate, load_template
from tgis.router.chat.template_syntax import takes_content_parts
from tgis.router.errors import StartupError

BOS = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "special": True}
NAMED = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "named tools"}]


def write(directory: Path, **files: object) -> None:
    for name, content in files.items():
        path = directory / name.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def load(directory: Path, file: str | None = None) -> ChatTemplate:
    result = load_template(directory, file)
    assert result is not None
    return result


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config_json": {"chat_template": "in config"}},
        {"tokenizer_config_json": {"chat_template": NAMED}},
        {"tokenizer_config_json": {"chat_template": NAMED}, "chat_template_jinja": "file"},
        {"chat_template_jinja": "file", "additional_chat_templates__tool_use_jinja": "more"},
        {
            "tokenizer_config_json": {"bos_token": BOS, "eos_token": "</s>"},
            "special_tokens_map_json": {"eos_token": {"content": "<e>"}, "pad_token": "<p>"},
            "chat_template_jinja": "{{ bos_token }}",
        },
        {
            "tokenizer_config_json": {"added_tokens_decoder": {}, "eos_token": "</s>", "bos_token": None},
            "special_tokens_map_json": {"eos_token": "<e>"},
            "chat_template_jinja": "file",
        },
    ],
)
def test_a_model_s_template_is_the_one_of_transformers(files: dict[str, object], tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, **files)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load(tmp_path)
    for tools in (None, [], [{}]):
        assert ours.text_for(has_tools=tools is not None) == theirs.get_chat_template(tools=tools)
    assert ours.special_tokens == theirs.special_tokens_map


def test_other_places(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert load_template(tmp_path, None) is None
    assert "the model has no chat template, so chats are refused" in caplog.text
    write(tmp_path, additional_chat_templates__tool_use_jinja="more")
    assert load_template(tmp_path, None) is None, "there is no default"
    write(tmp_path, chat_template_json={"chat_template": "old"})
    assert load(tmp_path) == ChatTemplate("old", tool_use="more")
    write(tmp_path, own_jinja="own")
    assert load(tmp_path, str(tmp_path / "own.jinja")) == ChatTemplate("own")


def test_another_file_than_the_tokenizer_s(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Check that it overrides every file of the model, for the template and for special tokens."""

    def load_with(file: str | None, config: dict[str, object]) -> tuple[ChatTemplate | None, str]:
        write(tmp_path, mine_json=config)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            result = load_template(model, file, str(tmp_path / "mine.json"))
        return result, caplog.text

    model = tmp_path / "model"
    model.mkdir()
    write(
        model,
        tokenizer_config_json={"chat_template": "config", "bos_token": "<s>", "eos_token": "</s>"},
        special_tokens_map_json={"bos_token": "<map>", "pad_token": "<pad>"},
        chat_template_json={"chat_template": "old"},
    )
    own: dict[str, object] = {"chat_template": "mine", "bos_token": "<mine>"}
    tokens = {"bos_token": "<mine>", "pad_token": "<pad>"}
    result, text = load_with(None, own)
    assert result == ChatTemplate("mine", special_tokens=tokens)
    assert f"chats use the template of {tmp_path}/mine.json" in text
    result, text = load_with(None, {"bos_token": "<mine>"})
    assert result == ChatTemplate("old", special_tokens=tokens), "the model's own file is not read"
    assert f"chats use the template of {model}/chat_template.json" in text
    write(model, chat_template_jinja="newest")
    result, text = load_with(None, own)
    assert result == ChatTemplate("mine", special_tokens=tokens)
    result, text = load_with(None, {})
    assert result is not None
    assert result.default == "newest"
    assert f"chats use the template of {model}/chat_template.jinja" in text
    write(tmp_path, given_jinja="given")
    result, text = load_with(f"{tmp_path}/given.jinja", own)
    assert result == ChatTemplate("given", special_tokens=tokens)
    assert f"chats use the template of {tmp_path}/given.jinja" in text
    (model / "model.gguf").symlink_to(tmp_path / "named.gguf")
    for given, named in ((None, "named.gguf"), (f"{tmp_path}/given.jinja", "given.jinja")):
        assert f"chats use the template of {tmp_path}/{named}" in load_with(given, {})[1]
    with pytest.raises(StartupError, match=r"^tokenizer_config_path: .*none\.json is not a file$"):
        load_template(model, None, str(tmp_path / "none.json"))


def test_an_unusable_template_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    write(tmp_path, bad_jinja="a\n{% for %}", large="x" * (2 << 20))
    causes = {
        "bytes": "cannot be read: it is not UTF-8",
        "none": "cannot be read: No such file or directory",
        "bad.jinja": "does not compile: Expected an expression, got 'end of statement block' in line 2",
        "large": "has more than 1048576 bytes",
    }
    for name, cause in causes.items():
        with pytest.raises(StartupError) as caught:
            load_template(tmp_path, str(tmp_path / name))
        assert str(caught.value) == f"the chat template {tmp_path / name} {cause}"
    for config in ("[", "[]", {"chat_template": 5}, {"chat_template": [{"name": "x"}]}):
        write(tmp_path, tokenizer_config_json=config)
        with pytest.raises(OperatorError, match=r"^[^\n]*tokenizer_config.json[^\n]*$"):
            load_template(tmp_path, None)
    write(tmp_path, tokenizer_config_json={"chat_template": "{% endif %}"})
    with pytest.raises(StartupError, match=r"^the model's chat template does not compile: .* in line 1$"):
        load_template(tmp_path, None)
    write(tmp_path, tokenizer_config_json={"chat_template": "\ud800"})
    with pytest.raises(StartupError, match=r"^the model's chat template is not valid Unicode$"):
        load_template(tmp_path, None)


def test_a_hostile_template_does_not_stop_the_start_for_long(tmp_path: Path) -> None:
    write(tmp_path, deep_jinja="{{ " + "(" * 50_000 + " }}", wide_jinja="{% if a %}" * 20_000)
    for name in ("deep.jinja", "wide.jinja"):
        with pytest.raises(StartupError, match=r"^[^\n]*$"):
            load_template(tmp_path, str(tmp_path / name))


PARTS = {
    "content_parts": True,
    "{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}": True,
    "{% for p in messages[0].get('content') | list %}{% endfor %}": True,
    "{% set c = messages[0].content or [] %}{% set d = c %}{% for p in d %}{% endfor %}": True,
    "{% set n = namespace(c=1) %}{% set n.c = m.content %}{% for p in n.c[1:] %}{% endfor %}": True,
    "{{ messages[0].content | selectattr('type', 'equalto', 'text') | first }}": True,
    "{% macro f(a, b) %}{% for p in b %}{% endfor %}{% endmacro %}{{ f(1, b=m.content) }}": True,
    "{% for line in messages[0].content.split('x') %}{{ line }}{% endfor %}": False,
    "{% for m in messages %}{{ m.content | trim }}{% for t in m.tool_calls %}{% endfor %}{% endfor %}": False,
    "llama3_tools": False,
    "chatml_tools": False,
    "mistral_tools": False,
}


@pytest.mark.parametrize("text", PARTS)
def test_templates_that_take_content_parts(text: str) -> None:
    tree = make_environment().parse(template_text(text) if "{" not in text else text)
    assert takes_content_parts(tree) == PARTS[text]


def test_both_templates_must_take_parts(tmp_path: Path) -> None:
    write(tmp_path, chat_template_jinja=template_text("content_parts"))
    assert load(tmp_path).takes_content_parts
    write(tmp_path, **{f"additional_chat_templates__{TOOL_USE}_jinja": "{{ messages[0].content }}"})
    assert not load(tmp_path).takes_content_parts
