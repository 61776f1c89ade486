"""The configurations of docs/proxies.md, run by real proxies before two gateways."""

import asyncio
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from baton.config import GatewayConfig
from baton.request import EngineRequest
from gateway import GatewayClient
from gateway.grpc.server import CONNECTION_IDLE_S
from gateway.http.authentication import OPEN
from gateway.http.protocol import KEEP_ALIVE_S, STRANGER_KEEP_ALIVE_S
from tests.factories.api_keys import ALICE, API_KEYS, AS_ADMIN
from tests.factories.certificates import CertificateFiles, make_certificates
from tests.factories.gateway import (
    GatewayUnderTest,
    Script,
    ScriptedWorker,
    answering,
    gateway_with,
    outputs_of,
    silent,
    tokens_of,
)
from tests.test_architecture import ROOT

PAGE = (ROOT / "docs" / "proxies.md").read_text()
SNIPPETS = dict(re.findall(r"```(nginx|haproxy)\n(.*?)```", PAGE, re.DOTALL))
COMPLETION = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}


def test_the_configurations_fit_the_gateways_limits() -> None:
    defaults = GatewayConfig()
    for text in SNIPPETS.values():
        assert set(re.findall(r"10\.0\.0\.\d:(\d+)", text)) == {
            str(defaults.http_port),
            str(defaults.grpc_port),
        }
    assert set(re.findall(r"GET (/\w+)", SNIPPETS["haproxy"])) <= OPEN
    http, grpc = map(int, re.findall(r"keepalive_timeout (\d+)s", SNIPPETS["nginx"]))
    assert http < STRANGER_KEEP_ALIVE_S < KEEP_ALIVE_S
    assert grpc < CONNECTION_IDLE_S
    assert f"client_max_body_size {defaults.max_message_mib}m;" in SNIPPETS["nginx"]


@dataclass(frozen=True, slots=True)
class Proxied:
    """Two gateways behind a proxy, which accepts HTTP and gRPC, with TLS, at one port."""

    gateways: list[GatewayUnderTest]
    port: int
    files: CertificateFiles

    def http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=f"https://127.0.0.1:{self.port}",
            headers={"authorization": f"Bearer {ALICE}"},
            verify=self.files.trusting(),
            timeout=60.0,
        )

    def grpc(self) -> GatewayClient:
        return GatewayClient(f"127.0.0.1:{self.port}", credentials=self.files.credentials(ALICE))

    async def next_request(self) -> tuple[ScriptedWorker, EngineRequest]:
        """The next request, and the worker that got it."""
        workers = [each.workers["d0"] for each in self.gateways]
        await self.gateways[0].until(lambda: any(not worker.received.empty() for worker in workers))
        worker = next(worker for worker in workers if not worker.received.empty())
        return worker, await worker.next_request()


def nginx(config: str, folder: Path, port: int) -> list[str]:
    for name in ("pem", "key"):
        config = config.replace(f"/etc/nginx/baton.{name}", f"{folder}/gateway.{name}")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    config = config.replace("listen 443", f"listen 127.0.0.1:{port}")
    (folder / "nginx.conf").write_text(
        f"user root;\ndaemon off;\npid {folder}/pid;\nerror_log stderr error;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{folders}{config}}}\n"
    )
    return ["nginx", "-e", "stderr", "-c", f"{folder}/nginx.conf"]


def haproxy(config: str, folder: Path, port: int) -> list[str]:
    both = (folder / "gateway.pem").read_text() + (folder / "gateway.key").read_text()
    (folder / "both.pem").write_text(both)
    config = config.replace("/etc/haproxy/baton.pem", f"{folder}/both.pem")
    (folder / "haproxy.cfg").write_text(config.replace("bind :443", f"bind 127.0.0.1:{port}"))
    return ["haproxy", "-db", "-f", f"{folder}/haproxy.cfg"]


PROXIES: dict[str, Callable[[str, Path, int], list[str]]] = {"nginx": nginx, "haproxy": haproxy}


@pytest.fixture(params=PROXIES)
def proxy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"needs {name}: apt install {name}")
    return name


@asynccontextmanager
async def proxied(name: str, folder: Path, tmp_path: Path, script: Script) -> AsyncIterator[Proxied]:
    """`script`: the script of the workers, of which each gateway has one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = make_certificates(tmp_path)
    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(
                gateway_with(folder, {}, {"d0": script}, api_keys=API_KEYS, credentials=AS_ADMIN)
            )
            for _ in range(2)
        ]
        config = SNIPPETS[name]
        for number, under_test in enumerate(gateways, 1):
            address, gateway = f"10.0.0.{number}", under_test.gateway
            config = config.replace(f"{address}:8000", f"127.0.0.1:{gateway.http_port}")
            config = re.sub(
                rf"{address}:50051(.*) port 8000", rf"{address}:50051\1 port {gateway.http_port}", config
            )
            config = config.replace(f"{address}:50051", f"127.0.0.1:{gateway.grpc_port}")
        process = await asyncio.to_thread(subprocess.Popen, PROXIES[name](config, tmp_path, port))
        stack.callback(process.wait)
        stack.callback(process.terminate)
        async with asyncio.timeout(60):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    assert process.poll() is None, f"{name} ended at once"
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    break
        yield Proxied(gateways, port, files)


async def test_a_proxy_passes_on_each_event_at_once_and_the_end_of_a_client(
    proxy: str, folder: Path, tmp_path: Path
) -> None:
    async with proxied(proxy, folder, tmp_path, silent) as under_test, under_test.http() as client:
        question = client.build_request("POST", "/v1/completions", json=COMPLETION | {"stream": True})
        sending = asyncio.create_task(client.send(question, stream=True))
        worker, request = await under_test.next_request()
        worker.say(request, outputs_of(request, [7], finish=None))
        answer = await sending
        assert "data: " in await anext(answer.aiter_text()), "the worker has not said the rest"
        await answer.aclose()
        assert await worker.next_abort() == request.request_id
        waiting = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        worker, request = await under_test.next_request()
        waiting.cancel()
        assert await worker.next_abort() == request.request_id
        async with under_test.grpc() as grpc_client:
            has_begun = asyncio.Event()

            async def read() -> None:
                async for _ in grpc_client.generate(token_ids=[5, 6]):
                    has_begun.set()

            reading = asyncio.create_task(read())
            worker, request = await under_test.next_request()
            worker.say(request, outputs_of(request, [7], finish=None))
            await has_begun.wait()
            reading.cancel()
            assert await worker.next_abort() == request.request_id


async def test_requests_go_on_when_one_gateway_stops(proxy: str, folder: Path, tmp_path: Path) -> None:
    script = answering([7, 8])
    async with proxied(proxy, folder, tmp_path, script) as under_test, under_test.http() as client:
        for is_first_there in (True, False):
            for _ in range(4):
                answer = await client.post("/v1/completions", json=COMPLETION)
                assert answer.status_code == 200, answer.text
            async with under_test.grpc() as grpc_client:
                for _ in range(4):
                    events = [event async for event in grpc_client.generate(token_ids=[5, 6])]
                    assert tokens_of(events) == [7, 8]
            if is_first_there:
                await under_test.gateways[0].gateway.stop(grace_s=0.0)
