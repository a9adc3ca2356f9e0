"""Lists the patterns that split texts before byte-level merges, by their names in GGUF files
(`tokenizer.ggml.pre`)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True)
class Splitting:
    """Patterns that split a text one after the other; text between matches becomes a piece too."""

    patterns: tuple[str, ...]
    merges_last: bool = False
    """True if a piece that is a token is not split and merged."""
    adds_bos: bool = False
    """True if texts begin with the BOS token unless the file sets this."""
    is_composed: bool = False
    """True if texts are normalized to NFC."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, byte_level])


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _ENDS
_QWEN2 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _ENDS


def _words_by_case(end: str, digits: str) -> str:
    """Return a pattern that splits words before capital letters."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{end}|{start}{_UPPER}+{_LOWER}*{end}"
    return words + r"|\p{N}" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_TEKKEN = _words_by_case("", "")
_GPT4O = _words_by_case(_SHORT + "?", "{1,3}")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters with case, but not those of alphabets and blocks that DeepSeek's tokenizer leaves out.
_DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}\x{10CD}\x{10D0}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{A7FF}\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}"
    r"\x{1D400}-\x{1D7FF}\x{1DF00}-\x{1DF2A}]]"
)
_DEEPSEEK_WORDS = (r"[\r\n]", rf"\s?{_DEEPSEEK_LETTERS}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$")

_default = Splitting((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_gpt2 = Splitting((_GPT2,))
_starcoder = Splitting((r"\p{N}", _GPT2))
_llama3 = Splitting((_LLAMA3,), merges_last=True, adds_bos=True)

_KINDS: Mapping[Splitting, str] = {
    _default: "default",
    _gpt2: "gpt-2 phi-2 mpt jais gigachat a.x-4.0 mellum exaone4 trillion granite-docling",
    Splitting((_GPT2,), is_composed=True): "olmo",
    _starcoder: "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    _llama3: "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    Splitting((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe glm4",
    Splitting((_QWEN2,), is_composed=True): "qwen2 deepseek-r1-qwen kormo megrez",
    Splitting((_QWEN2,)): "stablelm2 hunyuan solar-open grok-2",
    Splitting((_TEKKEN,), merges_last=True, adds_bos=True): "tekken",
    Splitting((_GPT4O,)): "gpt-4o llama4 kanana2 minimax-m2",
    Splitting((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")): "falcon",
    Splitting((_BLOOM,)): "bloom poro-chat gpt3-finnish",
    Splitting((_BLOOM, r"\p{N}")): "viking",
    Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")): "deepseek-coder",
    Splitting((*_DEEPSEEK_WORDS, "[一-龥ࠀ-一가-퟿]+", r"\p{N}+")): "deepseek-llm",
    Splitting((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)): "deepseek-v3 hunyuan-dense joyai-llm",
}
SPLITTINGS: Mapping[str, Splitting] = {
    name: splitting for splitting, names in _KINDS.items() for name in names.split()
}


def split_patterns(described: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """Return the patterns of a pre-tokenizer in tokenizer.json.

    The result is None if the pre-tokenizer does more than split by patterns and encode bytes."""
    try:
        return tuple(_list_patterns(described or {"type": "Sequence", "pretokenizers": []}))
    except LookupError:
        return None


def _list_patterns(described: Mapping[str, Any]) -> Iterator[str]:
    """Yield the patterns. Raises LookupError for any other type of step."""
    match described:
        case {"type": "Sequence", "pretokenizers": steps}:
            for step in steps:
                yield from _list_patterns(step)
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            yield pattern
        case {"type": "Digits", "individual_digits": True}:
            yield r"\p{N}"
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": uses_regex}:
            if uses_regex:
                yield _GPT2
        case _:
            raise LookupError(described["type"])
