"""Keyword arguments in Python's notation become JSON's values, or nothing."""

import pytest

from gateway.conversation.python_literals import MAX_DEPTH, keyword_arguments


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("", {}),
        ("a=1, b=-2.5e3 ,c = .5", {"a": 1, "b": -2500.0, "c": 0.5}),
        ("a='it\\'s', b=\"ü\\n\"", {"a": "it's", "b": "ü\n"}),
        ("a=True, b=None, c=false, d=null", {"a": True, "b": None, "c": False, "d": None}),
        ("a=[1, [2], ()], b={'k': {\"l\": []}},", {"a": [1, [2], []], "b": {"k": {"l": []}}}),
        ("a=')]}'", {"a": ")]}"}),
        ("user-id='x', b$c=1, größe=2, a.b=True", {"user-id": "x", "b$c": 1, "größe": 2, "a.b": True}),
        ("a=1, b=2, a=3", {"a": 3, "b": 2}),
        ("a='\\d \\x41\\u00fc\\ud83d\\ude00\\/'", {"a": "\\d Aü😀/"}),
    ],
)
def test_literals(source: str, arguments: dict[str, object]) -> None:
    assert keyword_arguments(source) == arguments


@pytest.mark.parametrize(
    "source",
    [
        "1", "a", "a=", "a=b", "a=f()", "a=1 b=2", "a=1,,", "a==1", "=1", "a={1: 2}", "a={'k'}", "a=[1",
        "a=1)", "a='x", "a='\\ud800'", "a=1e999", "a=b'x'", "a=1+2", "**a", "a=" + "9" * 5_000,
        "a=" + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "a='\\U00110000'",
    ],
)  # fmt: skip
def test_what_is_no_literal(source: str) -> None:
    assert keyword_arguments(source) is None
