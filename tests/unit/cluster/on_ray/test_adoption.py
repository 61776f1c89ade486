"""Which running fleet a command adopts: by its model, and whether it has ended."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest
from ray.exceptions import AuthenticationError

from baton.config import BatonConfig
from baton.errors import ClusterError, FleetEnded
from baton.messages.control import ControlRequest, GetConfiguration, ScaleRole, WaitView
from baton.messages.control_codec import versions_differ
from baton.system.curve import derive_keys
from cluster.control_api.configuration import keys_digest
from cluster.on_ray import controller as module
from cluster.on_ray import fleet as fleet_module
from cluster.on_ray.controller import _differences, begin_fleet, find_fleet
from cluster.on_ray.fleet import RayFleet
from cluster.on_ray.placement import HEAD
from tests.factories.control_api import MODEL_PATH, StandingFleet, packed
from tests.factories.ray_store import FakeRayStore
from tests.factories.security import SECRET

R = TypeVar("R")

COMMIT, OTHER = "a" * 40, "b" * 40


def folder(commit: str) -> Path:
    return Path("/cache/models--acme--tiny/snapshots") / commit


@pytest.mark.parametrize(
    ("there", "asked", "found", "differs"),
    [
        (f"acme/tiny@{COMMIT}", "acme/tiny", folder(COMMIT), []),
        (f"acme/tiny@{COMMIT}", "acme/tiny", folder(OTHER), []),
        (f"acme/tiny@{COMMIT}", "acme/tiny@main", folder(COMMIT), []),
        (f"acme/tiny@{COMMIT}", "acme/tiny@main", folder(OTHER), ["model.path"]),
        (f"acme/tiny@{COMMIT}", "acme/other", folder(OTHER), ["model.path"]),
        (f"acme/tiny@{COMMIT}", f"acme/tiny@{COMMIT}", Path("/another/home/snapshots") / COMMIT, []),
        ("/models/tiny", "models/tiny", Path("/models/tiny"), []),
        ("smollm2", "smollm2", Path("/elsewhere"), ["the model's folder"]),
    ],
)
async def test_a_fleet_is_adopted_if_it_serves_what_the_name_means(
    there: str, asked: str, found: Path, differs: list[str]
) -> None:
    """A commit is the same wherever its folder is, and a name without revision means the fleet's commit."""
    place = folder(COMMIT) if there.startswith("acme") else Path("/models/tiny")
    digest = keys_digest(derive_keys(SECRET))
    fleet = StandingFleet(packed(BatonConfig.from_mapping({"model": {"path": there}}), place))
    ours = BatonConfig.from_mapping({"model": {"path": asked}})
    lines = await _differences(fleet, ours, digest, found)  # type: ignore[arg-type]
    assert [line.partition(" is ")[0] for line in lines] == differs


class Found:
    """The handle of a fleet that is found, with or without an owner. `ends_at`: the fleet has ended when this
    call comes."""

    def __init__(
        self, config: BatonConfig, *, owner: str | None = None, ends_at: type[Any] | None = None
    ) -> None:
        self.done: list[str] = []
        self.control = self
        self._fleet = StandingFleet(packed(config))
        self._owner = owner
        self._ends_at = ends_at

    async def call(self, request: ControlRequest[R]) -> R:
        if self._ends_at is not None and isinstance(request, self._ends_at):
            raise FleetEnded("the fleet was ended by its owner")
        return await self._fleet.call(request)

    @property
    def commands(self) -> list[tuple[str, ...]]:
        return self._fleet.commands

    def claim(self) -> None:
        if self._owner is not None:
            raise ClusterError(f"in use by {self._owner}")
        self.done.append("claim")

    def end(self) -> None:
        self.done.append("end")


@pytest.mark.parametrize(
    ("ends_at", "done"),
    [(GetConfiguration, ["end"]), (WaitView, ["claim", "end"])],
    ids=["before", "meanwhile"],
)
async def test_a_fleet_that_has_ended_is_not_adopted_and_its_controller_is_killed(
    monkeypatch: pytest.MonkeyPatch, ends_at: type[Any], done: list[str]
) -> None:
    config = BatonConfig()
    found = Found(config, ends_at=ends_at)
    monkeypatch.setattr(module, "controller_actor", object)
    monkeypatch.setattr(module, "OwnedController", lambda *_: found)
    assert await find_fleet(config, keys_digest(derive_keys(SECRET)), MODEL_PATH) is None
    assert found.done == done


