"""The descriptions of OpenAI's API, for programs and for people, are true."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from openai.types.chat import completion_create_params as openai_fields

from gateway.http.body import Body
from gateway.http.openai.answers import ChatCompletion, ChatCompletionChunk, CompletionChunk
from gateway.http.openai.chat_request import ChatCompletionRequest
from gateway.http.openai.completion_request import CompletionRequest
from gateway.http.openai.fields import StreamOptions
from gateway.http.openai.routes import answers_of

API = Path(__file__).parents[4] / "docs" / "api.md"


@pytest.mark.parametrize("body", [ChatCompletionRequest, CompletionRequest, StreamOptions])
def test_the_page_tells_of_every_field(body: type[Body]) -> None:
    page = API.read_text()
    assert [name for name in body.model_fields if f"`{name}`" not in page] == []


def test_the_page_tells_what_becomes_of_every_field_of_openais_chats() -> None:
    """The fields are those of the `openai` package, so that a new one is noticed. What the page calls refused
    is refused."""
    kinds = (
        openai_fields.CompletionCreateParamsBase,
        openai_fields.CompletionCreateParamsNonStreaming,
        openai_fields.CompletionCreateParamsStreaming,
    )
    known = {name for kind in kinds for name in kind.__annotations__}
    _, _, rest = API.read_text().partition("### Fields\n")
    table = re.findall(r"^\| (`.+?) \| (.+) \|$", rest.partition("\n### ")[0], re.MULTILINE)
    here = {name: text for names, text in table for name in re.findall(r"`(\w+)`", names)}
    assert known <= set(here)
    schemas = ChatCompletionRequest.model_json_schema()["properties"]
    refused = {name for name, schema in schemas.items() if schema.get("type") == "null"}
    assert {name for name in schemas if here[name].startswith("refused;")} == refused


@pytest.mark.parametrize("chunk", [ChatCompletionChunk, CompletionChunk])
def test_events_are_described_in_place(chunk: type) -> None:
    """A schema within a string cannot refer to what is outside of it."""
    app = FastAPI()

    @app.post("/x", response_model=ChatCompletion, responses=answers_of(chunk))
    async def route() -> None: ...

    answers: dict[str, Any] = app.openapi()["paths"]["/x"]["post"]["responses"]
    assert set(answers) == {"200", "4XX", "5XX"}
    content = answers["200"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatCompletion"}
    event = content["text/event-stream"]["itemSchema"]["properties"]["data"]
    assert "$ref" not in json.dumps(event)
    part, error, end = event["anyOf"]
    assert set(part["contentSchema"]["required"]) == {"id", "object", "created", "model", "choices"}
    assert error["contentSchema"]["required"] == ["error"]
    assert end["const"] == "[DONE]"
