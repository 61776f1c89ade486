"""Problems of a body are reported by field, in the terms of the body's author."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.http.validation import MAX_VALUE_CHARACTERS, first_problem


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    kind: Literal["text"]
    text: str


class Cat(BaseModel):
    type: Literal["cat"]


class Dog(BaseModel):
    type: Literal["dog"]


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    number: int = 0
    content: str | list[Part] = ""
    form: Annotated[str | None, Field(max_length=3)] = None
    stored: Literal[False] | None = None
    # a field of the same name as the type that pydantic names on the way to it
    nested: "Form | None" = None
    animal: Annotated[Cat | Dog | None, Field(discriminator="type")] = None


def problem(body: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(ValidationError) as caught:
        Form.model_validate(body)
    findings: list[dict[str, Any]] = [
        {**finding, "loc": ("body", *finding["loc"])} for finding in caught.value.errors()
    ]
    return first_problem(findings, body)


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"number": "1"}, "number", "must be a valid integer, got '1'"),
        ({"number": True}, "number", "must be a valid integer, got true"),
        ({"stored": True}, "stored", "must be false, got true"),
        ({"nmber": 1}, "nmber", "unknown field; remove it"),
        ({"content": 1}, "content", "must be a valid string or must be a valid list, got 1"),
        ({"content": [{"kind": "text"}]}, "content.0.text", "required, but missing"),
        ({"content": [{"kind": "image", "text": ""}]}, "content.0.kind", "must be 'text', got 'image'"),
        ({"nested": {"nested": {"number": None}}}, "nested.nested.number", "must be a valid integer"),
        ({"animal": {"type": "cow"}}, "animal.type", "must be one of 'cat', 'dog', got 'cow'"),
        ({"form": "x" * 9}, "form", "must have at most 3 characters, got 'xxxxxxxxx'"),
    ],
)
def test_the_field_that_is_to_blame_is_named(body: dict[str, Any], field: str, words: str) -> None:
    assert problem(body) == (field, words)


def test_a_long_value_is_repeated_shortened() -> None:
    _, words = problem({"number": "x" * 10_000})
    assert len(words) < 200


def test_long_keys_and_tags_are_repeated_shortened() -> None:
    shown = "x" * MAX_VALUE_CHARACTERS + "..."
    long = "x" * 1_000_000
    assert problem({long: 1, f"{long}y": 2}) == (shown, "unknown field; remove it")
    assert problem({"nested": {long: 1}}) == (f"nested.{shown}", "unknown field; remove it")
    assert problem({"animal": {"type": long}}) == (
        "animal.type",
        f"must be one of 'cat', 'dog', got '{shown}'",
    )


def test_a_header_is_named_alone() -> None:
    finding = {
        "type": "int_parsing",
        "loc": ("header", "x-name"),
        "msg": "Input should be a number",
        "input": "a",
    }
    assert first_problem([finding], None) == ("x-name", "must be a number, got 'a'")


def test_a_body_that_is_no_json() -> None:
    finding = {
        "type": "json_invalid",
        "loc": ("body", 7),
        "msg": "",
        "input": {},
        "ctx": {"error": "Expecting ','"},
    }
    assert first_problem([finding], "{") == ("body", "invalid JSON: Expecting ','")
