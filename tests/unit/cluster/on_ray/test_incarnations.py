"""What is left of a worker on Ray once it has ended, however it ended. Ray itself is replaced."""

import asyncio
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError

from baton.errors import ClusterError
from baton.messages.control import Drain, Drained, WaitStatus
from baton.messages.control_codec import read_call
from cluster.on_ray import incarnations as module
from cluster.on_ray.actors import ACTOR_CODEC, StopWorker
from cluster.on_ray.incarnations import RayIncarnation, Title, parse_title, remove_incarnations


class FakeRay:
    """Named actors and placement groups. An actor that has died has no name any more, but still its group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actors: set[str] = set()
        self.groups: dict[str, str] = {}
        """The state of each group, by its name."""
        self.foreign: set[str] = set()
        """Names of groups in another namespace."""
        monkeypatch.setattr(ray.util, "list_named_actors", lambda: sorted(self.actors))
        monkeypatch.setattr(ray, "get_actor", self._get_actor)
        monkeypatch.setattr(ray, "kill", lambda name: self.actors.discard(name))
        monkeypatch.setattr(module, "placement_group_table", self._table)
        monkeypatch.setattr(module, "get_placement_group", self._get_group)
        monkeypatch.setattr(module, "remove_placement_group", self._remove_group)

    def _get_actor(self, name: str) -> str:
        if name not in self.actors:
            raise ValueError(name)
        return name

    def _table(self) -> dict[str, dict[str, str]]:
        return {f"id of {name}": {"name": name, "state": state} for name, state in self.groups.items()}

    def _get_group(self, name: str) -> str:
        if name in self.foreign or self.groups.get(name, "REMOVED") == "REMOVED":
            raise ValueError(name)
        return name

    def _remove_group(self, name: str) -> None:
        self.groups[name] = "REMOVED"

    @property
    def left(self) -> set[str]:
        return self.actors | {name for name, state in self.groups.items() if state != "REMOVED"}


def test_a_title_names_worker_number_and_fleet() -> None:
    names = ["controller", "w0/1@0a", "w0/1@0b", "w1"]
    assert [parse_title(name) for name in names] == [None, Title("w0", 1, "0a"), Title("w0", 1, "0b"), None]


def test_all_that_a_fleet_has_is_removed_also_the_room_of_workers_that_have_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A controller that hangs gives no room back, and the name of a dead actor is gone."""
    fake = FakeRay(monkeypatch)
    fake.actors = {"w0/2@0a", "w0/1@0b", "controller"}
    fake.groups = dict.fromkeys(["w0/2@0a", "w1/1@0a", "w0/1@0b", "w2/1@0a", "another"], "CREATED")
    fake.groups |= {"w3/1@0a": "PENDING", "w4/1@0a": "RESCHEDULING", "w5/1@0a": "REMOVED"}
    fake.foreign = {"w2/1@0a"}
    remove_incarnations(lambda title: title.fleet == "0a")
    assert fake.left == {"controller", "w0/1@0b", "w2/1@0a", "another"}


async def test_a_worker_whose_end_is_not_waited_for_gives_its_room_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killing a process that hangs takes seconds; its replica may be removed meanwhile."""
    fake = FakeRay(monkeypatch)
    title = Title("w0", 1, "0a")
    fake.actors, fake.groups = {str(title)}, {str(title): "CREATED"}
    kills = asyncio.Event()

    async def kill_process(*_: Any) -> None:
        kills.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "kill_process", kill_process)
    incarnation = RayIncarnation(title, str(title), "n0")
    incarnation._pid, incarnation._hangs = 7, True
    stopping = asyncio.create_task(incarnation.stop(0.0))
    await kills.wait()
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert fake.left == set()
    assert incarnation.is_over


class Unsteady:
    """A worker's actor, which cannot be reached for the first calls."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.requests: list[Any] = []
        self.call = self

    async def remote(self, frame: bytes) -> bytes:
        call = read_call(frame)
        request = ACTOR_CODEC.request_in(call)
        self.requests.append(request)
        if len(self.requests) <= self.num_failures:
            raise ActorUnavailableError("RpcError: the connection broke", None)
        return ACTOR_CODEC.answer(call.number, request, Drained(True))


async def test_a_connection_that_breaks_ends_no_worker() -> None:
    actor = Unsteady(1)
    incarnation = RayIncarnation(Title("w0", 1, "0a"), actor, "n0")
    assert await incarnation.call(Drain(5.0)) == Drained(True)
    assert actor.requests == [Drain(5.0), Drain(5.0)]


async def test_a_worker_that_cannot_be_reached_again_is_lost() -> None:
    actor = Unsteady(2)
    incarnation = RayIncarnation(Title("w0", 1, "0a"), actor, "n0")
    with pytest.raises(ClusterError, match=r"^its process or its node cannot be reached$"):
        await incarnation.call(WaitStatus(1.0))
    assert len(actor.requests) == 2


async def test_the_end_of_a_worker_is_not_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch)
    actor = Unsteady(1)
    incarnation = RayIncarnation(Title("w0", 1, "0a"), actor, "n0")
    incarnation._has_started = True
    monkeypatch.setattr(ray, "kill", lambda _: None)
    await incarnation.stop(5.0)
    assert actor.requests == [StopWorker()]