async def test_a_fleet_whose_owner_has_begun_to_end_it_since_the_check_is_not_adopted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner died while it ended the fleet, which may drain for minutes."""

    class Ending(Found):
        async def call(self, request: ControlRequest[R]) -> R:
            if self.done == ["claim"]:
                raise ClusterError("the fleet is ending; try again when it has ended")
            return await super().call(request)

    config = BatonConfig()
    found = Ending(config)
    monkeypatch.setattr(module, "controller_actor", object)
    monkeypatch.setattr(module, "OwnedController", lambda *_: found)
    with pytest.raises(ClusterError, match="the fleet is ending"):
        await find_fleet(config, keys_digest(derive_keys(SECRET)), MODEL_PATH)
    assert found.done == ["claim"], "its controller goes on"


async def test_a_fleet_of_another_version_is_named_and_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfAnotherVersion(Found):
        async def call(self, request: ControlRequest[R]) -> R:
            raise versions_differ(99)

    config = BatonConfig()
    found = OfAnotherVersion(config)
    monkeypatch.setattr(module, "controller_actor", object)
    monkeypatch.setattr(module, "OwnedController", lambda *_: found)
    with pytest.raises(
        ClusterError, match=r"a fleet named 'baton' .* cannot be adopted: .* version 99 of the control plane"
    ):
        await find_fleet(config, keys_digest(derive_keys(SECRET)), MODEL_PATH)
    assert not found.done


async def test_a_fleet_is_adopted_once_it_has_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    config, digest = BatonConfig(), keys_digest(derive_keys(SECRET))
    owned, free = (Found(config, owner=owner) for owner in ("process 7", None))
    monkeypatch.setattr(module, "controller_actor", object)
    monkeypatch.setattr(module, "OwnedController", lambda *_: owned)
    with pytest.raises(ClusterError, match="in use by process 7"):
        await find_fleet(config, digest, MODEL_PATH)
    monkeypatch.setattr(module, "OwnedController", lambda *_: free)
    adopted: object = await find_fleet(config, digest, MODEL_PATH)
    assert adopted is free
    assert (owned.done, free.done) == ([], ["claim"])


async def test_of_two_commands_that_find_a_fleet_without_an_owner_one_adopts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray_store = FakeRayStore(monkeypatch)
    checked = asyncio.Barrier(2)

    async def check_adoption(*_: object) -> None:
        await checked.wait()  # neither has heard of an owner

    async def adopt(job: str) -> str:
        ray_store.act_as(job)
        try:
            return "adopted" if await find_fleet(BatonConfig(), "", MODEL_PATH) else "none"
        except ClusterError as error:
            return str(error)

    monkeypatch.setattr(module, "controller_actor", lambda: SimpleNamespace(_actor_id=bytes(8)))
    monkeypatch.setattr(module, "_check_adoption", check_adoption)
    monkeypatch.setattr(module, "ControlClient", lambda *_: Found(BatonConfig()))
    outcomes = await asyncio.gather(*[asyncio.create_task(adopt(job)) for job in ("01000000", "02000000")])
    (refusal,) = [outcome for outcome in outcomes if outcome != "adopted"]
    assert re.match(
        r"a fleet named 'baton' is in use by another command on this cluster \(process 70[12] on 10",
        refusal,
    )


async def test_an_adopted_fleet_is_scaled_though_it_began_with_the_same_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner that died may have scaled the fleet since then, by the counts of its own file."""
    config = BatonConfig.from_mapping({"cluster": {"prefill": 1, "decode": 3}})
    found = Found(config)

    async def find(*_: object) -> Found:
        return found

    monkeypatch.setattr(fleet_module, "find_fleet", find)
    said: list[str] = []
    control: object = await RayFleet(config, "", MODEL_PATH, said.append).start(lambda *_: None)
    assert control is found
    assert said == [
        "took over the running fleet 'baton', which had no owner; its workers keep the `logging` and "
        "`gateway.max_in_flight` that they started with"
    ]
    assert found.commands == [("scale", "prefill", "1"), ("scale", "decode", "3")]


