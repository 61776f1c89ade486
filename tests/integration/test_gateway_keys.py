"""Both frontends with API keys, over real sockets: which callers are admitted, and what they may see."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.request import ErrorKind
from baton.system import watched
from baton.v1 import cluster_service_pb2, generation_service_pb2
from baton.worker import WorkerRole
from gateway import GatewayClient, GatewayError
from gateway.auth.credentials import Credentials
from gateway.auth.key_store import hash_of
from gateway.grpc.generated import vllm_engine_pb2
from tests.factories.api_keys import ADMIN, ALICE, API_KEYS, AS_ADMIN, BOB, WATCHER, entry
from tests.factories.fleet_control import FakeFleetControl, fleet_of, replica
from tests.factories.gateway import GatewayUnderTest, answering, failing, gateway_with, silent


@asynccontextmanager
async def client_with(under_test: GatewayUnderTest, key: str | None) -> AsyncIterator[GatewayClient]:
    credentials = Credentials(api_key=key)
    target = under_test.grpc_target
    async with GatewayClient(target, credentials=credentials) as client:
        yield client


async def code_of(call: Coroutine[Any, Any, object]) -> str:
    with pytest.raises(GatewayError) as caught:
        await call
    for secret in (ALICE, BOB, ADMIN, "baton-wrong"):
        assert secret not in str(caught.value)
    return caught.value.code


async def tokens_of(client: GatewayClient, **request: Any) -> list[int]:
    return [
        token_id
        async for event in client.generate(token_ids=[5, 6], sampling={"max_tokens": 2}, **request)
        for token_id in event.token_ids
    ]


async def test_grpc_asks_for_a_key_and_each_key_opens_what_it_may(folder: Path) -> None:
    control = FakeFleetControl(fleet_of(replica("w0")))
    async with gateway_with(
        folder,
        {},
        {"w0": answering([7, 8])},
        api_keys=API_KEYS,
        credentials=AS_ADMIN,
        control=control,
    ) as under_test:
        for key in (None, "baton-wrong"):
            async with client_with(under_test, key) as client:
                for call in (
                    tokens_of(client),
                    client.model_info(),
                    client.describe(),
                    client.abort("a"),
                ):
                    assert await code_of(call) == "UNAUTHENTICATED"
        async with client_with(under_test, ALICE) as client:
            assert await tokens_of(client) == [7, 8]
            for command in (
                client.describe(),
                client.drain("w0"),
                client.set_role("w0", WorkerRole.PREFILL),
                _all(client.rollout()),
                client.flush_cache(),
            ):
                assert await code_of(command) == "PERMISSION_DENIED"
        async with client_with(under_test, WATCHER) as client:
            assert (await client.describe())["model"] == "tiny"
            assert (await anext(client.watch()))["model"] == "tiny"
            assert await code_of(tokens_of(client)) == "PERMISSION_DENIED"
            assert await code_of(client.drain("w0")) == "PERMISSION_DENIED"
            assert await code_of(client.flush_cache()) == "PERMISSION_DENIED"
        assert control.commands == []
        await under_test.client.drain("w0")
        assert control.commands == [("drain", "w0")]


async def _all(steps: AsyncIterator[object]) -> list[object]:
    return [step async for step in steps]


async def test_without_the_right_to_administer_a_caller_sees_no_addresses_and_no_paths(folder: Path) -> None:
    replicas = (replica("w0", node="10.0.0.7", num_starts=2, last_failure="/secret/path: gone"),)
    control = FakeFleetControl(fleet_of(*replicas))
    async with gateway_with(
        folder, {}, {"w0": silent}, api_keys=API_KEYS, credentials=AS_ADMIN, control=control
    ) as under_test:
        watched = await anext(under_test.client.watch())
        async with client_with(under_test, WATCHER) as client:
            seen = await client.describe()
            assert await anext(client.watch()) == seen, (
                "watches of both share a description, but not what is inside"
            )
        assert seen["workers"][0]["slot"]["starts"] == 2
        assert (seen["model_path"], seen["nodes"], seen["workers"][0]["pid"]) == ("", [], 0)
        for inside in (str(folder), "10.0.0.7", "/secret", "here"):
            assert inside not in str(seen)
        assert seen["workers"][0]["cpus"] == []
        whole = await under_test.client.describe()
        assert watched == whole
        assert (whole["model_path"], whole["workers"][0]["pid"]) == (str(folder), 1)
        assert whole["workers"][0]["slot"]["last_failure"] == "/secret/path: gone"
        async with client_with(under_test, ALICE) as client:
            assert (await client.model_info())["model_path"] == ""
        for secret, root in ((ALICE, "tiny"), (ADMIN, str(folder))):
            assert f'"root":"{root}"' in await raw_get(under_test, "/v1/models", secret)


async def test_callers_cannot_end_or_even_meet_each_others_requests(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {"w0": silent}, api_keys=API_KEYS, credentials=AS_ADMIN) as under_test,
        client_with(under_test, ALICE) as alice,
        client_with(under_test, BOB) as bob,
    ):
        hers = asyncio.create_task(tokens_of(alice, request_id="mine"))
        await under_test.workers["w0"].next_request()
        assert await bob.abort("mine") == 0
        his = asyncio.create_task(tokens_of(bob, request_id="mine"))
        await under_test.workers["w0"].next_request()
        assert await alice.abort("mine") == 1
        assert await code_of(hers) == "ABORTED"  # type: ignore[arg-type]
        assert not his.done()
        assert await bob.abort("mine") == 1
        assert await code_of(his) == "ABORTED"  # type: ignore[arg-type]


async def test_health_needs_no_key_and_reflection_does(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {}, api_keys=API_KEYS, credentials=AS_ADMIN) as under_test,
        grpc.aio.insecure_channel(under_test.grpc_target) as channel,
    ):
        check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert check.status == health_pb2.HealthCheckResponse.SERVING
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflect(iter([asked])).read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        answer = await reflect(iter([asked]), metadata=(("authorization", f"Bearer {BOB}"),)).read()
        assert answer.list_services_response.service


WHO_SEES_WHAT = (
    ("/health", None, 200),
    ("/ready", None, 503),
    ("/version", None, 200),
    ("/openapi.json", None, 200),
    ("/v1/models", None, 401),
    ("/v1/models", "baton-wrong", 401),
    ("/v1/models", ALICE, 200),
    ("/v1/models", WATCHER, 200),
    ("/v1/chat/completions", None, 401),
    ("/v1/chat/completions", WATCHER, 403),
    ("/metrics", None, 401),
    ("/metrics", ALICE, 403),
    ("/", None, 200),
    ("/page/page.js", None, 200),
    ("/page/../cluster", None, 404),
    ("/cluster", WATCHER, 200),
    ("/cluster/try", WATCHER, 403),
    ("/cluster/anything", ALICE, 403),
    ("/cluster/anything", None, 401),
    ("/no/such/path", None, 401),
    ("/no/such/path", ALICE, 404),
    ("/health/../v1/models", None, 401),
    ("//v1/models", None, 401),
    ("/docs/../metrics", None, 404),
)


async def test_http_asks_for_a_key_where_there_is_something_to_have(folder: Path) -> None:
    async with gateway_with(folder, {}, {}, api_keys=API_KEYS, credentials=AS_ADMIN) as under_test:
        for path, key, status in WHO_SEES_WHAT:
            answer = await raw_get(under_test, path, key)
            assert answer.startswith(f"HTTP/1.1 {status} "), (path, key)
            if status == 401:
                assert "www-authenticate: Bearer\r\n" in answer
                assert '"code":"invalid_api_key"' in answer
            assert "baton-wrong" not in answer


async def test_without_its_key_file_a_gateway_admits_nobody_and_blames_no_key(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant in ("_LOOK_INTERVAL_S", "LOST_GRACE_S"):
        monkeypatch.setattr(watched, constant, 0.0)
    file = tmp_path / "keys.yaml"
    file.write_text(f"- name: alice\n  sha256: {hash_of(ALICE)}\n")
    async with (
        gateway_with(
            folder, {}, {}, api_keys=API_KEYS[3:], api_keys_file=str(file), credentials=AS_ADMIN
        ) as under_test,
        client_with(under_test, ALICE) as alice,
    ):
        for mode, http, grpc_code in ((0o600, 200, None), (0o620, 503, "UNAVAILABLE"), (0o640, 200, None)):
            file.chmod(mode)
            assert (await raw_get(under_test, "/v1/models", ALICE)).startswith(f"HTTP/1.1 {http} ")
            assert (await raw_get(under_test, "/v1/models", ADMIN)).startswith("HTTP/1.1 200 ")
            if grpc_code is None:
                assert (await alice.model_info())["model"] == "tiny"
            else:
                assert await code_of(alice.model_info()) == grpc_code


async def raw_get(under_test: GatewayUnderTest, path: str, key: str | None) -> str:
    """Requests the path unchanged: client libraries would normalize it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", under_test.gateway.http_port)
    shown = "" if key is None else f"Authorization: Bearer {key}\r\n"
    writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\n{shown}Connection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.decode()


