"""Which cores workers on Ray's nodes get, and whose room is kept; Ray itself and the actors are replaced."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from baton.config import BatonConfig
from baton.kv import WorkerRef
from baton.messages.control_codec import read_reply, write_call
from baton.system.cpus import Core, CpuShare, Machine
from baton.worker import (
    KVBlockCounts,
    RequestCounts,
    WorkerEndpoint,
    WorkerRole,
    WorkerState,
    WorkerStatus,
)
from cluster.controller.launcher import NodeDrains
from cluster.on_ray import launcher as module
from cluster.on_ray.actors import ACTOR_CODEC, Introduce, Introduction, WorkerActor
from cluster.on_ray.incarnations import RayIncarnation, Title

P, D = WorkerRole.PREFILL, WorkerRole.DECODE


class Nodes:
    """Nodes of Ray, each a name and its machine's. A new actor goes to the node that `goes_to` names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_cpus: float, *, num_cores: int) -> None:
        self.hosts: dict[str, str] = {}
        self.goes_to = ""
        self._num_cpus = num_cpus
        self._machine = Machine(tuple(Core((cpu,), 0) for cpu in range(num_cores)), num_cores)
        monkeypatch.setattr(ray, "nodes", self._nodes)
        monkeypatch.setattr(module, "available_resources_per_node", dict)
        monkeypatch.setattr(module.RayLauncher, "_create_actor", lambda *_: None)
        monkeypatch.setattr(RayIncarnation, "_exchange", self._introduce)
        monkeypatch.setattr(module, "RayIncarnation", Incarnation)

    def _nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": node,
                "Alive": True,
                "Resources": {"CPU": self._num_cpus},
                "Labels": {},
                "NodeManagerHostname": host,
            }
            for node, host in self.hosts.items()
        ]

    async def _introduce(self, *_: object) -> Introduction:
        node, host = self.goes_to.split("@")
        self.hosts[node] = host  # an autoscaler adds a node once an actor waits for it
        return Introduction(node, host, 0, self._machine)


class Incarnation(RayIncarnation):
    async def stop(self, timeout_s: float) -> None:
        self.is_over = True


def make_launcher(**cluster: int) -> module.RayLauncher:
    return module.RayLauncher(BatonConfig.from_mapping({"cluster": cluster}), "", Path(), "f1ee7000")


async def test_the_first_pod_is_not_divided_among_workers_whose_pods_are_not_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, launcher = Nodes(monkeypatch, 1.0, num_cores=16), make_launcher(prefill=4, decode=8)
    nodes.goes_to = "n0@pod0"
    assert (await launcher.place("w0", P, 1)).share == CpuShare(16, tuple(range(16)))


async def test_two_nodes_on_one_machine_give_their_workers_different_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, launcher = Nodes(monkeypatch, 1.0, num_cores=4), make_launcher(prefill=1, decode=1)
    nodes.hosts = {"n0": "machine", "n1": "machine"}
    nodes.goes_to = "n0@machine"
    assert (await launcher.place("w0", P, 1)).share == CpuShare(2, (0, 1))
    nodes.goes_to = "n1@machine"
    assert (await launcher.place("w1", D, 1)).share == CpuShare(2, (2, 3))


async def test_a_worker_that_serves_keeps_its_cores_though_its_next_incarnation_failed_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, launcher = Nodes(monkeypatch, 2.0, num_cores=4), make_launcher(prefill=1, decode=3)
    nodes.hosts = {"n0": "a", "n1": "b"}
    nodes.goes_to = "n0@a"
    assert (await launcher.place("w0", P, 1)).share == CpuShare(2, (0, 1))
    nodes.goes_to = "n1@b"
    await (await launcher.place("w0", P, 2)).stop(0.0)
    nodes.goes_to = "n0@a"
    assert (await launcher.place("w1", D, 1)).share == CpuShare(2, (2, 3))


async def test_a_worker_that_failed_to_start_on_a_node_is_tried_on_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, launcher = Nodes(monkeypatch, 9.0, num_cores=4), make_launcher(prefill=1, decode=3)
    nodes.hosts, targets = {"n0": "a", "n1": "b"}, list[str | None]()
    room = {"n0": {"CPU": 9.0}, "n1": {"CPU": 9.0}}
    monkeypatch.setattr(module, "available_resources_per_node", lambda: room)
    monkeypatch.setattr(launcher, "_create_actor", lambda _t, _r, target, _a: targets.append(target))
    nodes.goes_to = "n1@b"
    await launcher.place("w0", P, 1)
    for number, goes_to, serves in ((1, "n0@a", False), (2, "n1@b", True), (3, "n0@a", True)):
        nodes.goes_to = goes_to
        incarnation = await launcher.place("w1", D, number)
        incarnation._has_started = serves
        await incarnation.stop(0.0)
    assert targets == ["n0", "n0", "n1", "n0"], "n1 has more workers"


