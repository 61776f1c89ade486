"""What /openapi.json says of messages: their bodies, streams, errors and headers."""

import json
from typing import Any

from fastapi import FastAPI

from gateway.http.anthropic.answers import Message
from gateway.http.anthropic.routes import HEADERS, MESSAGE_ANSWERS


def test_streams_and_errors_are_described() -> None:
    app = FastAPI()

    @app.post("/x", response_model=Message, responses=MESSAGE_ANSWERS, openapi_extra=HEADERS)
    async def route() -> None: ...

    described: dict[str, Any] = app.openapi()["paths"]["/x"]["post"]
    assert {header["name"] for header in described["parameters"]} == {
        "anthropic-version", "anthropic-beta", "x-api-key",
    }  # fmt: skip
    answers = described["responses"]
    assert set(answers) == {"200", "4XX", "5XX"}
    assert answers["200"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Message"}
    event = answers["200"]["content"]["text/event-stream"]["itemSchema"]["properties"]["data"]
    assert "$ref" not in json.dumps(event)
    kinds = {part["properties"]["type"]["const"] for part in event["contentSchema"]["anyOf"]}
    assert kinds == {
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop", "error",
    }  # fmt: skip
