"""A bug reveals nothing to the client but the request's id, by which the log can be searched."""

import asyncio
import logging
from http import HTTPStatus

import httpx2
import pytest
from fastapi import APIRouter

from baton.clock import SystemClock
from baton.config import GatewayConfig
from gateway.auth.authenticator import Authenticator
from gateway.http.app import make_app
from gateway.http.error_shapes import MAX_MESSAGE_CHARACTERS, anthropic_error, openai_error


def test_a_bug_tells_the_client_nothing_and_the_log_everything(caplog: pytest.LogCaptureFixture) -> None:
    routes = APIRouter()

    @routes.get("/broken")
    async def broken() -> None:
        raise RuntimeError("at 10.0.0.7 in /home/somebody")

    async def run() -> httpx2.Response:
        app = make_app([routes], Authenticator(GatewayConfig(), SystemClock()), max_body_bytes=1000)
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get("/broken")

    with caplog.at_level(logging.ERROR):
        answer = asyncio.run(run())
    assert answer.status_code == 500
    assert "10.0.0.7" not in answer.text
    assert answer.json()["error"]["code"] == "internal_server_error"
    (record,) = [record for record in caplog.records if record.name == "gateway.http.errors"]
    assert answer.headers["x-request-id"] in record.getMessage()
    assert record.exc_info is not None


def test_client_text_in_errors_is_bounded() -> None:
    error = openai_error(400, "ä" * 10**6, "x" * 10**6)["error"]
    assert (len(error["message"]), len(error["param"])) == (MAX_MESSAGE_CHARACTERS,) * 2
    assert len(anthropic_error(400, "ä" * 10**6, "r")["error"]["message"]) == MAX_MESSAGE_CHARACTERS


def test_codes_do_not_depend_on_pythons_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HTTPStatus(413), "phrase", "Content Too Large")
    assert openai_error(413, "")["error"]["code"] == "request_entity_too_large"