async def test_a_worker_that_fails_to_start_tries_each_node_before_it_tries_one_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, launcher = Nodes(monkeypatch, 9.0, num_cores=4), make_launcher(prefill=1, decode=3)
    nodes.hosts = {"n0": "a", "n1": "b", "n2": "c"}
    room = {node: {"CPU": 9.0} for node in nodes.hosts}
    monkeypatch.setattr(module, "available_resources_per_node", lambda: room)
    nodes.goes_to = "n2@c"
    await launcher.place("w0", P, 1)

    def create(_title: Title, _role: WorkerRole, target: str, _avoided: object) -> None:
        targets.append(target)
        nodes.goes_to = f"{target}@{nodes.hosts[target]}"

    targets: list[str] = []
    monkeypatch.setattr(launcher, "_create_actor", create)
    for number in range(1, 8):
        await (await launcher.place("w1", D, number)).stop(0.0)
    assert targets == ["n0", "n1", "n2", "n0", "n1", "n2", "n0"]
    launcher.forget("w1")
    assert launcher._failed_on == {}


async def test_a_worker_that_ray_places_on_a_node_that_drains_by_then_has_not_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, launcher = Nodes(monkeypatch, 1.0, num_cores=4), make_launcher(prefill=1, decode=1)
    nodes.goes_to = "n0@a"
    launcher.avoid(("a-n0",))
    with pytest.raises(NodeDrains, match="its node a-n0 began to drain"):
        await launcher.place("w0", P, 1)


@pytest.mark.parametrize("state", [WorkerState.READY, WorkerState.DRAINING])
async def test_a_new_controller_learns_at_once_whether_a_worker_drains(
    monkeypatch: pytest.MonkeyPatch, state: WorkerState
) -> None:
    ref = WorkerRef("w0", "incarnation", ("tcp://127.0.0.1:3",), 16)
    actor = WorkerActor(BatonConfig(), "", Path("model"), D, "w0")
    monkeypatch.setattr(
        actor, "_endpoint", WorkerEndpoint(ref, D, "tcp://127.0.0.1:2", "a", 1), raising=False
    )
    status = WorkerStatus(ref, P, state, KVBlockCounts(9, 9, 0, 0), RequestCounts(0, 0, 0), {})
    monkeypatch.setattr(actor, "_worker", SimpleNamespace(status=lambda: status), raising=False)
    here = Introduction("n0", "a", 1, Machine((Core((0,), 0),), 1))
    monkeypatch.setattr("cluster.on_ray.actors.introduction_here", lambda: here)
    reply = read_reply(actor.call(write_call(ACTOR_CODEC.frame(1, 0.0, Introduce()))))

    async def introduce(*_: object) -> Introduction:
        return ACTOR_CODEC.value_in(reply, Introduce())

    monkeypatch.setattr(RayIncarnation, "_exchange", introduce)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: [str(Title("w0", 2, "f1ee7000"))])
    monkeypatch.setattr(ray, "get_actor", lambda _: object())
    monkeypatch.setattr(module, "titles_with_room", list)
    found = (await make_launcher().adopt(1.0))["w0"]
    assert (found.endpoint.role, found.is_leaving) == (P, state is WorkerState.DRAINING)


async def test_a_new_controller_gives_back_the_room_of_workers_of_its_fleet_that_do_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serves, dead = Title("w0", 2, "f1ee7000"), Title("w1", 1, "f1ee7000")
    of_another_fleet = Title("w0", 1, "0a0a0a0a")
    endpoint = WorkerEndpoint(
        WorkerRef("w0", "incarnation", ("tcp://127.0.0.1:3",), 16), D, "tcp://127.0.0.1:2", "a", 1
    )
    given_back: list[str] = []

    async def introduce(*_: object) -> Introduction:
        return Introduction("n0", "a", 1, Machine((Core((0,), 0),), 1), endpoint)

    monkeypatch.setattr(RayIncarnation, "_exchange", introduce)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: [str(serves), str(of_another_fleet)])
    monkeypatch.setattr(ray, "get_actor", lambda _: object())
    monkeypatch.setattr(module, "titles_with_room", lambda: [serves, dead, of_another_fleet])
    monkeypatch.setattr(module, "give_room_back", given_back.append)
    assert {name: found.endpoint for name, found in (await make_launcher().adopt(1.0)).items()} == {
        "w0": endpoint
    }
    assert given_back == [str(dead)]
