"""RayCarrier: how long a call waits for a controller, and which actor is a controller."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from ray.exceptions import AuthenticationError, RpcError

from baton.errors import ClusterError, FleetEnded
from baton.messages.control import WaitStart
from cluster.on_ray import carrier as carrier_module
from cluster.on_ray.carrier import (
    CONTROLLER_CODEC,
    CONTROLLER_NAME,
    RESTART_S,
    RayCarrier,
    controller_actor,
)
from cluster.on_ray.controller import ControllerActor


class SilentActor:
    """Never answers a call."""

    def __init__(self) -> None:
        self.call = self

    def remote(self, frame: bytes) -> "asyncio.Future[Any]":
        assert frame
        return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(("start_s", "waits_s"), [(200.0, 202.0), (1.0, RESTART_S + 2.0)])
async def test_a_controller_that_still_starts_is_waited_for(start_s: float, waits_s: float) -> None:
    bounds: list[float] = []

    def no_time(bound_s: float) -> asyncio.Timeout:
        bounds.append(bound_s)
        return asyncio.timeout(0.0)

    carrier = RayCarrier(SilentActor(), start_s)
    frame = CONTROLLER_CODEC.frame(0, 2.0, WaitStart(-1, 2.0))
    with (
        patch.object(carrier_module, "awake_timeout", no_time),
        patch.object(carrier_module, "answer", _answer),
    ):
        with pytest.raises(ClusterError, match=f"did not answer for {waits_s:g} s"):
            await carrier.exchange(frame)
        carrier.has_answered = True
        with pytest.raises(ClusterError, match=f"did not answer for {RESTART_S + 2.0:g} s"):
            await carrier.exchange(frame)
    assert bounds == [waits_s, RESTART_S + 2.0]


async def test_a_fleet_ends_with_a_process_of_its_private_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        carrier_module, "lost_process", lambda: "Ray's process raylet (7) was killed by SIGKILL"
    )
    frame = CONTROLLER_CODEC.frame(0, 2.0, WaitStart(-1, 2.0))
    with pytest.raises(
        FleetEnded, match=r"^the fleet has ended: Ray's process raylet \(7\) was killed by SIGKILL$"
    ):
        await RayCarrier(SilentActor()).exchange(frame, hangs_after_s=1.0)


@pytest.mark.parametrize(
    ("answer_of_ray", "error"),
    [
        ([CONTROLLER_NAME], ClusterError),
        ([], FleetEnded),
        (AuthenticationError("WrongClusterID: perhaps GCS has restarted"), FleetEnded),
        (RpcError("GCS is unavailable"), ClusterError),
    ],
    ids=["it restarts", "it has ended", "Ray's head has restarted", "Ray's head is away"],
)
async def test_a_controller_that_does_not_answer_has_ended_if_rays_head_does_not_know_it(
    monkeypatch: pytest.MonkeyPatch, answer_of_ray: list[str] | Exception, error: type[Exception]
) -> None:
    """`ray.get_actor` finds the controller each time: it remembers names."""
    carrier = RayCarrier(SilentActor())
    carrier.actor._actor_id = b"its id"
    monkeypatch.setattr("ray.get_actor", lambda _name: carrier.actor)
    monkeypatch.setattr("ray.util.list_named_actors", Mock(side_effect=[answer_of_ray]))
    monkeypatch.setattr(carrier, "ask_or_kill", Mock(side_effect=ClusterError("it did not answer")))
    frame = CONTROLLER_CODEC.frame(0, 2.0, WaitStart(-1, 2.0))
    with pytest.raises(error) as raised:
        await carrier.exchange(frame, hangs_after_s=1.0)
    assert type(raised.value) is error


def test_an_actor_of_another_program_is_no_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(kind: str) -> Any:
        return SimpleNamespace(_ray_actor_creation_function_descriptor=SimpleNamespace(class_name=kind))

    monkeypatch.setattr("ray.get_actor", lambda _name: named("Trainer"))
    with pytest.raises(ClusterError, match=r"another program \(class Trainer\) .* use another cluster\.name"):
        controller_actor()
    ours = named(ControllerActor.__name__)
    monkeypatch.setattr("ray.get_actor", lambda _name: ours)
    assert controller_actor() is ours


async def _answer(reply: "asyncio.Future[Any]", _who: str) -> Any:
    return await reply
