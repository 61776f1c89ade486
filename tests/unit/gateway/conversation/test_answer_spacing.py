"""The spaces and line ends that answers in JSON may have."""

import json

import pytest

from baton.sampling import MAX_GRAMMAR_CHARACTERS, GrammarKind, StructuredOutput
from gateway.conversation import with_limited_spaces
from gateway.conversation.lark import Lark, Vocabulary
from gateway.conversation.turn_grammar import response_format_expression
from tests.factories.guided import GUIDES

VALUE = {"name": "Ada", "years": [1815, 1852], "works": {"notes": ["A", {"to": "G"}], "none": {}}}


def accepts(schema: str, answer: str) -> bool:
    limited = with_limited_spaces(StructuredOutput(GrammarKind.JSON_SCHEMA, schema))
    lark = Lark(Vocabulary())
    lark.rule("start", response_format_expression(lark, limited))
    return GUIDES["markers are text"].accepts(StructuredOutput(GrammarKind.LARK, lark.source()), answer)


@pytest.mark.parametrize("schema", ["{}", " { } \n", '{"type": "object"}\n'])
@pytest.mark.parametrize("indent", [None, 0, 1, 2, 4, 8, "\t", " " * 32])
def test_json_may_be_written_in_lines_and_indented(schema: str, indent: int | str | None) -> None:
    written = json.dumps(VALUE, indent=indent)
    assert accepts(schema, json.dumps(VALUE, separators=(",", ":")))
    for line_end in ("\n", "\r\n", " \n\n"):
        assert accepts(schema, written.replace("\n", line_end))


@pytest.mark.parametrize("space", [" ", "\n", "\t", "\n ", "\r\n"])
def test_spaces_and_line_ends_come_to_an_end(space: str) -> None:
    for before, after in (
        ("{", '"a": 1}'),
        ('{"a"', ": 1}"),
        ('{"a":', "1}"),
        ('{"a": [1', ",2]}"),
        ('{"a": 1', "}"),
    ):
        assert accepts("{}", before + after)
        assert not accepts("{}", before + space * 129 + after)


def test_the_limit_is_as_documented() -> None:
    for allowed in (" " * 128, " " * 8 + "\n\r\n" + "\t" * 128):
        assert accepts("{}", f'{{{allowed}"a": 1}}')
    for refused in (" " * 129, " " * 9 + "\n", "\n\n\n", "\n \n", "\n" + " " * 129):
        assert not accepts("{}", f'{{{refused}"a": 1}}')


@pytest.mark.parametrize(
    "source",
    [
        "[]",
        '{"type":',
        '{"type": "object"',
        '{"type": "object"}\u00a0',
        '{"type": "object"}\f',
        '{"a": {"b": 1}',
        '{"enum": ["' + "x" * (MAX_GRAMMAR_CHARACTERS - 40) + '"]}',
    ],
)
def test_a_text_that_is_no_schema_or_would_be_too_long_stays(source: str) -> None:
    answer = StructuredOutput(GrammarKind.JSON_SCHEMA, source)
    assert with_limited_spaces(answer) == answer
    regex = StructuredOutput(GrammarKind.REGEX, "a{2}")
    assert with_limited_spaces(regex) == regex
