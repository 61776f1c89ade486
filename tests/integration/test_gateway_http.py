"""The HTTP frontend over a real socket: probes, and errors in the shape that OpenAI's clients expect."""

import re
import socket
from pathlib import Path

import httpx2
import pytest

from baton.errors import ConfigError
from tests.factories.gateway import gateway_with, silent


async def get(port: int | None, path: str, method: str = "GET") -> httpx2.Response:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        return await client.request(method, path)


async def test_probes_tell_a_gateway_that_runs_from_one_that_can_serve(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": silent}) as under_test:
        gateway = under_test.gateway
        assert (await get(gateway.http_port, "/health")).status_code == 200
        assert (await get(gateway.http_port, "/ready")).json() == {"status": "ready"}
        assert "\nbaton_gateway_ready 1.0\n" in (await get(gateway.http_port, "/metrics")).text
        (model,) = (await get(gateway.http_port, "/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 256)
        assert model["root"] == str(folder), "vLLM's benchmark takes its tokenizer from here"
        gateway.workers.worker_died("w0", "of the test")
        ready = await get(gateway.http_port, "/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "no decode worker is reachable")
        assert "\nbaton_gateway_ready 0.0\n" in (await get(gateway.http_port, "/metrics")).text
        assert (await get(gateway.http_port, "/health")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [("GET", "/v1/nothing", 404, "not_found_error"), ("DELETE", "/v1/models", 405, "invalid_request_error")],
)
async def test_errors_have_the_shape_of_openais(
    folder: Path, method: str, path: str, status: int, kind: str
) -> None:
    async with gateway_with(folder, {}, {}) as under_test:
        answer = await get(under_test.gateway.http_port, path, method)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == kind
    assert path in error["message"]


async def test_paths_are_not_redirected(folder: Path) -> None:
    """Behind a proxy that ends TLS, a redirect would name the wrong scheme. Probes may leave bodies out."""

    async with (
        gateway_with(folder, {}, {"w0": silent}) as under_test,
        under_test.http() as client,
    ):
        for method, path in (("GET", "/health/"), ("POST", "/v1/chat/completions/")):
            answer = await client.request(method, path)
            assert answer.status_code == 404, path
            assert f"{method} {path}: " in answer.json()["error"]["message"]
        for path in ("/health", "/ready", "/version", "/v1/models", "/metrics", "/metrics/targets"):
            answer = await client.head(path)
            assert (answer.status_code, answer.content) == (200, b""), path
        answer = await client.get("/" + "x" * 9000)
        assert len(answer.text) < 1000


async def test_a_port_that_is_taken_is_an_error_that_names_it(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"gateway.http_port: cannot listen on 127.0.0.1:{port}"):
            async with gateway_with(folder, {}, {}, http_port=port):
                raise AssertionError("it started")


async def test_the_description_is_drawn_from_files_of_the_gateways_own(folder: Path) -> None:
    async with gateway_with(folder, {}, {}) as under_test:
        port = under_test.gateway.http_port
        page = await get(port, "/docs")
        assert page.status_code == 200
        assert page.headers["cache-control"] == "no-cache"
        loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(loaded) == 4
        for path in loaded:
            assert not path.startswith("/"), "a reverse proxy may put a prefix before all paths"
            assert (await get(port, f"/{path}")).status_code == 200, path
        assert '"openapi.json"' in (await get(port, "/docs/start.js")).text
        head = await get(port, "/docs", method="HEAD")
        assert (head.status_code, head.text) == (200, "")
        assert head.headers["content-security-policy"] == page.headers["content-security-policy"]