async def test_only_listed_calls_are_open(folder: Path) -> None:
    """This holds for all calls that the API describes, and for every gRPC method that reflection could name."""

    async with (
        gateway_with(folder, {}, {}, api_keys=API_KEYS, credentials=AS_ADMIN) as under_test,
        under_test.http() as http,
        grpc.aio.insecure_channel(under_test.grpc_target) as channel,
    ):
        description = (await http.get("/openapi.json")).json()
        calls = [(method, path) for path, methods in description["paths"].items() for method in methods]
        statuses = {(m, p): (await http.request(m.upper(), p)).status_code for m, p in calls}
        is_open = {path for (_, path), status in statuses.items() if status != 401}
        assert is_open == {"/health", "/ready", "/version"}
        assert len(statuses) > len(is_open)
        for service in (generation_service_pb2, cluster_service_pb2, vllm_engine_pb2):
            for described in service.DESCRIPTOR.services_by_name.values():
                for method in described.methods:
                    call: Any = channel.unary_stream(f"/{described.full_name}/{method.name}")
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call(b"").read()
                    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, method.full_name


async def test_metrics_may_be_for_everybody(folder: Path) -> None:
    async with (
        gateway_with(
            folder, {}, {}, api_keys=API_KEYS, credentials=AS_ADMIN, metrics_need_key=False
        ) as under_test,
        under_test.http() as client,
    ):
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/metrics/targets")).status_code == 401, "these are addresses"


