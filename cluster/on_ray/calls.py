"""Calls of Ray actors, with our own errors instead of Ray's; the only module that knows `ray.remote`.

`ray.remote` hides a class's types from checkers, so classes stay plain, are wrapped here, and the one `Any` of this
package is the handle's actor.
"""

import os
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.errors import BatonError, ClusterError

T = TypeVar("T")


def as_actor(kind: type, **options: Any) -> Any:
    """The class, ready to be made with `.remote(...)` as an actor that outlives whoever makes it."""
    return ray.remote(kind).options(lifetime="detached", **options)


_ENDS = (
    ("running low on memory", "Ray ended its process, because its node ran out of memory"),
    ("its node has died", "its node is lost"),
    ("killed by `ray.kill`", "it was ended by `ray.kill`"),
    ("worker process has died", "its process died, as by a crash, a SIGKILL or for lack of memory"),
)
"""How Ray words the end of an actor, and how we do. The first one that occurs counts."""


async def answer(reference: Awaitable[T], who: str | None) -> T:
    """What a call returns or raises; ClusterError, in one line, if `who` fails otherwise, or is gone.

    Without a `who` the line does not say who it was: for whoever says that anyway.
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
        raise ClusterError(f"{who} is gone: {reason}" if who else reason) from None


async def kill_process(pid: int, node_id: str) -> None:
    """SIGKILL for a Ray worker that does not hear Ray any more, as one that was stopped; on whichever node it is."""
    if node_id == ray.get_runtime_context().get_node_id():
        _kill(pid)
        return
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    on_node: Any = ray.remote(_kill)
    await answer(on_node.options(num_cpus=0, scheduling_strategy=strategy).remote(pid), f"node {node_id}")


def _kill(pid: int) -> None:
    try:
        if (
            Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
        ):  # else the number is another's by now
            os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass


def why_gone(error: RayError) -> str:
    """The reason that Ray gives, without the description of the actor that precedes it."""
    text = " ".join(str(error).split())
    for sign, reason in _ENDS:
        if sign in text:
            return reason
    if isinstance(error, ActorUnavailableError):
        return "its process or its node cannot be reached"
    return text[max(0, text.find("The actor is dead because")) :][:300]
