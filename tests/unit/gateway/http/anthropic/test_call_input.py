"""The input of a whole message's call: as it was written, at any depth. Of a cut call, the complete part."""

import json
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from gateway.http.anthropic.call_input import input_pieces
from tests.factories.costs import thread_s

DEEPER_THAN_PYDANTIC = 300
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def input_of(arguments: str) -> str:
    return "".join(input_pieces(arguments))


@pytest.mark.parametrize("depth", [DEEPER_THAN_PYDANTIC, 100_000])
@pytest.mark.parametrize(("opening", "inner", "closing"), [("[", "1", "]"), ('{"b": ', '"ü"', "}")])
def test_deep_arguments_are_the_input(opening: str, inner: str, closing: str, depth: int) -> None:
    whole = f'{{"a": {opening * depth}{inner}{closing * depth}, "c": 1e400}}'
    assert input_of(whole) == whole
    assert input_of(whole[:-1]) == whole
    assert (
        input_of(f'{{"a": {opening * depth}{inner}') == f'{{"a": {opening * depth}{inner}{closing * depth}}}'
    )


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("", "{}"),
        (' {"a": 1}\n', ' {"a": 1}'),
        ('{"a": 1, "b": {"c": [true, {"d": "x', '{"a": 1, "b": {"c": [true, {}]}}'),
        ('{"a": 1e400, "b": "\\ud83d\\ude00", "c": nul', '{"a": 1e400, "b": "\\ud83d\\ude00"}'),
        ('{"a": "\\ud800x", "b": 2}', '{"a": "\\ud800x", "b": 2}'),
        ('{"a": 12', '{"a": 12}'),
        ('{"a": 12.', "{}"),
        ('{"a": 1, "b"', '{"a": 1}'),
        ('{"a": [1,', '{"a": [1]}'),
    ],
)
def test_what_is_complete_is_as_it_was_written(arguments: str, written: str) -> None:
    assert input_of(arguments) == written


@pytest.mark.parametrize(
    "arguments",
    ["[1]", "1", '"{}"', "{a: 1}", "{,}", '{"a": NaN}', '{"a": 01}', '{"a": "\\x"}', '{"a": "\n"}',
     '{"a": ]}', '{"a" 1}', '{1: 2}', "}", '{"a":,}', '{"a"}'],
)  # fmt: skip
def test_what_is_no_json_is_left_out(arguments: str) -> None:
    assert input_of(arguments) == "{}"


@pytest.mark.parametrize(
    ("arguments", "written"),
    [('{"a": [1,]}', '{"a": [1]}'), ('{"a": [1}', '{"a": [1]}'), ('{"a": 1,}', '{"a": 1}'), ('{"a": 1 2}', '{"a": 1}'),
     ('{"a": 1} {', '{"a": 1}'), ('{"a": 1]', '{"a": 1}')],
)  # fmt: skip
def test_of_what_is_no_json_the_part_before_stays(arguments: str, written: str) -> None:
    """Such arguments come only from a model that no grammar guides."""
    assert input_of(arguments) == written


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.booleans(), st.data())
def test_a_cut_input_is_what_clients_of_a_stream_read(
    value: dict[str, Any], is_ascii: bool, data: st.DataObject
) -> None:
    """Clients use the partial mode of the same reader."""
    whole = json.dumps(value, ensure_ascii=is_ascii)
    assert input_of(whole) == whole
    cut = whole[: data.draw(st.integers(1, len(whole)))]
    assert json.loads(input_of(cut)) == from_json(cut, allow_partial=True)


def test_a_long_input_is_read_in_turns() -> None:
    arguments = json.dumps({"a": [*range(100_000)], "b": "\n" * 100_000})
    turns, pieces = input_pieces(arguments), list[str]()
    seconds = list[float]()
    while len(pieces) == len(seconds):
        seconds.append(thread_s(lambda: pieces.extend(islice(turns, 1))))
    assert "".join(pieces) == arguments
    assert max(seconds) < sum(seconds) / 10
