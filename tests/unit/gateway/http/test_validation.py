"""Problems of a body are reported by field, in the terms of the body's author."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.http import tokenize
from gateway.http.anthropic.message_request import MessagesRequest
from gateway.http.body import Body, Only
from gateway.http.openai.chat_request import ChatCompletionRequest
from gateway.http.openai.completion_request import CompletionRequest
from gateway.http.responses.create_request import ResponseRequest
from gateway.http.responses.tools import HostedTool
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
    stored: Annotated[None, Only(False)] = None
    # a field of the same name as the type that pydantic names on the way to it
    nested: "Form | None" = None
    animal: Annotated[Cat | Dog | None, Field(discriminator="type")] = None


def problem(body: dict[str, Any], model: type[BaseModel] = Form) -> tuple[str, str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    findings: list[dict[str, Any]] = [
        {**finding, "loc": ("body", *finding["loc"])} for finding in caught.value.errors()
    ]
    return first_problem(findings, body)


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"number": "1"}, "number", "must be a valid integer, got '1'"),
        ({"number": True}, "number", "must be a valid integer, got true"),
        ({"stored": True}, "stored", "only false is supported, got true"),
        ({"stored": 0}, "stored", "only false is supported, got 0"),
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


UNKNOWN, MISSING = "unknown field; remove it", "required, but missing"


def of_user(*parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"model": "m", "max_tokens": 1, "messages": [{"role": role, "content": list(parts)}]}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}


PART = "messages.0.content.0"
SCHEMA = {"name": "a", "schema": {}}
NOT_A_NAME = "must match pattern '^[a-zA-Z0-9_.:/-]{1,128}$', got 'a b'"


@pytest.mark.parametrize(
    ("model", "body", "field", "words"),
    [
        (MessagesRequest, of_user({"type": "text", "text": "a", "foo": 1}), f"{PART}.foo", UNKNOWN),
        (
            MessagesRequest,
            of_user({"type": "text", "text": "a", "citations": [1]}),
            f"{PART}.citations",
            None,
        ),
        (
            MessagesRequest,
            of_user({"type": "text", "text": "a", "cache_control": {"type": "x"}}),
            f"{PART}.cache_control.type",
            "must be 'ephemeral', got 'x'",
        ),
        (MessagesRequest, of_user({"type": "text", "text": None}), f"{PART}.text", "must be a valid string"),
        (MessagesRequest, of_user({"type": "text"}), f"{PART}.text", MISSING),
        (
            MessagesRequest,
            of_user({"type": "thinking", "thinking": "x", "signature": 1}, role="assistant"),
            f"{PART}.signature",
            "must be a valid string, got 1",
        ),
        (
            ChatCompletionRequest,
            chat(response_format={"type": "json_schema", "foo": 2, "json_schema": SCHEMA}),
            "response_format.foo",
            UNKNOWN,
        ),
        (
            ChatCompletionRequest,
            chat(response_format={"type": "json_schema", "json_schema": SCHEMA | {"foo": 1}}),
            "response_format.json_schema.foo",
            UNKNOWN,
        ),
        (
            ChatCompletionRequest,
            chat(response_format={"type": "json_schema", "name": "b", "json_schema": SCHEMA}),
            "response_format.name",
            UNKNOWN,
        ),
        (
            ChatCompletionRequest,
            chat(tool_choice={"type": "function", "foo": 1, "function": {"name": "f"}}),
            "tool_choice.foo",
            UNKNOWN,
        ),
        (
            ChatCompletionRequest,
            chat(tool_choice={"type": "function", "function": {"name": "a b"}}),
            "tool_choice.function.name",
            NOT_A_NAME,
        ),
        (
            ChatCompletionRequest,
            chat(tools=[{"type": "function", "function": {"name": "a b"}}]),
            "tools.0.function.name",
            NOT_A_NAME,
        ),
        (
            ChatCompletionRequest,
            chat(tools=[{"type": "function", "function": {}}]),
            "tools.0.function.name",
            MISSING,
        ),
        (
            ChatCompletionRequest,
            of_user({"type": "text", "text": 5}),
            f"{PART}.text",
            "must be a valid string, got 5",
        ),
        (ChatCompletionRequest, of_user({"type": "text", "text": "a", "foo": 5}), f"{PART}.foo", UNKNOWN),
    ],
)
def test_a_type_that_is_also_the_name_of_a_field_is_not_taken_for_it(
    model: type[BaseModel], body: dict[str, Any], field: str, words: str | None
) -> None:
    found, described = problem(body, model)
    assert found == field
    assert words in (None, described)


@pytest.mark.parametrize(
    ("item", "field", "words"),
    [
        (None, "input.0", "must be a JSON object"),
        (5, "input.0", "must be a JSON object"),
        ({"type": 1}, "input.0.type", "must be a text, got 1"),
        ({"type": {}}, "input.0.type", "must be a text, got an object"),
        ({}, "input.0.type", MISSING),
        ({"type": "message", "role": "user"}, "input.0.content", MISSING),
    ],
)
def test_what_is_no_item_is_described(item: object, field: str, words: str) -> None:
    assert problem({"model": "m", "input": [item]}, ResponseRequest) == (field, words)


def test_an_unknown_type_of_item_is_the_problem_of_its_type() -> None:
    field, words = problem({"model": "m", "input": [{"type": "x", "id": "a"}]}, ResponseRequest)
    assert field == "input.0.type"
    assert words.endswith("got 'x'")


def test_the_pairs_of_an_object_are_counted() -> None:
    metadata = {str(number): "" for number in range(17)}
    assert problem({"model": "m", "input": "a", "metadata": metadata}, ResponseRequest) == (
        "metadata",
        "must have at most 16 items, got 17",
    )


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


def parts_of(body: type[BaseModel]) -> set[type[BaseModel]]:
    return {body}.union(*map(parts_of, body.__subclasses__()))


def test_no_part_of_any_body_admits_an_unknown_field_or_a_number_in_quotes() -> None:
    """Other servers run hosted tools, so their fields are ignored."""
    bodies = parts_of(Body)
    known = (
        ChatCompletionRequest,
        CompletionRequest,
        MessagesRequest,
        ResponseRequest,
        tokenize.TokenizeRequest,
    )
    assert bodies.issuperset(known)
    described = {body: body.model_json_schema().get("additionalProperties") for body in bodies}
    assert {body for body, additional in described.items() if additional is not False} == {HostedTool}
    assert all(body.model_config["strict"] for body in bodies)