async def test_openais_own_client_raises_what_it_raises_with_openai(folder: Path) -> None:
    async with gateway_with(folder, {}, {}, api_keys=API_KEYS, credentials=AS_ADMIN) as under_test:
        base_url = f"{under_test.http_url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=ALICE, max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
        async with openai.AsyncOpenAI(base_url=base_url, api_key="baton-wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                await client.models.list()
        assert refused.value.code == "invalid_api_key"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=WATCHER, max_retries=0) as client:
            with pytest.raises(openai.PermissionDeniedError, match="needs the scope 'generate'"):
                await client.post("/chat/completions", body={}, cast_to=object)


async def test_a_keys_limits_hold_at_both_frontends(folder: Path) -> None:
    keys = (*API_KEYS, entry("often", "o", requests_per_minute=2), entry("many", "m", max_concurrent=1))

    async with gateway_with(folder, {}, {"w0": silent}, api_keys=keys, credentials=AS_ADMIN) as under_test:
        async with client_with(under_test, "m") as client:
            first = asyncio.create_task(tokens_of(client, request_id="first"))
            await under_test.workers["w0"].next_request()
            assert await code_of(tokens_of(client)) == "RESOURCE_EXHAUSTED"
            await client.abort("first")
            assert await code_of(first) == "ABORTED"  # type: ignore[arg-type]
            second = asyncio.create_task(tokens_of(client, request_id="second"))
            await under_test.workers["w0"].next_abort()
            await under_test.workers["w0"].next_request()
            await client.abort("second")
            assert await code_of(second) == "ABORTED"  # type: ignore[arg-type]
        async with under_test.http(headers={"Authorization": "Bearer m"}) as http:
            two = await http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "n": 2})
        assert (two.status_code, two.json()["error"]["param"]) == (400, "n"), "with 429, clients would retry"
        async with under_test.http(headers={"Authorization": "Bearer o"}) as http:
            for _ in range(2):
                await http.post("/v1/completions", json={})
            refused = await http.post("/v1/completions", json={})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        async with client_with(under_test, "o") as client:  # the same caller at either frontend
            assert await code_of(tokens_of(client)) == "RESOURCE_EXHAUSTED"


