"""The description of the API says which calls need a key, so that Swagger UI can send one."""

from typing import Any

import httpx2
import pytest
from fastapi import APIRouter

from baton.clock import SystemClock
from baton.config import ApiKey, GatewayConfig
from gateway.auth.authenticator import Authenticator
from gateway.http.app import make_app
from gateway.http.authentication import SCHEME

KEY = ApiKey(name="a", sha256="0" * 64)


async def description_of(config: GatewayConfig) -> dict[str, Any]:
    routes = APIRouter()
    for path in ("/health", "/probe", "/v1/models"):
        routes.add_api_route(path, lambda: None)
    app = make_app([routes], Authenticator(config, SystemClock()), 1000, frozenset({"/probe"}))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://here") as client:
        described: dict[str, Any] = (await client.get("/openapi.json")).json()
    return described


@pytest.mark.parametrize(("allow_anonymous", "wanted"), [(False, [{SCHEME: []}]), (True, [{}, {SCHEME: []}])])
async def test_keys_are_described(allow_anonymous: bool, wanted: list[dict[str, Any]]) -> None:
    described = await description_of(GatewayConfig(api_keys=(KEY,), allow_anonymous=allow_anonymous))
    assert described["components"]["securitySchemes"][SCHEME] == {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key of this gateway",
    }
    security = {path: operations["get"]["security"] for path, operations in described["paths"].items()}
    assert security == {"/health": [], "/probe": [], "/v1/models": wanted}


async def test_without_keys_there_are_none_to_describe() -> None:
    described = await description_of(GatewayConfig())
    assert "securitySchemes" not in described["components"]
    assert "security" not in described["paths"]["/v1/models"]["get"]
