"""Tests calls in every format: a request's grammar accepts them as the format's models write them, and the
parsed answer contains them. The texts below are written by hand."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from tests.support.tokenizers.trained import write_byte_level
from tgis.router.api.openai.chat.answer_form import AnswerForm, read_answer_form
from tgis.router.api.openai.chat.answers import read_answer
from tgis.router.api.openai.chat.tools import read_tool_use
from tgis.router.api.openai.chat.types import ChatRequest, Tool
from tgis.router.api.openai.errors import ApiError
from tgis.router.api.service import Result
from tgis.router.chat.formats import harmony
from tgis.router.chat.formats.registry import REASONING_FORMATS, TOOL_FORMATS, ChatFormats
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import Output
from tgis.router.grammar.answer_grammar import write_answer_grammar
from tgis.router.grammar.answer_rules import Mark
from tgis.router.grammar.errors import InvalidGrammarError
from tgis.router.sequence import Stopping, StopReason

CITY = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Rome"]}}, "required": ["city"]}
TOOLS = [
    Tool({"name": "weather", "parameters": CITY | {"additionalProperties": False}}),
    Tool({"name": "now"}),
]
CALLS = [("weather", '{"city": "Bonn"}'), ("now", "{}")]
D = {
    name: f"<｜tool▁{name.replace(' ', '▁')}｜>"
    for name in ("calls begin", "calls end", "call begin", "call end", "sep")
}
WEATHER, NOW = ('{"name": "weather", "arguments": {"city": "Bonn"}}', '{"name": "now", "arguments": {}}')
TEXTS = {
    "hermes": f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>",
    "llama3": f"{WEATHER}; {NOW}".replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS] [{WEATHER}, {NOW}]",
    "mistral_v11": '[TOOL_CALLS]weather[ARGS]{"city": "Bonn"}[TOOL_CALLS]now[ARGS]{}',
    "granite": f"<|tool_call|>[{WEATHER}, {NOW}]",
    "phi4": f"<|tool_call|>[{WEATHER}, {NOW}]<|/tool_call|>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Bonn<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
    "pythonic": '[weather(city="Bonn"), now()]',
    "olmo3": '<function_calls>\nweather(city="Bonn")\nnow()\n</function_calls>',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>\n"
    "<tool_call>now\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "deepseek_v32": "<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Bonn</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "phi4_functools": f"functools[{WEATHER}, {NOW}]",
    "deepseek_v3": f"{D['calls begin']}{D['call begin']}function{D['sep']}weather\n```json\n"
    f'{{"city": "Bonn"}}\n```{D["call end"]}\n{D["call begin"]}function{D["sep"]}now\n```json\n{{}}\n```'
    f"{D['call end']}{D['calls end']}",
    "deepseek_v31": f'{D["calls begin"]}{D["call begin"]}weather{D["sep"]}{{"city": "Bonn"}}{D["call end"]}'
    f"{D['call begin']}now{D['sep']}{{}}{D['call end']}{D['calls end']}",
}
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>"]
MARKS += ["<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>', "<function_calls>"]
MARKS += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
MARKS += [*D.values(), "<think>", "</think>", "[THINK]", "[/THINK]", *harmony.MARKS]


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Tokenizer]:
    """Return tokenizers with and without the marks as special tokens."""
    plain = write_byte_level(tmp_path_factory.mktemp("plain"))
    marked = write_byte_level(tmp_path_factory.mktemp("marked"))
    marked.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return {False: plain, True: marked}


def make_form(tokenizer: Tokenizer, formats: ChatFormats, prompt: str, body: ChatRequest) -> AnswerForm:
    added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    use = read_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    form = read_answer_form(
        formats, use, prompt, body, lambda text: Mark(text, added.get(text), text in added)
    )
    assert form is not None
    return form


def takes(tokenizer: Tokenizer, form: AnswerForm, text: str, text_grammar: str | None = None) -> bool:
    rules = form.rules(is_constrained=text_grammar is not None)
    assert rules is not None
    grammar = write_answer_grammar(rules, text_grammar, lambda token_id: token_id)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=1), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def read(
    form: AnswerForm, text: str, tokenizer: Tokenizer
) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    last = Output((), (), len(ids), StopReason.EOS_TOKEN)
    texts = [text[i : i + 3] for i in range(0, len(text), 3)]
    texts += [""] * (len(ids) - len(texts))
    result = Result(SequenceSpec((1,), Stopping(9)), texts, last=last, token_ids=ids)
    message = read_answer(result, form).message
    calls = message.tool_calls or []
    thought = message.reasoning_content or None
    return thought, message.content, [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.parametrize("shows_tools", [False, True])
def test_a_model_without_tools_is_refused_with_advice(shows_tools: bool) -> None:
    """Either the template shows no tools, or the format of calls is unknown."""
    tool_format = None if shows_tools else TOOL_FORMATS[0]
    use = read_tool_use([Tool({"name": "now"})], None, None)
    body = ChatRequest(messages=[])
    formats = ChatFormats(tool_format, None)
    with pytest.raises(ApiError) as caught:
        read_answer_form(formats, use, "", body, lambda text: Mark(text, None, False), shows_tools)
    advice = 'use tool_choice "required" or a function\'s name, or serve a model that calls tools, or set '
    assert advice + "--chat-template and --tool-call-parser" in str(caught.value)


@pytest.mark.parametrize("are_marks", [False, True])
@pytest.mark.parametrize("kind", [each.name for each in TOOL_FORMATS if not each.is_channel])
def test_calls_of_every_format(kind: str, are_marks: bool, vocabularies: dict[bool, Tokenizer]) -> None:
    tokenizer, text = vocabularies[are_marks], TEXTS[kind]
    formats = ChatFormats(next(each for each in TOOL_FORMATS if each.name == kind))
    for choice in ("auto", "required"):
        for several in (True, False):
            body = ChatRequest(messages=[], tools=TOOLS, tool_choice=choice, parallel_tool_calls=several)
            form = make_form(tokenizer, formats, "", body)
            assert takes(tokenizer, form, text) == several
            assert not takes(tokenizer, form, text.replace("Bonn", "Bern"))
            assert takes(tokenizer, form, "hello") == (choice == "auto")
    assert read(form, text, tokenizer) == (None, None, CALLS)
    after_text = read(form, f"hello\n{text}", tokenizer)
    is_whole = kind in ("llama3", "pythonic")
    assert after_text == ((None, f"hello\n{text}", []) if is_whole else (None, "hello", CALLS))


TAGGED_SCHEMA = {
    "type": "object",
    "properties": {"s": {"type": "string"}, "n": {"$ref": "#/$defs/count"}},
    "required": ["n"],
    "$defs": {"count": {"type": "integer"}},
}


@pytest.mark.parametrize("are_marks", [False, True])
@pytest.mark.parametrize("kind", ["glm45", "qwen3_coder", "deepseek_v32"])
def test_values_between_tags_follow_the_schema(
    kind: str, are_marks: bool, vocabularies: dict[bool, Tokenizer]
) -> None:
    tools = [Tool({"name": "f", "parameters": TAGGED_SCHEMA}), Tool({"name": "any", "parameters": {}})]
    body = ChatRequest(messages=[], tools=tools, tool_choice="required")
    tokenizer = vocabularies[are_marks]
    formats = ChatFormats(next(each for each in TOOL_FORMATS if each.name == kind))
    form = make_form(tokenizer, formats, "", body)

    def write(name: str, **values: str) -> str:
        if kind == "glm45":
            pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
            return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"
        if kind == "deepseek_v32":
            kinds = {key: "false" if key in ("n", "b") else "true" for key in values}
            parameters = "".join(
                f'<｜DSML｜parameter name="{k}" string="{kinds[k]}">{v}</｜DSML｜parameter>\n'
                for k, v in values.items()
            )
            invoke = f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>'
            return f"<｜DSML｜function_calls>\n{invoke}\n</｜DSML｜function_calls>"
        pairs = (f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"

    text = write("f", s='5 "<b>"\nx', n="12")
    assert takes(tokenizer, form, text)
    assert read(form, text, tokenizer)[2] == [("f", '{"s": "5 \\"<b>\\"\\nx", "n": 12}')]
    assert takes(tokenizer, form, write("f", n="12"))
    assert takes(tokenizer, form, write("any", a="x", b="1"))
    for wrong in (write("f", s="x"), write("f", n="x"), write("f", n="1", t="1"), write("g", n="1")):
        assert not takes(tokenizer, form, wrong)


BOUNDED: dict[str, dict[str, object]] = {
    "s": {"type": "string", "minLength": 2, "maxLength": 4},
    "p": {"type": "string", "pattern": "^(a/|b)+$"},
    "q": {"type": "string", "pattern": "[xy]\\n?z", "maxLength": 5},
    "e": {"type": "string", "maxLength": 1},
}
VALUES = {
    "s": (["ab", "a\nb", " é🙂 "], ["", "a", "abcde"]),
    "p": (["a/", "ba/b"], ["", "c", "ab", "a/c", "xa/"]),
    "q": (["xz", "..yz", "y\nz"], ["", "x", "...xyz", "xy"]),
    "e": (["", "x", "\n"], ["xy"]),
}


@pytest.mark.parametrize(
    ("kind", "are_marks"),
    [
        ("glm45", True),
        ("qwen3_coder", False),
        ("deepseek_v32", True),
        pytest.param("glm45", False, marks=pytest.mark.slow),
        pytest.param("qwen3_coder", True, marks=pytest.mark.slow),
        pytest.param("deepseek_v32", False, marks=pytest.mark.slow),
    ],
)
def test_texts_between_tags_keep_their_bounds(
    kind: str, are_marks: bool, vocabularies: dict[bool, Tokenizer]
) -> None:
    formats = ChatFormats(next(each for each in TOOL_FORMATS if each.name == kind))
    write = {
        "glm45": "<tool_call>f\n<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=%s>\n%s\n</parameter>\n</function>\n"
        "</tool_call>",
        "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="%s" string="true">%s</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
    }[kind]
    for is_strict in (False, True):
        tool = Tool({"name": "f", "parameters": {"properties": BOUNDED}, "strict": is_strict})
        body = ChatRequest(messages=[], tools=[tool], tool_choice="required")
        form = make_form(vocabularies[are_marks], formats, "", body)
        for key, (right, wrong) in VALUES.items():
            for value in right:
                text = write % (key, value)
                assert takes(vocabularies[are_marks], form, text), (key, value)
                [(_, arguments)] = read(form, text, vocabularies[are_marks])[2]
                assert json.loads(arguments) == {key: value}
            for value in wrong:
                assert not takes(vocabularies[are_marks], form, write % (key, value)), (key, value)


UNWRITABLE = {"glm45": "a</arg_key>b", "qwen3_coder": "a>b", "deepseek_v32": 'a" string="true">'}
UNWRITABLE |= {"gemma4": "a:b", "pythonic": 'a"b', "olmo3": "a[b]"}


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_names_that_the_notation_cannot_write(kind: str, vocabularies: dict[bool, Tokenizer]) -> None:
    formats = ChatFormats(next(each for each in TOOL_FORMATS if each.name == kind))
    for name, is_writable in ((UNWRITABLE[kind], False), ("two words", True), ("$x.é-1", True)):
        tools = [Tool({"name": "f", "parameters": {"properties": {name: {"type": "boolean"}}}})]
        body = ChatRequest(messages=[], tools=tools, tool_choice="required")
        rules = make_form(vocabularies[False], formats, "", body).rules(is_constrained=False)
        assert rules is not None
        if is_writable:
            write_answer_grammar(rules, None, lambda token_id: token_id)
            continue
        with pytest.raises(InvalidGrammarError, match="cannot write the name of a property"):
            write_answer_grammar(rules, None, lambda token_id: token_id)


NESTED_SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer", "maximum": 20},
        "b": {"type": ["boolean"], "enum": [True, None]},
        "o": {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "boolean"}}}},
        "p": {"type": "string", "pattern": "^a+$"},
        "any": {},
    },
    "required": ["n"],
}
Q = '<|"|>'
# Arguments in both notations, and as JSON; None for those that the schema forbids.
NOTED = [
    ('s="5 \\"<b>\\"", n=12', f's:{Q}5 "<b>"{Q},n:12', {"s": '5 "<b>"', "n": 12}),
    ("n=1, b=True", "n:1,b:true", {"n": 1, "b": True}),
    ("n=1, b=None", "n:1,b:null", {"n": 1, "b": None}),
    ('n=1, o={"x": [true]}', "n:1,o:{x:[true]}", {"n": 1, "o": {"x": [True]}}),
    ('n=1, p="aa"', 'n:1,p:"aa"', {"n": 1, "p": "aa"}),
    ('n=1, any=["x", {"y": 1}]', f"n:1,any:[{Q}x{Q},{{y:1}}]", {"n": 1, "any": ["x", {"y": 1}]}),
    ('n=1, p="b"', f"n:1,p:{Q}b{Q}", None),
    ("n=1, b=False", "n:1,b:false", None),
    ("n=30", "n:30", None),
    ('s="x"', f"s:{Q}x{Q}", None),
    ('n=1, o={"x": [1]}', "n:1,o:{x:[1]}", None),
    ("n=1, t=1", "n:1,t:1", None),
]


@pytest.mark.parametrize("are_marks", [False, True])
@pytest.mark.parametrize("kind", ["gemma4", "pythonic", "olmo3"])
def test_values_in_other_notations_follow_the_schema(
    kind: str, are_marks: bool, vocabularies: dict[bool, Tokenizer]
) -> None:
    tools = [Tool({"name": "f", "parameters": NESTED_SCHEMA}), Tool({"name": "any", "parameters": {}})]
    body = ChatRequest(messages=[], tools=tools, tool_choice="required")
    tokenizer = vocabularies[are_marks]
    formats = ChatFormats(next(each for each in TOOL_FORMATS if each.name == kind))
    form = make_form(tokenizer, formats, "", body)
    write = {
        "gemma4": "<|tool_call>call:%s{%s}<tool_call|>",
        "pythonic": "[%s(%s)]",
        "olmo3": "<function_calls>\n%s(%s)\n</function_calls>",
    }[kind]
    for python, loose, arguments in NOTED:
        text = write % ("f", loose if kind == "gemma4" else python)
        assert takes(tokenizer, form, text) == (arguments is not None), text
        if arguments is not None:
            [(_, read_arguments)] = read(form, text, tokenizer)[2]
            assert json.loads(read_arguments) == arguments
        assert takes(tokenizer, form, write % ("any", "z:{x:1}" if kind == "gemma4" else 'z={"x": 1}'))


@pytest.mark.parametrize("are_marks", [False, True])
@pytest.mark.parametrize("kind", [each.name for each in REASONING_FORMATS if not each.is_channel])
def test_reasoning_of_every_format(kind: str, are_marks: bool, vocabularies: dict[bool, Tokenizer]) -> None:
    tokenizer, hermes = vocabularies[are_marks], TEXTS["hermes"]
    tools = next(each for each in TOOL_FORMATS if each.name == "hermes")
    reasoning = next(each for each in REASONING_FORMATS if each.name == kind)
    body = ChatRequest(messages=[], tools=TOOLS, tool_choice="required")
    for prompt, begin in ((f"hello {reasoning.begin}\n", ""), ("hello", reasoning.begin)):
        form = make_form(tokenizer, ChatFormats(tools, reasoning), prompt, body)
        text = f"{begin}hm, hm{reasoning.end}\n{hermes}"
        assert takes(tokenizer, form, text)
        assert not takes(tokenizer, form, f"{begin}hm, hm{reasoning.end}\nhello")
        assert read(form, text, tokenizer) == ("hm, hm", None, CALLS)
    form = make_form(
        tokenizer, ChatFormats(tools, reasoning), f"{reasoning.begin}\n\n{reasoning.end}\n", body
    )
    assert takes(tokenizer, form, hermes)
    assert read(form, hermes, tokenizer) == (None, None, CALLS)


HARMONY_CHATS = ChatFormats(harmony.HARMONY, harmony.HARMONY_REASONING)
ASKED = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>hm, hm<|end|><|start|>assistant"
COMMENT = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>hello"
MESSAGE_CALLS = (
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}',
    ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Bonn"}',
)


@pytest.mark.parametrize("call", MESSAGE_CALLS)
def test_calls_in_messages(call: str, vocabularies: dict[bool, Tokenizer]) -> None:
    tokenizer = vocabularies[True]
    for choice in ("auto", "required"):
        body = ChatRequest(messages=[], tools=TOOLS, tool_choice=choice)
        form = make_form(tokenizer, HARMONY_CHATS, ASKED, body)
        for before in ("", THOUGHT, THOUGHT * 2):
            assert takes(tokenizer, form, before + call)
            assert not takes(tokenizer, form, before + call.replace("Bonn", "Bern"))
            assert takes(tokenizer, form, before + FINAL) == (choice == "auto")
            assert takes(tokenizer, form, before + COMMENT + call) == (choice == "auto")
        assert not takes(tokenizer, form, "hello")
    assert read(form, THOUGHT + call, tokenizer) == ("hm, hm", None, CALLS[:1])
    assert read(form, COMMENT + call, tokenizer) == (None, "I look.", CALLS[:1])
    assert read(form, THOUGHT + FINAL, tokenizer) == ("hm, hm", "hello", [])


def test_limits_of_reasoning_in_messages(vocabularies: dict[bool, Tokenizer]) -> None:
    tokenizer = vocabularies[True]
    num_tokens = len(tokenizer.encode("hm, hm", add_special_tokens=False).ids)
    for limit, is_allowed in ((0, False), (num_tokens - 1, False), (num_tokens, True)):
        body = ChatRequest(messages=[], max_reasoning_tokens=limit)
        form = make_form(tokenizer, HARMONY_CHATS, ASKED, body)
        assert takes(tokenizer, form, FINAL)
        assert takes(tokenizer, form, THOUGHT + FINAL) == is_allowed
        begun = make_form(tokenizer, HARMONY_CHATS, f"{ASKED}<|channel|>analysis<|message|>", body)
        assert takes(tokenizer, begun, THOUGHT.partition("<|message|>")[2] + FINAL) == is_allowed


def test_constraints_apply_to_the_content_of_messages(vocabularies: dict[bool, Tokenizer]) -> None:
    tokenizer, one = vocabularies[True], 'start: "one"'
    form = make_form(tokenizer, HARMONY_CHATS, ASKED, ChatRequest(messages=[]))
    content = FINAL.replace("hello", "one")
    for before in ("", THOUGHT):
        assert takes(tokenizer, form, before + content, one)
        assert not takes(tokenizer, form, before + FINAL, one)
    continued = make_form(
        tokenizer, HARMONY_CHATS, f"{ASKED}<|channel|>final<|message|>", ChatRequest(messages=[])
    )
    assert takes(tokenizer, continued, "one", one)
    assert read(continued, "one", tokenizer) == (None, "one", [])


def test_marks_of_messages_are_shown(vocabularies: dict[bool, Tokenizer]) -> None:
    """Also for models whose reasoning is content."""
    for formats in (HARMONY_CHATS, ChatFormats(harmony.HARMONY)):
        form = make_form(vocabularies[True], formats, ASKED, ChatRequest(messages=[]))
        assert form.mark_ids == {vocabularies[True].token_to_id(mark) for mark in harmony.MARKS}


def test_messages_need_tokens_for_their_marks(vocabularies: dict[bool, Tokenizer]) -> None:
    for body in (ChatRequest(messages=[], tools=TOOLS), ChatRequest(messages=[], max_reasoning_tokens=5)):
        with pytest.raises(ApiError, match="has no tokens"):
            make_form(vocabularies[False], HARMONY_CHATS, ASKED, body)
