"""A bug reveals nothing to the client but the request's id, by which the log can be searched."""

import asyncio
import logging

import httpx2
import pytest
from fastapi import APIRouter

from baton.clock import SystemClock
from baton.config import GatewayConfig
from gateway.auth.authenticator import Authenticator
from gateway.http.app import make_app


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