@pytest.mark.parametrize(
    ("refusal", "done"),
    [(None, ["shutdown", "end"]), (ClusterError("256 commands are running"), [])],
    ids=["a signal", "a refusal"],
)
async def test_only_a_signal_ends_a_fleet_that_is_still_scaled_after_its_adoption(
    monkeypatch: pytest.MonkeyPatch, refusal: ClusterError | None, done: list[str]
) -> None:
    scales = asyncio.Event()

    class Scaled(Found):
        has_answered = True

        async def call(self, request: ControlRequest[R]) -> R:
            assert isinstance(request, ScaleRole)
            scales.set()
            if refusal is not None:
                raise refusal
            await asyncio.Event().wait()
            raise AssertionError

        async def shutdown(self, *, may_drain: bool) -> None:
            assert may_drain
            self.done.append("shutdown")

    found = Scaled(BatonConfig())

    async def find(*_: object) -> Found:
        return found

    monkeypatch.setattr(fleet_module, "find_fleet", find)
    fleet = RayFleet(BatonConfig(), "", MODEL_PATH, lambda _: None)
    start = asyncio.create_task(fleet.start(lambda *_: None))
    await scales.wait()
    if refusal is None:
        start.cancel()
    with pytest.raises(asyncio.CancelledError if refusal is None else ClusterError):
        await start
    await fleet.end(asyncio.Event())
    assert found.done == done


async def test_a_ray_whose_head_has_restarted_does_not_hide_why_the_command_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnLostRay(Found):
        has_answered = True

        async def shutdown(self, *, may_drain: bool) -> None:
            raise ClusterError(f"the fleet's controller did not answer (may drain: {may_drain})")

        def end(self) -> None:
            super().end()
            raise AuthenticationError("WrongClusterID")

    found = OnLostRay(BatonConfig())

    async def find(*_: object) -> Found:
        return found

    monkeypatch.setattr(fleet_module, "find_fleet", find)
    fleet = RayFleet(BatonConfig(), "", MODEL_PATH, lambda _: None)
    await fleet.start(lambda *_: None)
    await fleet.end(asyncio.Event())
    assert found.done == ["end"]


def test_the_controllers_actor_gets_no_password_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: list[object] = []

    class Actor:
        def remote(self, *given: object) -> None:
            arguments.extend(given)

    monkeypatch.setattr(module, "as_actor", lambda *_, **__: Actor())
    monkeypatch.setattr(module, "_of_head", dict)
    begun = Found(BatonConfig())
    monkeypatch.setattr(module, "OwnedController", lambda *_: begun)
    gateway = {"response_store": "redis://:password@redis:6379", "max_in_flight": 9}
    begin_fleet(BatonConfig.from_mapping({"gateway": gateway}), "digest", MODEL_PATH)
    assert arguments == [BatonConfig.from_mapping({"gateway": {"max_in_flight": 9}}), "digest", MODEL_PATH]
    assert begun.done == ["claim"]


@pytest.mark.parametrize("has_head", [True, False])
def test_the_controller_runs_on_the_head(monkeypatch: pytest.MonkeyPatch, has_head: bool) -> None:
    """The loss of any other node does not end it."""
    head = {"Alive": has_head, "Resources": {HEAD: 1.0}}
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0}}, head])
    options: dict[str, Any] = {}
    monkeypatch.setattr(module, "as_actor", lambda _kind, **given: options.update(given) or Mock())
    monkeypatch.setattr(module, "OwnedController", lambda *_: Found(BatonConfig()))
    begin_fleet(BatonConfig(), "digest", MODEL_PATH)
    assert options["resources"] == ({HEAD: 0.001} if has_head else {})
    assert "scheduling_strategy" not in options


@pytest.mark.parametrize(
    ("problem", "message", "done"),
    [
        (ClusterError("in use by process 7"), "in use by process 7", []),
        (RuntimeError("no answer"), "cannot become the owner of the new fleet 'baton': no answer", ["end"]),
    ],
    ids=["another owner", "Ray"],
)
def test_a_new_fleet_that_nobody_can_own_ends(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, message: str, done: list[str]
) -> None:
    """Otherwise, the fleet would keep its devices."""
    begun = Found(BatonConfig())
    monkeypatch.setattr(begun, "claim", Mock(side_effect=problem))
    monkeypatch.setattr(module, "as_actor", lambda *_, **__: Mock())
    monkeypatch.setattr(module, "_of_head", dict)
    monkeypatch.setattr(module, "OwnedController", lambda *_: begun)
    with pytest.raises(ClusterError, match=message):
        begin_fleet(BatonConfig(), "digest", MODEL_PATH)
    assert begun.done == done
