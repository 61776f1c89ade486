"""A worker inside a Ray actor: a plain class that Ray makes in a process of its own."""

import os
import socket
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import ray

from baton.config import BatonConfig
from baton.system.curve import ClusterKeys
from baton.system.garbage import settle
from baton.system.hosts import WILDCARDS
from baton.system.logs import write_logs
from baton.worker import StartProgress, WorkerEndpoint, WorkerRole, WorkerStatus

T = TypeVar("T")

ACTOR_THREADS = 16
"""A call takes one. Besides those under way there may be some whose caller died."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """Where an actor lives, and what its worker is; no endpoint if it does not serve (yet)."""

    node_id: str
    host: str
    pid: int
    endpoint: WorkerEndpoint | None


class WorkerActor:
    """What runs inside the actor's process: a worker, and an event that ends with it."""

    def __init__(
        self, config: BatonConfig, keys: ClusterKeys, model_path: Path, role: WorkerRole, name: str
    ) -> None:
        write_logs(config.logging, component="worker", fleet=config.cluster.name, worker=name)
        self._config = config
        self._arguments = (keys, model_path, role, name)
        self._stopped = threading.Event()
        self._progress = Latest[StartProgress]()
        self._endpoint: WorkerEndpoint | None = None

    def introduce(self) -> Introduction:
        endpoint = self._endpoint
        if endpoint is not None:
            endpoint = replace(endpoint, role=self._worker.status().role)
        return Introduction(
            ray.get_runtime_context().get_node_id(), socket.gethostname(), os.getpid(), endpoint
        )

    def start(self) -> WorkerEndpoint:
        # Not in the constructor, whose errors Ray reports as the actor's death; and imported here, so that the
        # controller, which only names this class, does not load torch.
        from worker.process import build_worker

        config = on_node(self._config, ray.util.get_node_ip_address())
        self._worker = build_worker(config, *self._arguments)
        try:
            self._endpoint = self._worker.start(self._progress.put)
            settle()
        finally:
            self._progress.close()
        self._worker.when_ended(self._stopped.set)
        return self._endpoint

    def next_progress(self) -> StartProgress | None:
        """Waits until `start` has got further than when last asked; None once it is over."""
        return self._progress.take()

    def status(self, after_s: float) -> WorkerStatus:
        """How the worker stands so much later, or as soon as it is stopped."""
        self._stopped.wait(after_s)
        return self._worker.status()

    def drain(self, timeout_s: float) -> bool:
        return self._worker.drain(timeout_s)

    def set_role(self, role: WorkerRole, timeout_s: float) -> None:
        self._worker.set_role(role, timeout_s)

    def stop(self) -> None:
        self._worker.stop()
        self._stopped.set()


class Latest(Generic[T]):
    """Hands the latest of many values from one thread to another; what nobody took in time is passed over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._value: T | None = None
        self._is_closed = False

    def put(self, value: T) -> None:
        with self._changed:
            self._value = value
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing follows."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self) -> T | None:
        """The latest value since the last call, as soon as there is one; None after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._value is not None or self._is_closed)
            value, self._value = self._value, None
            return value


def on_node(config: BatonConfig, node_address: str) -> BatonConfig:
    """The configuration of a worker on one node: if it listens everywhere, others reach it where they reach its Ray."""
    network = config.network
    if network.advertise_host is not None or network.bind_host not in WILDCARDS:
        return config
    advertised = network.with_values("network", advertise_host=node_address)
    return config.model_copy(update={"network": advertised})
