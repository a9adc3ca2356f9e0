"""Tests the words for a text that is not JSON."""

import msgspec
import pytest

from tgis.router.api.http.fields.invalid_json import describe_invalid_json

TEXTS = [
    (b"", "it is empty"),
    (b" \n", "it is empty"),
    (b'{"a": "secret', "it ends too early"),
    (b'{"a": "secret",}', "trailing comma in object at line 1, column 16"),
    (b'{\n  "a": secret}', "invalid character at line 2, column 8"),
    (b"{'a': 1}", "object keys must be strings at line 1, column 2"),
    (b'{"a": [1 2]}', "expected ',' or ']' at line 1, column 10"),
    (b"secret", "invalid character at line 1, column 1"),
    (b'{"b": "c",\n"a": "se\xffcret"}', "bytes that are not UTF-8 at line 2, column 9"),
]


@pytest.mark.parametrize(("text", "reason"), TEXTS)
def test_the_place_of_the_error_is_named_and_nothing_is_quoted(text: bytes, reason: str) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)) as caught:
        msgspec.json.decode(text)
    assert not isinstance(caught.value, msgspec.ValidationError)
    assert isinstance(caught.value, msgspec.DecodeError | UnicodeDecodeError)
    assert describe_invalid_json(caught.value, text) == reason
