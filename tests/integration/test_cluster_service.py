"""The operators' calls over real gRPC: what they show of a fleet, what they pass on, and how they refuse."""

import asyncio
from pathlib import Path

import pytest

from baton.errors import ClusterError, FleetError
from baton.fleet import NodeDescription, ReplicaState, RolloutStep
from baton.worker import KVBlockCounts, WorkerRole
from gateway.workers.fleet_view import TIMEOUT_S
from tests.factories.fleet_control import FakeFleetControl, fleet_of, replica
from tests.factories.gateway import IMPATIENT, gateway_with, refusal, silent

NODES = (
    NodeDescription(name="head", address="10.0.0.1", is_alive=True, is_head=True, resources=(("CPU", 2.0),)),
    NodeDescription(
        name="n1", address="10.0.0.2", is_alive=True, resources=(("CPU", 8.0),), workers=("w10", "w0")
    ),
    NodeDescription(name="n2", address="10.0.0.3", is_alive=False, is_draining=True),
)
FLEET = fleet_of(
    replica("w0", WorkerRole.PREFILL, node="n1", num_starts=1),
    replica("w10", node="n1", num_starts=3, last_failure="killed by signal 9"),
    replica(
        "w2", state=ReplicaState.BACKING_OFF, num_starts=2, last_failure="exit code 1", next_start_in_s=1.5
    ),
    replica("w3", state=ReplicaState.PLACING),
    nodes=NODES,
)


async def test_workers_that_are_missing_are_listed_with_those_that_serve(folder: Path) -> None:
    control = FakeFleetControl(FLEET)
    async with gateway_with(folder, {"w0": silent}, {"w10": silent}, control=control) as under_test:
        description = await under_test.client.describe()
    workers = {worker["name"]: worker for worker in description["workers"]}
    assert list(workers) == ["w0", "w2", "w3", "w10"]
    assert {name: worker["state"] for name, worker in workers.items()} == {
        "w0": "ready",
        "w2": "backing_off",
        "w3": "placing",
        "w10": "ready",
    }
    assert workers["w2"]["slot"] == {
        "state": "backing_off",
        "role": "decode",
        "node": "",
        "starts": 2,
        "last_failure": "exit code 1",
        "next_start_in_s": 1.5,
    }
    assert workers["w10"]["slot"]["next_start_in_s"] is None
    assert (workers["w10"]["kv_blocks"]["total"], workers["w2"]["kv_blocks"]["total"]) == (999, 0)
    assert (workers["w3"]["incarnation"], workers["w3"]["pid"]) == ("", 0)


async def test_every_node_is_shown_with_its_workers(folder: Path) -> None:
    control = FakeFleetControl(FLEET)
    async with gateway_with(folder, {}, {}, control=control) as under_test:
        description = await under_test.client.describe()
    head, busy, dead = description["nodes"]
    assert head == {
        "name": "head",
        "address": "10.0.0.1",
        "is_alive": True,
        "is_head": True,
        "is_draining": False,
        "resources": {"CPU": 2.0},
        "workers": [],
    }
    assert busy["workers"] == ["w0", "w10"]
    assert not dead["is_alive"]
    assert dead["is_draining"]
    assert description["controller"] == {
        "state": "answering",
        "incarnation": "c-incarnation",
        "failure": "",
        "decisions": ["Nothing to do."],
    }


