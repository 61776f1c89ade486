"""What the live page receives over a real socket: the state of the cluster, and one request's stages."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.fleet import NodeDescription, ReplicaState
from baton.kv import TransferRole
from baton.request import ErrorKind
from baton.worker import KVBlockCounts, KVPeerCounts, RequestCounts, WorkerRole
from tests.factories.api_keys import ADMIN, ALICE, API_KEYS, AS_ADMIN, WATCHER
from tests.factories.fleet_control import FakeFleetControl, fleet_of, replica
from tests.factories.gateway import GatewayUnderTest, answering, failing, gateway_with, silent
from tests.factories.paced_fleet import Pace, PacedFleet

ANSWER = [7, 8, 9, 10]
FILES = {file.name for file in files("gateway.http.page").iterdir() if "__" not in file.name}
"""The files of the page."""


async def events_of(answer: httpx2.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    name = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def story(under_test: GatewayUnderTest, **body: object) -> list[tuple[str, dict[str, Any]]]:
    """Every event of one request."""
    async with under_test.http() as client:
        wanted = {"prompt": "Hello", "max_tokens": len(ANSWER), **body}
        async with client.stream("POST", "/cluster/try", json=wanted) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            return [found async for found in events_of(answer)]


async def test_a_snapshot_holds_what_workers_and_their_controller_say(folder: Path) -> None:
    node = NodeDescription(name="n1", address="10.1.2.3", is_alive=True)
    missing = replica("w2", state=ReplicaState.CRASH_LOOP, last_failure="no room at 10.1.2.3")
    control = FakeFleetControl(
        fleet_of(replica("w0", WorkerRole.PREFILL), replica("w1"), missing, nodes=(node,))
    )
    scripts = {"w0": answering(ANSWER)}, {"w1": answering(ANSWER)}
    async with gateway_with(folder, *scripts, control=control) as under_test:
        worker = under_test.workers["w1"]
        worker.blocks = KVBlockCounts(100, 60, 3, 2)
        worker.requests = RequestCounts(4, 5, 6)
        counts = (2, 1, 0, 4096, 0.0, 0.0, 0.0)
        worker.kv_peers = (
            KVPeerCounts(TransferRole.CONSUMER, "w0", "tcp", *counts),
            KVPeerCounts(TransferRole.CONSUMER, "w0", "shared_memory", *counts),
            KVPeerCounts(TransferRole.PRODUCER, "w0", "tcp", *counts),
        )
        await story(under_test)
        client = under_test.gateway.workers.client("w1")
        assert client is not None
        await under_test.until(lambda: client.status is not None and client.status.requests.running == 4)
        async with under_test.http() as http:
            await asyncio.sleep(1.1)  # editions are made once a second
            answer = await http.get("/cluster")
            assert answer.headers["cache-control"] == "no-store"
            seen = answer.json()
    assert [(worker["name"], worker["role"], worker["state"]) for worker in seen["workers"]] == [
        ("w0", "prefill", "ready"),
        ("w1", "decode", "ready"),
        ("w2", "decode", "crash_loop"),
    ]
    decode = seen["workers"][1]
    assert decode["blocks"] == {"total": 100, "free": 60, "used": 35, "leased": 3, "quarantined": 2}
    assert (decode["running"], decode["waiting"], decode["waiting_for_kv"]) == (4, 5, 6)
    assert seen["handovers"] == [{"prefill": "w0", "decode": "w1", "done": 4, "failed": 2, "num_bytes": 8192}]
    assert seen["gateway"]["paths"] == {"disaggregated": 1, "local": 0, "fallback": 0}
    assert (seen["gateway"]["outcomes"]["finished"], seen["gateway"]["in_flight"]) == (1, 0)
    assert (seen["controller"], seen["model"]) == ("answering", "tiny")
    assert seen["nodes"][0]["address"] == "10.1.2.3"
    assert sum(seen["last_minute"]["tokens"]) == len(ANSWER)
    assert len(seen["last_minute"]["ttft_p50_s"]) == 60


async def test_addresses_are_for_administrators(folder: Path) -> None:
    node = NodeDescription(name="n1", address="10.1.2.3", is_alive=True)
    control = FakeFleetControl(fleet_of(replica("w0", last_failure="at 10.1.2.3"), nodes=(node,)))

    access: dict[str, Any] = {"api_keys": API_KEYS, "credentials": AS_ADMIN}
    async with (
        gateway_with(folder, {}, {"w0": silent}, control=control, **access) as under_test,
        under_test.http() as client,
    ):
        for key, is_shown in ((ADMIN, True), (WATCHER, False)):
            answer = await client.get("/cluster", headers={"Authorization": f"Bearer {key}"})
            assert answer.json()["workers"][0]["name"] == "w0"
            assert ("10.1.2.3" in answer.text) is is_shown
        for key, method, path in ((ALICE, "GET", "/cluster"), (WATCHER, "POST", "/cluster/try")):
            headers = {"Authorization": f"Bearer {key}"}
            answer = await client.request(method, path, headers=headers, json={"prompt": "Hello"})
            assert answer.status_code == 403


async def test_an_unreachable_controller_delays_no_call_for_long(folder: Path) -> None:
    control = FakeFleetControl(fleet_of(replica("w0")))
    control.answers.clear()

    async with gateway_with(folder, {}, {"w0": silent}, control=control) as under_test:
        async with under_test.http() as client:
            seen = (await client.get("/cluster")).json()
        assert (seen["controller"], [worker["name"] for worker in seen["workers"]]) == ("away", ["w0"])


async def test_a_viewer_gets_a_snapshot_at_once_and_then_one_a_second(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": silent}) as under_test:
        async with under_test.http() as client, client.stream("GET", "/cluster/events") as answer:
            loop, times = asyncio.get_running_loop(), []
            async for name, snapshot in events_of(answer):
                assert (name, snapshot["workers"][0]["name"]) == ("snapshot", "w0")
                times.append(loop.time())
                if len(times) == 2:
                    break
        assert 0.8 < times[1] - times[0] < 3.0
        feed = under_test.gateway._feed
        await under_test.until(lambda: feed._viewers.num_taken == 0)


async def test_a_viewer_does_not_keep_a_gateway_from_stopping(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {"w0": silent}) as under_test,
        under_test.http() as client,
        client.stream("GET", "/cluster/events") as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        async with asyncio.timeout(60):
            await under_test.gateway._feed.stop()
            assert [line async for line in lines][-1] == ""


async def test_one_request_tells_its_way_stage_by_stage(folder: Path) -> None:
    async with gateway_with(folder, {"w0": answering(ANSWER)}, {"w1": answering(ANSWER)}) as under_test:
        events = await story(under_test)
    assert events[0][0] == "received"
    assert events[0][1]["num_prompt_tokens"] > 5  # the chat template's tokens are among them
    name, placed = events[1]
    assert (name, placed["mode"], placed["prefill"], placed["decode"]) == (
        "placed",
        "disaggregated",
        "w0",
        "w1",
    )
    tokens = [data for name, data in events if name == "tokens"]
    assert sum(data["num_tokens"] for data in tokens) == len(ANSWER)
    name, end = events[-1]
    assert (name, end["finish_reason"], end["num_completion_tokens"]) == ("end", "length", len(ANSWER))
    assert len(end["timing"]["itl_s"]) == len(ANSWER) - 1
    assert 0 < end["timing"]["ttft_s"] <= end["timing"]["total_s"]
    assert sum(end["timing"]["ttft_parts"].values()) == pytest.approx(end["timing"]["ttft_s"])


async def test_a_request_that_asks_for_the_local_path_gets_it(folder: Path) -> None:
    async with gateway_with(folder, {"w0": silent}, {"w1": answering(ANSWER)}) as under_test:
        events = await story(under_test, mode="local")
    assert (events[1][1]["mode"], events[1][1]["prefill"], events[1][1]["decode"]) == ("local", None, "w1")


async def test_a_request_that_moves_says_where_to(folder: Path) -> None:
    broken = failing(ErrorKind.INTERNAL, "it broke")
    async with gateway_with(folder, {}, {"w0": broken, "w1": answering(ANSWER)}) as under_test:
        stories = [await story(under_test, mode="local") for _ in range(3)]
        events = max(stories, key=len)
    assert [data["decode"] for name, data in events if name == "placed"] == ["w0", "w1"]
    assert (events[-1][0], events[-1][1]["num_attempts"]) == ("end", 2)
    timing = events[-1][1]["timing"]
    assert 0 < timing["attempt_began_s"] < timing["ttft_s"]
    assert timing["num_tokens_before"] == 0


async def test_transfers_say_which_attempt_they_belong_to(folder: Path) -> None:
    """The page shows the transfers of the last attempt. The number of attempts identifies this attempt."""
    fleet = PacedFleet(folder, "hi", Pace(prefill_s=0.001, step_s=0.001))
    async with gateway_with(folder, fleet.scripts("w0"), fleet.scripts("w1")) as under_test:
        fleet.workers = under_test.workers
        name, end = (await story(under_test))[-1]
    assert (name, end["num_attempts"]) == ("end", 1)
    assert {transfer["attempt"] for transfer in end["transfers"]} == {1}


def test_a_request_that_fails_ends_with_the_error_of_any_other(folder: Path) -> None:
    async def run() -> list[tuple[str, dict[str, Any]]]:
        refused = failing(ErrorKind.INVALID_REQUEST, "max_tokens: too many")
        async with gateway_with(folder, {}, {"w0": refused}) as under_test:
            return await story(under_test)

    name, data = asyncio.run(run())[-1]
    assert (name, data["error"]["type"]) == ("error", "invalid_request_error")


async def test_a_client_that_leaves_ends_its_request(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": silent}) as under_test:
        wanted = {"prompt": "Hello"}
        async with (
            under_test.http() as client,
            client.stream("POST", "/cluster/try", json=wanted) as answer,
        ):
            async for name, _ in events_of(answer):
                if name == "placed":
                    break
        request = await under_test.workers["w0"].next_request()
        assert await under_test.workers["w0"].next_abort() == request.request_id


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": "Hello", "tokens": 3}, "tokens"),
    ({"prompt": "Hello", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "Hello", "temperature": 2.5}, "temperature"),
    ({"prompt": "Hello", "temperature": False}, "temperature"),
    ({"prompt": "Hello", "mode": "fast"}, "mode"),
    ({"prompt": "Hello " * 300}, "prompt"),
]


async def test_a_request_that_cannot_be_is_refused_by_the_name_of_its_field(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": silent}) as under_test, under_test.http() as client:
        for body, param in REFUSED:
            answer = await client.post("/cluster/try", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body


async def test_the_api_describes_what_the_page_uses(folder: Path) -> None:
    async with gateway_with(folder, {}, {}) as under_test, under_test.http() as client:
        described = (await client.get("/openapi.json")).json()
    answers = described["paths"]["/cluster"]["get"]["responses"]["200"]["content"]["application/json"]
    assert answers["schema"]["$ref"].endswith("/ClusterSnapshot")
    assert set(described["paths"]["/cluster/events"]["get"]["responses"]["200"]["content"]) == {
        "text/event-stream"
    }
    fields = described["components"]["schemas"]["TrialRequest"]
    assert fields["additionalProperties"] is False
    assert set(fields["properties"]) == {"prompt", "max_tokens", "temperature", "mode"}
    assert "/" not in described["paths"]


async def test_the_page_is_whole_and_asks_no_other_host(folder: Path) -> None:
    async with gateway_with(folder, {}, {}) as under_test, under_test.http() as client:
        paths = ["/", *[f"/page/{name}" for name in FILES - {"index.html"}]]
        answers = {path: await client.get(path) for path in paths}
    for path, answer in answers.items():
        assert answer.status_code == 200, path
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
        own = answer.text.replace("http://www.w3.org/2000/svg", "")  # a namespace, which no browser loads
        assert not re.search(r"https?://|//cdn|@import|url\(", own), path
    text = "".join(answer.text for answer in answers.values())
    named = set(re.findall(r"""(?:"page/|"\./)([a-z]+\.[a-z]+)""", text))
    assert named | {"index.html"} == FILES
    # The page inserts workers' names and models' answers as text.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert not re.search(r"<script(?! type=\"module\" src=)|\son[a-z]+=|\sstyle=", answers["/"].text)
