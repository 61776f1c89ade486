"""Every integer of a body may be written with a zero as its fraction, as languages with one type of number do."""

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.http.anthropic.message_request import MessagesRequest
from gateway.http.body import Body
from gateway.http.openai.chat_request import ChatCompletionRequest
from gateway.http.openai.completion_request import CompletionRequest
from gateway.http.responses.create_request import LOGPROBS, ResponseRequest

MESSAGES = [{"role": "user", "content": "a"}]
BODIES: dict[type[Body], dict[str, Any]] = {
    ChatCompletionRequest: {"model": "m", "messages": MESSAGES, "logprobs": True},
    CompletionRequest: {"model": "m", "prompt": "a"},
    ResponseRequest: {"model": "m", "input": "a", "include": [LOGPROBS]},
    MessagesRequest: {"model": "m", "messages": MESSAGES, "max_tokens": 9},
}
INTEGERS = [
    (body, name)
    for body in BODIES
    for name, schema in body.model_json_schema()["properties"].items()
    if "integer" in (each.get("type") for each in schema.get("anyOf", [schema]))
]


@pytest.mark.parametrize(("body", "name"), INTEGERS)
def test_a_fraction_of_zero_is_none(body: type[Body], name: str) -> None:
    value = getattr(body.model_validate(BODIES[body] | {name: 1.0}), name)
    assert value == 1
    assert type(value) is int


@pytest.mark.parametrize(("body", "name"), INTEGERS)
@pytest.mark.parametrize("value", [1.5, "1", True, 2.0**64])
def test_anything_else_is_no_integer(body: type[Body], name: str, value: object) -> None:
    with pytest.raises(ValidationError, match="valid integer"):
        body.model_validate(BODIES[body] | {name: value})


def test_the_tests_know_the_fields() -> None:
    names = {name for _, name in INTEGERS}
    assert {"max_tokens", "max_output_tokens", "n", "seed", "top_k", "top_logprobs", "priority"} <= names
