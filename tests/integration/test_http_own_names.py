"""Web pages in a browser on the gateway's machine: neither a page's own host name nor its requests give the page
access."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError

from baton.config import GatewayConfig
from tests.factories.api_keys import ALICE, API_KEYS
from tests.factories.gateway import GatewayUnderTest, gateway_with

PAGE = {"origin": "http://page.example", "access-control-request-method": "POST"}


async def asked(
    under_test: GatewayUnderTest,
    host: bytes,
    version: bytes = b"1.1",
    more: bytes = b"",
    target: bytes = b"/v1/models",
) -> bytes:
    """The raw answer to a request with this `host` header."""
    reader, writer = await asyncio.open_connection("127.0.0.1", under_test.gateway.http_port)
    writer.write(b"GET %s HTTP/%s\r\n%s%sconnection: close\r\n\r\n" % (target, version, host, more))
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer


OWN = [b"localhost", b"LocalHost:8000", b"127.0.0.1:1", b"[::1]", b"[::1]:8000"]
ALLOWED = [b"proxy.example:443", b"[fe80::1]"]
FOREIGN = [
    b"page.example",
    b"localhost.page.example",
    b"127.0.0.1.page.example:8000",
    b"[::1].page.example",
    b"page.example:@localhost",
    b"localhost:x",
    b"::1",
    b"",
]


async def test_only_names_of_its_own_reach_a_gateway_without_keys(folder: Path) -> None:
    config: dict[str, Any] = {"allowed_hosts": ("Proxy.example", "fe80::1")}
    async with gateway_with(folder, {}, {}, **config) as under_test:
        for host in [*OWN, *ALLOWED]:
            answer = await asked(under_test, b"host: %s\r\n" % host)
            assert answer.startswith(b"HTTP/1.1 200 "), host
        for host in FOREIGN:
            answer = await asked(under_test, b"host: %s\r\n" % host)
            assert answer.startswith(b"HTTP/1.1 403 "), host
            assert b"gateway.allowed_hosts" in answer
            assert b"x-request-id" in answer
        assert b" 200 OK" in await asked(under_test, b"", version=b"1.0"), (
            "a client without the header is no browser"
        )
    async with gateway_with(folder, {}, {}) as under_test:
        assert b" 403 " in await asked(under_test, b"host: proxy.example\r\n")


async def test_a_whole_url_as_target_is_its_path_and_its_host_is_the_one_that_counts(folder: Path) -> None:
    async with gateway_with(folder, {}, {}) as under_test:
        for host in (b"localhost", b"page.example"):
            answer = await asked(
                under_test, b"host: %s\r\n" % host, target=b"http://localhost:1/v1/models?a=b"
            )
            assert answer.startswith(b"HTTP/1.1 200 "), host
        for url in (b"http://page.example/v1/models", b"HTTPS://page.example", b"http:///v1/models"):
            answer = await asked(under_test, b"host: localhost\r\n", target=url)
            assert answer.startswith(b"HTTP/1.1 403 "), url
        page = await asked(under_test, b"host: localhost\r\n", target=b"http://localhost")
        assert page.startswith(b"HTTP/1.1 200 "), "a URL without a path is the path /"
    async with gateway_with(folder, {}, {}, api_keys=API_KEYS) as under_test:
        for path in (b"/v1/models", b"/metrics"):
            answer = await asked(under_test, b"host: a\r\n", target=b"http://localhost%s" % path)
            assert answer.startswith(b"HTTP/1.1 401 "), path


async def test_with_keys_any_name_will_do(folder: Path) -> None:
    async with gateway_with(folder, {}, {}, api_keys=API_KEYS) as under_test:
        key = b"authorization: Bearer %s\r\n" % ALICE.encode()
        assert b" 200 OK" in await asked(under_test, b"host: page.example\r\n", more=key)


@pytest.mark.parametrize(
    "config",
    [
        {"allowed_hosts": ("proxy.example:443",)},
        {"allowed_hosts": ("http://proxy.example",)},
        {"allowed_hosts": ("",)},
        {"allowed_hosts": ("proxy.example",), "api_keys": API_KEYS},
        {"allowed_hosts": ("proxy.example",), "host": "0.0.0.0", "allow_anonymous": True},
    ],
)
def test_names_that_could_not_count_are_an_error(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="allowed_hosts"):
        GatewayConfig(**config)


async def test_no_page_is_given_leave_to_ask_or_to_read(folder: Path) -> None:
    """Requests that a page may send without permission are refused, too."""

    async with (
        gateway_with(folder, {}, {}) as under_test,
        httpx2.AsyncClient(
            base_url=f"http://localhost:{under_test.gateway.http_port}", timeout=60.0
        ) as client,
    ):
        for path in ("/v1/chat/completions", "/v1/models", "/cluster/try", "/metrics", "/"):
            for method in ("OPTIONS", "GET"):
                answer = await client.request(method, path, headers=PAGE)
                assert method == "GET" or answer.status_code == 405
                assert not [name for name in answer.headers if name.startswith("access-control-")]
        for kind in ("text/plain", "application/x-www-form-urlencoded", None):
            headers = PAGE if kind is None else PAGE | {"content-type": kind}
            answer = await client.post("/tokenize", content=b'{"prompt": "hello"}', headers=headers)
            assert answer.status_code == 415, kind
