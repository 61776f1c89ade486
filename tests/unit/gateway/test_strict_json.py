"""Strict JSON: every parser reads accepted texts in the same way. Other texts are refused quickly, with a reason."""

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.strict_json import MAX_DEPTH, MAX_KEYS, MAX_VALUES, NotStrict, parse
from tests.factories.costs import expect_cost_in_proportion

characters = st.characters(exclude_categories=["Cs"])
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(characters),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(characters), inner, max_size=4),
    max_leaves=20,
)


@given(value=values, is_ascii=st.booleans())
def test_whatever_is_json_is_read_as_it_was_meant(value: Any, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert parse(body) == value


@given(
    body=st.binary(max_size=40) | st.text('[]{}",:0123456789.eE+-\\u dnulltrue', max_size=40).map(str.encode)
)
def test_anything_else_is_refused_and_nothing_else_happens(body: bytes) -> None:
    try:
        value = parse(body)
    except NotStrict:
        return
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "EOF while parsing a value at line 1 column 0"),
        (b'{"a": 1,}', "line 1 column 9"),
        (b'{"a": NaN}', "expected value at line 1 column 7"),
        (b'{"a": -Infinity}', "invalid number at line 1 column 8"),
        (b'{"a": 1e999}', "inf does not fit into 64 bits"),
        (b'{"a": [-1E999]}', "-inf does not fit into 64 bits"),
        (b'{"a": 18446744073709551616}', "18446744073709551616 does not fit into 64 bits"),
        (b'{"a": -9223372036854775809}', "does not fit into 64 bits"),
        (b'{"a": ' + b"9" * 5000 + b"}", "number out of range"),
        (b'{"a": 1, "b": 2, "a": 1}', "'a' appears twice in one object"),
        (b'{"a": [{"b": 1, "b\\\\": 2, "\\u0062": 3}]}', "'b' appears twice in one object"),
        (b'{"a": 1, "b": "' + b"x" * 2**16 + b'", "a": 1}', "a key appears twice in one object"),
        (b'{"a": "\\ud800"}', "hex escape at line 1 column 14"),
        (b'{"\\udfff": 1}', "lone leading surrogate in hex escape"),
        (b'"\xed\xa0\x80"', "invalid unicode code point"),
        (b'"\xff"', "invalid unicode code point"),
        ('{"a": 1}'.encode("utf-16"), "expected value at line 1 column 1"),
        (b'\xef\xbb\xbf{"a": 1}', "byte order mark"),
        (b"{" + b",".join(b'"%d": 1' % n for n in range(MAX_KEYS + 1)) + b"}", f"more than {MAX_KEYS} keys"),
        (b"[" + b'"",' * MAX_VALUES + b"1]", f"more than {MAX_VALUES} values"),
        (b'"' * (4 * MAX_VALUES + 1), f"more than {MAX_VALUES} values"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} levels deep"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} levels deep"),
        (b"[" + b"1," * MAX_VALUES + b"1]", f"more than {MAX_VALUES} values"),
    ],
)
def test_ambiguous_json_is_refused_with_the_reason(body: bytes, complaint: str) -> None:
    with pytest.raises(NotStrict, match=complaint):
        parse(body)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
        b'"' + b"[{," * MAX_VALUES + b'"',
        b'["\\ud83d\\ude00", "\\\\ud800"]',
        b'{"\\"a\\\\": ":{,", "b": {"a": 1e3, "b": "\\\\\\""}}',
        b'[18446744073709551615, -9223372036854775808, "99999999999999999999"]',
    ],
)
def test_lookalikes_are_accepted(body: bytes) -> None:
    assert parse(body) == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 2**20,
        b'{"a":' * 2**18,
        b"[" + b"{}," * 2**18 + b"1]",
        b'"' + b'\\"' * 2**19,
        b'"' + b"\\u0041" * 2**17,
        b"\\" * 2**20,
        b'"\\' * 2**18,
    ],
)
def test_bombs_cost_no_more_than_their_length(body: bytes) -> None:
    """A search that restarts at every quote would take minutes for the fourth."""

    def expect_refusal(part: bytes) -> None:
        with pytest.raises(NotStrict):
            parse(part)

    expect_cost_in_proportion(lambda length: partial(expect_refusal, body[:length]), len(body))