async def test_tokens_per_minute_hold_at_both_frontends(folder: Path) -> None:
    """A call may use more tokens than are left, and all of its `n` answers count. The next call must wait until this
    debt is paid."""
    keys = (*API_KEYS, entry("few", "f", tokens_per_minute=60))
    workers = {"w0": answering([7, 8])}
    async with gateway_with(folder, {}, workers, api_keys=keys, credentials=AS_ADMIN) as under_test:
        asked = {"model": "tiny", "prompt": [5] * 50, "n": 10, "max_tokens": 2}
        async with under_test.http(headers={"Authorization": "Bearer f"}) as http:
            whole = await http.post("/v1/completions", json=asked)
            assert whole.json()["usage"]["total_tokens"] == 50 + 10 * 2
            refused = await http.post("/v1/completions", json=asked)
        assert refused.status_code == 429
        assert "60 tokens per minute" in refused.json()["error"]["message"]
        assert 10 <= int(refused.headers["retry-after"]) <= 11, "70 were used, and one comes in a second"
        async with client_with(under_test, "f") as client:
            assert await code_of(tokens_of(client)) == "RESOURCE_EXHAUSTED"


async def test_no_key_is_ever_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with gateway_with(
            folder, {}, {"w0": answering([7, 8])}, api_keys=API_KEYS, credentials=AS_ADMIN
        ) as under_test:
            for key in (ALICE, "baton-wrong"):
                async with client_with(under_test, key) as client:
                    await asyncio.gather(tokens_of(client), return_exceptions=True)
                async with under_test.http(headers={"Authorization": f"Bearer {key}"}) as http:
                    await http.get("/v1/models")
    assert ALICE not in caplog.text
    assert "baton-wrong" not in caplog.text


async def test_workers_reasons_are_for_administrators(folder: Path) -> None:
    """Other callers learn which request failed. The log has the rest."""
    inside = "cannot open /srv/weights at tcp://10.0.0.7:4711"

    async with gateway_with(
        folder,
        {},
        {"w0": failing(ErrorKind.INTERNAL, inside)},
        api_keys=API_KEYS,
        credentials=AS_ADMIN,
    ) as under_test:
        for key, may_see in ((ALICE, False), (ADMIN, True)):
            async with client_with(under_test, key) as client:
                with pytest.raises(
                    GatewayError, match=r"gave up after 3 attempt.*: the decode request failed"
                ) as error:
                    await tokens_of(client)
            assert (inside in str(error.value)) == may_see
            body = {"model": "tiny", "prompt": [5, 6]}
            async with under_test.http(headers={"Authorization": f"Bearer {key}"}) as http:
                answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 503
            assert (inside in answer.text) == may_see


async def test_no_caller_goes_ahead_of_others_unless_its_key_allows(folder: Path) -> None:
    keys = (*API_KEYS, entry("first", "f", best_priority=-5), entry("last", "l", best_priority=10))

    async with gateway_with(
        folder, {}, {"w0": answering([7, 8])}, api_keys=keys, credentials=AS_ADMIN
    ) as under_test:
        worker = under_test.workers["w0"]
        for key, asked, got in ((ALICE, 0, 0), (ALICE, 3, 3), ("f", -5, -5), ("l", 0, 10), ("l", 11, 11)):
            async with client_with(under_test, key) as client:
                assert await tokens_of(client, priority=asked) == [7, 8]
            assert (await worker.next_request()).priority == got
        for key, asked in ((ALICE, -1), ("f", -6), ("l", -1)):
            async with client_with(under_test, key) as client:
                assert await code_of(tokens_of(client, priority=asked)) == "INVALID_ARGUMENT"
        async with under_test.http(headers={"Authorization": "Bearer l"}) as http:
            answer = await http.post("/cluster/try", json={"prompt": "hi", "max_tokens": 2})
            assert "event: end" in answer.text, answer.text
        assert (await worker.next_request()).priority == 10, "nor by way of the page"
