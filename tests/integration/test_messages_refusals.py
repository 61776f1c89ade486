"""Messages that are refused or fail: each in Anthropic's terms, with its status, and an id to search for."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anthropic
import httpx2
import pytest
from anthropic.types.shared import ErrorResponse

from baton.request import ErrorKind
from gateway.preprocess import Preprocessor
from tests.factories.anthropic import anthropic_for, anthropic_with
from tests.factories.api_keys import ALICE, API_KEYS, BOB, WATCHER, entry
from tests.factories.gateway import (
    answering,
    failing,
    gateway_with,
)
from tests.factories.models import make_tokenizer

ANSWER = make_tokenizer().encode("The cache is the baton").ids
TURN: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
PATHS = ("/v1/messages", "/v1/messages/count_tokens")


def error_in(answer: httpx2.Response) -> tuple[int, str, str]:
    """Status, type and message; the shape is what the package expects."""
    body = answer.json()
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == body["request_id"]
    assert set(body) == {"type", "error", "request_id"}
    if body["error"]["type"] != "request_too_large":  # documented, and missing in the package
        ErrorResponse.model_validate(body)
    return answer.status_code, body["error"]["type"], body["error"]["message"]


def sent(body: bytes, kind: str = "application/json") -> dict[str, Any]:
    return {"content": body, "headers": {"content-type": kind}}


def blocks(number: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "x"}] * number


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": ({"temprature": 1}, "temprature: unknown field"),
    "a missing field": ({"max_tokens": None}, "max_tokens: "),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages.0.content.0.type: ",
    ),
    "a tool of Anthropic's": ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools.0.type: "),
    "a tool whose input is no object": (
        {"tools": [{"name": "a", "input_schema": {"type": "array"}}]},
        "tools.0.input_schema.type: ",
    ),
    "two tools of one name": ({"tools": [{"name": "a", "input_schema": {}}] * 2}, "tools.1.name: "),
    "a tool without a name": ({"tools": [{"input_schema": {}}]}, "tools.0.name: "),
    "a call in a user's turn": (
        {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
        "messages.0.content.0",
    ),
    "an unknown role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
    "no turn": ({"messages": []}, "messages: "),
    "thousands of blocks": (
        {"messages": [{"role": "user", "content": blocks(5_000)}]},
        "messages.0.content: must be a valid string or must have at most 4096 items",
    ),
    "thousands of turns": ({"messages": TURN["messages"] * 5_000}, "messages: must have at most 4096 items"),
    "thousands of tools": (
        {"tools": [{"name": f"t{number}", "input_schema": {}} for number in range(2_000)]},
        "tools: must have at most 1024 items",
    ),
    "a deep schema": ({"tools": [{"name": "a", "input_schema": nested(40)}]}, "body: "),
    "a prompt that does not fit": (
        {"messages": [{"role": "user", "content": "x " * 400}]},
        "messages: ",
    ),
    "a schema that is none": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "oops"}}}},
        "output_config.format: ",
    ),
    "a stop sequence too many": ({"stop_sequences": ["x"] * 65}, "stop_sequences: "),
    "a temperature below 0": ({"temperature": -1}, "temperature: "),
}


async def test_what_is_wrong_is_named(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test,
        under_test.http() as client,
    ):
        for name, (fields, message) in REFUSED.items():
            status, kind, said = error_in(await client.post(PATHS[0], json=TURN | fields))
            assert (status, kind) == (400, "invalid_request_error"), name
            assert said.startswith(message), (name, said)
        prompt = {"model": "other", "messages": TURN["messages"]}
        for path, body in zip(PATHS, (prompt | {"max_tokens": 9}, prompt), strict=True):
            status, kind, said = error_in(await client.post(path, json=body))
            assert (status, kind) == (404, "not_found_error")
            assert said == "model: 'other' is not served here; use 'tiny'"
        assert (await client.post(PATHS[0], json=TURN)).status_code == 200


async def test_calls_that_are_no_messages(folder: Path) -> None:
    cases: list[tuple[str, str, dict[str, Any], int, str]] = [
        ("POST", PATHS[0], sent(b"{"), 400, "invalid_request_error"),
        ("POST", PATHS[1], sent(b'{"model": NaN}'), 400, "invalid_request_error"),
        ("POST", PATHS[0], sent(b"{}", "text/plain"), 415, "invalid_request_error"),
        ("GET", PATHS[0], {}, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", {"json": {}}, 404, "not_found_error"),
        ("POST", PATHS[0], sent(b" " * 2**21), 413, "request_too_large"),
        ("POST", PATHS[0], {"headers": {"x-long": "x" * 33_000}}, 431, "request_too_large"),
        ("POST", PATHS[0], {"json": TURN, "headers": {"host": "elsewhere"}}, 403, "permission_error"),
    ]
    async with gateway_with(folder, {}, {}, max_message_mib=1) as under_test, under_test.http() as client:
        for method, path, options, status, kind in cases:
            answer = await client.request(method, path, **options)
            assert error_in(answer)[:2] == (status, kind), (method, path, status)
        other = await client.post("/v1/messages_of_others", json={})
        assert set(other.json()) == {"error"}, "only these paths have Anthropic's shape"
        assert "request-id" not in other.headers


async def test_keys_come_in_either_header_and_only_here(folder: Path) -> None:
    keys = (*API_KEYS, entry("slow", "baton-slow", requests_per_minute=1))
    async with (
        gateway_with(folder, {}, {"d0": answering(ANSWER)}, api_keys=keys) as under_test,
        under_test.http() as client,
    ):

        async def status(headers: dict[str, str], path: str = PATHS[0], body: Any = TURN) -> int:
            answer = await client.post(path, json=body, headers=headers)
            return answer.status_code if answer.status_code == 200 else error_in(answer)[0]

        bearer, other_bearer = {"authorization": f"Bearer {ALICE}"}, {"authorization": f"Bearer {BOB}"}
        alice = {"x-api-key": ALICE}
        assert [await status(headers) for headers in (bearer, alice, bearer | alice)] == [200] * 3
        assert [await status(headers) for headers in ({}, other_bearer | alice)] == [401, 401]
        assert await status({"x-api-key": "wrong"}) == 401
        assert await status({"x-api-key": WATCHER}) == 403
        refused = await client.post(PATHS[0], json=TURN)
        assert error_in(refused)[1] == "authentication_error"
        assert "x-api-key" in error_in(refused)[2]
        chat = {"model": "tiny", "messages": TURN["messages"]}
        elsewhere = await client.post("/v1/chat/completions", json=chat, headers=alice)
        assert elsewhere.status_code == 401, "proxies may use this header for keys of their own"
        assert await status({"x-api-key": "baton-slow"}) == 200
        limited = await client.post(PATHS[0], json=TURN, headers={"x-api-key": "baton-slow"})
        assert error_in(limited)[:2] == (429, "rate_limit_error")
        assert int(limited.headers["retry-after"]) >= 1


async def test_the_package_raises_what_it_raises_elsewhere(folder: Path) -> None:
    overloaded = failing(ErrorKind.OVERLOADED, "no room")
    async with anthropic_with(folder, overloaded, placement_timeout_s=0.2) as (_, client):
        for stream in (False, True):
            with pytest.raises(anthropic.InternalServerError) as caught:
                await client.messages.create(**TURN, stream=stream)
            assert (caught.value.status_code, caught.value.type) == (529, "overloaded_error")
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert caught.value.request_id
    async with anthropic_with(folder, failing(ErrorKind.INTERNAL, "x"), placement_timeout_s=0.2) as (
        _,
        client,
    ):
        with pytest.raises(anthropic.InternalServerError) as caught:
            await client.messages.create(**TURN)
        assert (caught.value.status_code, caught.value.type) == (503, "overloaded_error")
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**TURN | {"model": "other"})
        bug = patch.object(Preprocessor, "preprocess", side_effect=RuntimeError("at 10.0.0.7"))
        with bug, pytest.raises(anthropic.InternalServerError) as caught:
            await client.messages.create(**TURN)
        assert (caught.value.status_code, caught.value.type) == (500, "api_error")
        assert "10.0.0.7" not in str(caught.value)
    async with gateway_with(folder, {}, {}, api_keys=API_KEYS) as under_test:
        async with anthropic_for(under_test, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**TURN)
        async with anthropic_for(under_test, WATCHER) as client:
            with pytest.raises(anthropic.PermissionDeniedError):
                await client.messages.count_tokens(model="tiny", messages=TURN["messages"])


async def test_an_error_in_mid_stream_is_an_event_and_the_end(folder: Path) -> None:
    fails_late = failing(ErrorKind.INVALID_REQUEST, "structured_output: it cannot go on", after=ANSWER[:3])
    async with anthropic_with(folder, fails_late) as (under_test, client):
        with pytest.raises(anthropic.APIStatusError, match="it cannot go on") as caught:
            async for _ in await client.messages.create(**TURN, stream=True):
                pass
        assert caught.value.type == "invalid_request_error"
        async with under_test.http() as http:
            answer = await http.post(PATHS[0], json=TURN | {"stream": True})
        *_, last, rest = answer.text.split("\n\n")
        assert rest == ""
        name, data = last.split("\n")
        assert name == "event: error"
        error = json.loads(data.removeprefix("data: "))
        assert error["error"]["message"] == "output_config.format: it cannot go on", (
            "by the client's name for it"
        )
        assert error["request_id"] == answer.headers["request-id"]