async def test_what_a_worker_measured_of_its_load_arrives(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": silent}) as under_test:
        (worker,) = (await under_test.client.describe())["workers"]
    assert worker["load"] == {
        "queued_prompt_tokens": 7,
        "oldest_waiting_s": 0.25,
        "prefill_tokens_per_s": 1500.0,
        "decode_step_s": 0.03,
    }


async def test_a_worker_with_impossible_numbers_does_not_hide_the_others(folder: Path) -> None:
    async with gateway_with(folder, {"w0": silent}, {"w1": silent}) as under_test:
        under_test.workers["w0"].blocks = KVBlockCounts(999, -1, 0, 0)
        async with asyncio.timeout(60):
            while True:
                faulty, sound = (await under_test.client.describe())["workers"]
                if faulty["failure"]:
                    break
                await asyncio.sleep(0.01)
    assert faulty["failure"].startswith("its last heartbeat has an impossible number: ")
    assert (faulty["name"], faulty["state"], faulty["kv_blocks"]["total"]) == ("w0", "ready", 0)
    assert (sound["failure"], sound["kv_blocks"]["free"]) == ("", 999)


@pytest.mark.parametrize(
    ("state", "shown"), [(ReplicaState.BACKING_OFF, "backing_off"), (ReplicaState.SERVING, "dead")]
)
async def test_a_worker_that_fell_silent_is_dead_unless_its_controller_knows_more(
    folder: Path, state: ReplicaState, shown: str
) -> None:
    control = FakeFleetControl(fleet_of(replica("w0", state=state)))
    async with gateway_with(folder, {}, {"w0": silent}, control=control) as under_test:
        under_test.workers.pop("w0").stop()
        await under_test.until(lambda: len(under_test.gateway.workers.statuses) == 0)
        (worker,) = (await under_test.client.describe())["workers"]
    assert worker["state"] == shown


async def test_a_worker_that_was_never_heard_starts_at_first_and_then_is_dead(folder: Path) -> None:
    control = FakeFleetControl(fleet_of(replica("w1", state=ReplicaState.SERVING)))
    network = IMPATIENT.model_copy(update={"peer_timeout_s": 5.0})  # the first description may take a second
    async with gateway_with(folder, {}, {}, control=control, network=network) as under_test:
        mute = under_test.add("w1", silent)
        mute.stop()
        (worker,) = (await under_test.client.describe())["workers"]
        assert worker["state"] == "starting"
        (client,) = under_test.gateway.workers.clients
        await under_test.until(lambda: client.is_lost)
        (worker,) = (await under_test.client.describe())["workers"]
        assert worker["state"] == "dead"


async def test_without_a_controller_the_gateway_describes_what_it_knows(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": silent}) as under_test:
        description = await under_test.client.describe()
        assert description["controller"]["state"] == "none"
        (worker,) = description["workers"]
        assert (worker["state"], worker["slot"]) == ("ready", None)
        for command in (
            under_test.client.drain("w0"),
            under_test.client.set_role("w0", WorkerRole.PREFILL),
            anext(under_test.client.rollout()),
            under_test.client.flush_cache(),
        ):
            refused = await refusal(command)
            assert refused.code == "FAILED_PRECONDITION"
            assert "has no controller" in str(refused)


async def test_without_the_controllers_answer_the_gateway_soon_describes_what_it_knows(folder: Path) -> None:
    control = FakeFleetControl(FLEET)
    async with gateway_with(folder, {}, {"w0": silent}, control=control) as under_test:
        control.answers.clear()
        started = asyncio.get_running_loop().time()
        description = await under_test.client.describe()
        assert asyncio.get_running_loop().time() - started < TIMEOUT_S + 10.0
        assert description["controller"]["state"] == "away"
        assert "no answer within 1 s" in description["controller"]["failure"]
        assert [worker["name"] for worker in description["workers"]] == ["w0"]
        assert description["nodes"] == []


async def test_a_controller_that_cannot_be_reached_makes_orders_unavailable(folder: Path) -> None:
    control = FakeFleetControl(FLEET)
    async with gateway_with(folder, {}, {}, control=control) as under_test:
        control.is_away = ClusterError("the controller's connection is closed")
        refused = await refusal(under_test.client.drain("w0"))
        assert (refused.code, control.commands) == ("UNAVAILABLE", [])
        assert "the controller's connection is closed" in str(refused)
        description = await under_test.client.describe()
        assert description["controller"]["failure"] == "the controller's connection is closed"


async def test_orders_reach_the_controller(folder: Path) -> None:
    control = FakeFleetControl(FLEET)
    async with gateway_with(folder, {}, {}, control=control) as under_test:
        await under_test.client.set_role("w0", WorkerRole.DECODE)
        await under_test.client.drain("w3")
        steps = [step async for step in under_test.client.rollout()]
    assert control.commands == [("set_role", "w0", "decode"), ("drain", "w3"), ("rollout",)]
    assert steps == [
        RolloutStep("w0", "w0-next-incarnation", 1, 3),
        RolloutStep("w10", "w10-next-incarnation", 2, 3),
        RolloutStep("w2", "w2-next-incarnation", 3, 3),
    ]


async def test_after_a_change_of_role_the_gateway_describes_the_new_one(folder: Path) -> None:
    control = FakeFleetControl(fleet_of(replica("w0")))
    async with gateway_with(folder, {}, {"w0": silent}, control=control) as under_test:
        under_test.workers["w0"].role = WorkerRole.PREFILL  # its next heartbeat says so
        await under_test.client.set_role("w0", WorkerRole.PREFILL)
        (worker,) = (await under_test.client.describe())["workers"]
    assert worker["role"] == "prefill"


async def test_c63_a_flush_answers_for_each_worker(folder: Path) -> None:
    control = FakeFleetControl(FLEET)
    control.in_use = {"w10": "blocks are in use (2 requests run); wait, or use force"}
    async with gateway_with(folder, {}, {}, control=control) as under_test:
        flushes = await under_test.client.flush_cache(("w0", "w10"))
        assert [(flush.worker, flush.is_flushed) for flush in flushes] == [("w0", True), ("w10", False)]
        assert flushes[1].obstacle == control.in_use["w10"]
        assert len(await under_test.client.flush_cache(force=True)) == 4
    assert control.commands == [("flush", "w0", "w10", "False"), ("flush", "True")]


async def test_an_unknown_worker_is_answered_with_the_names_there_are(folder: Path) -> None:
    control = FakeFleetControl(FLEET)
    async with gateway_with(folder, {}, {}, control=control) as under_test:
        client = under_test.client
        rollout = anext(client.rollout(("w0", "w9")))
        flush = client.flush_cache(("w9",))
        for command in (client.drain("w9"), client.set_role("w9", WorkerRole.DECODE), rollout, flush):
            refused = await refusal(command)
            assert refused.code == "NOT_FOUND"
            assert "there is no worker 'w9'; the fleet has w0, w2, w3, w10" in str(refused)
    assert control.commands == []


async def test_the_controllers_refusal_reaches_the_client(folder: Path) -> None:
    control = FakeFleetControl(FLEET)
    control.refuses = FleetError("w0 is the last prefill worker")
    async with gateway_with(folder, {}, {}, control=control) as under_test:
        for command in (under_test.client.drain("w0"), under_test.client.set_role("w0", WorkerRole.DECODE)):
            refused = await refusal(command)
            assert refused.code == "FAILED_PRECONDITION"
            assert "w0 is the last prefill worker" in str(refused)


async def test_a_rollout_that_fails_has_reported_its_progress(folder: Path) -> None:
    control = FakeFleetControl(FLEET)
    control.refuses = FleetError("w10 did not come back")
    seen: list[str] = []

    async def follow() -> None:
        async for step in under_test.client.rollout():
            seen.append(step.worker)  # noqa: PERF401 - what came before the error counts

    async with gateway_with(folder, {}, {}, control=control) as under_test:
        refused = await refusal(follow())
    assert seen == ["w0"]
    assert (refused.code, "w10 did not come back" in str(refused)) == ("FAILED_PRECONDITION", True)


async def test_a_node_is_drained_in_the_time_that_it_is_given(folder: Path) -> None:
    control = FakeFleetControl(FLEET)
    async with gateway_with(folder, {"w0": silent}, {}, control=control) as under_test:
        await under_test.client.drain_node("10.0.0.2", 7.0)
        assert control.commands == [("drain_node", "10.0.0.2", "7")]
        for node, timeout_s, field in (
            ("", 7.0, "node"),
            ("n1", 0.0, "timeout_s"),
            ("n1", 3601.0, "timeout_s"),
        ):
            error = await refusal(under_test.client.drain_node(node, timeout_s))
            assert (error.code, error.details.field) == ("INVALID_ARGUMENT", field)
        control.refuses = FleetError("w0 did not leave n1 within 7 s")
        error = await refusal(under_test.client.drain_node("n1", 7.0))
        assert (error.code, error.message) == ("FAILED_PRECONDITION", "w0 did not leave n1 within 7 s")
        assert len(control.commands) == 1
