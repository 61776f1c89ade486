"""Ray's errors become Baton's: one line, without a name that the caller adds."""

import asyncio
from collections.abc import Awaitable
from unittest.mock import Mock

import pytest
from ray.exceptions import (
    ActorUnavailableError,
    AuthenticationError,
    RayActorError,
    RayError,
    RayTaskError,
)

from baton.errors import ClusterError, FleetError
from cluster.on_ray.calls import answer, kill_process

KILLED = """The actor died unexpectedly before finishing this task.
	class_name: WorkerActor
	actor_id: 7f1a
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) it was killed"""


async def _raise(error: Exception) -> None:
    raise error


def said(error: Exception, who: str | None) -> str:
    reference: Awaitable[None] = _raise(error)
    with pytest.raises(ClusterError) as raised:
        asyncio.run(answer(reference, who))
    assert raised.value.__cause__ is None
    return str(raised.value)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RayError(KILLED), "its process died, for example by a crash, by SIGKILL or for lack of memory"),
        (RayError("The actor is dead because its node has died. Node Id: 1f"), "its node is lost"),
        (
            RayError("The actor is dead because it was killed by `ray.kill`."),
            "it was ended by `ray.kill`",
        ),
        (
            RayError("worker process has died. Task was killed due to the node running low on memory."),
            "Ray ended its process, because its node ran out of memory",
        ),
        (
            RayActorError(
                error_msg="it died in __init__()\n  File\nbaton.errors.ConfigError: a: b\n",
                actor_init_failed=True,
            ),
            "it did not start: a: b",
        ),
        (ActorUnavailableError("RpcError: timeout", None), "its process or its node cannot be reached"),
        (
            RayError("class_name: A\nThe actor is dead because\nof this"),
            "The actor is dead because of this",
        ),
    ],
)
def test_the_end_of_an_actor_is_one_line(error: Exception, reason: str) -> None:
    assert said(error, None) == reason
    assert said(error, "node n") == f"node n is gone: {reason}"


def test_what_a_call_raises_comes_without_the_traceback_from_over_there() -> None:
    failed = RayTaskError("start", "Traceback (most recent call last):\n...", KeyError("blocks"))
    assert said(failed, None) == "KeyError: 'blocks'"
    assert said(failed, "the fleet's controller") == "the fleet's controller failed: KeyError: 'blocks'"


def test_our_own_errors_come_as_they_were_raised() -> None:
    with pytest.raises(FleetError, match="it is busy"):
        asyncio.run(answer(_raise(RayTaskError("drain", "Traceback", FleetError("it is busy"))), None))


def test_a_process_that_ray_cannot_reach_is_a_cluster_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart of Ray's head, Ray raises an error even before the call is sent."""
    remote = Mock()
    remote.return_value.options.return_value.remote.side_effect = AuthenticationError("WrongClusterID")
    monkeypatch.setattr("ray.remote", remote)
    monkeypatch.setattr("ray.get_runtime_context", Mock())
    with pytest.raises(ClusterError, match=r"node (b0){28} cannot be reached"):
        asyncio.run(kill_process(7, "b0" * 28))
