"""Calls of Ray actors, with Baton's errors instead of Ray's; the only module that uses `ray.remote`.

`ray.remote` hides a class's types from checkers. So classes stay plain and are wrapped here, and the actor handle is
the one `Any` of this package.
"""

import os
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.errors import BatonError, ClusterError

T = TypeVar("T")


class Unreachable(ClusterError):
    """The actor cannot be reached, perhaps only for a moment. It may carry out the call."""


def as_actor(kind: type, **options: Any) -> Any:
    """The class as a detached actor. `.remote(...)` creates the actor, which outlives its creator."""
    return ray.remote(kind).options(lifetime="detached", **options)


_ENDS = (
    ("running low on memory", "Ray ended its process, because its node ran out of memory"),
    ("its node has died", "its node is lost"),
    ("killed by `ray.kill`", "it was ended by `ray.kill`"),
    ("worker process has died", "its process died, for example by a crash, by SIGKILL or for lack of memory"),
)
"""Each row: a part of Ray's message about the end of an actor, and Baton's message instead. The first match counts."""


async def answer(reference: Awaitable[T], who: str | None) -> T:
    """The result of a call. Raises the call's BatonError, or a ClusterError for any other failure.

    The end of the actor is also a failure, and so is a broken connection to it (Unreachable). The message of the
    ClusterError is one line, which begins with `who`. `who` None: the caller adds the name.
    """
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, BatonError):
            raise error.cause from None
        failure = f"{type(error.cause).__name__}: {' '.join(str(error.cause).split())}"
        raise ClusterError(f"{who} failed: {failure}" if who else failure) from None
    except RayError as error:
        reason = why_gone(error)
        kind = Unreachable if isinstance(error, ActorUnavailableError) else ClusterError
        raise kind(f"{who} is gone: {reason}" if who else reason) from None


async def kill_process(pid: int, node_id: str) -> None:
    """Sends SIGKILL to a Ray worker process on any node, for processes that no longer react to Ray (SIGSTOP).

    Raises ClusterError if the node cannot be reached through Ray.
    """
    if node_id == ray.get_runtime_context().get_node_id():
        _kill(pid)
        return
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    on_node: Any = ray.remote(_kill)
    try:
        killing = on_node.options(num_cpus=0, scheduling_strategy=strategy).remote(pid)
    except RayError as error:  # Ray's head is unreachable, or has restarted
        raise ClusterError(f"node {node_id} cannot be reached: {why_gone(error)}") from None
    await answer(killing, f"node {node_id}")


def _kill(pid: int) -> None:
    try:
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):  # else the pid was reused
            os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass


def why_gone(error: RayError) -> str:
    """Ray's reason, without the description of the actor before it."""
    if isinstance(error, RayActorError) and error.actor_init_failed:  # the text is a traceback
        return f"it did not start: {str(error).strip().splitlines()[-1].partition(': ')[2]}"
    text = " ".join(str(error).split())
    for sign, reason in _ENDS:
        if sign in text:
            return reason
    if isinstance(error, ActorUnavailableError):
        return "its process or its node cannot be reached"
    return text[max(0, text.find("The actor is dead because")) :][:300]
