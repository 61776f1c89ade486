"""A worker inside a Ray actor: a plain class that Ray instantiates in a process of its own."""

import logging
import os
import socket
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray

from baton.config import BatonConfig, NetworkConfig
from baton.errors import ConfigError
from baton.messages.control import WORKER_CALLS, ControlRequest, Done
from baton.messages.control_codec import ControlCodec
from baton.system.cpus import CpuShare, Machine, find_machine, let_openmp_sleep
from baton.system.curve import ClusterKeys, derive_keys
from baton.system.garbage import imports, settle
from baton.system.hosts import WILDCARDS
from baton.system.logs import write_logs
from baton.system.paced import paced
from baton.system.secret import SECRET_VARIABLE, load_secret
from baton.worker import StartProgress, WorkerEndpoint, WorkerRole, WorkerStatus
from cluster.control_api.configuration import keys_digest

T = TypeVar("T")

logger = logging.getLogger(__name__)

ACTOR_THREADS = 16
"""How many calls an actor answers at once. A call occupies a thread until it returns, even if its caller has died."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """Where an actor runs, and its worker's endpoint, which is None if no worker serves there yet."""

    node_id: str
    host: str
    pid: int
    machine: Machine
    """The machine, as far as the actor's process may use it."""
    endpoint: WorkerEndpoint | None = None
    status: WorkerStatus | None = None
    """The status of this worker."""


@dataclass(frozen=True, slots=True)
class Introduce(ControlRequest[Introduction]):
    """Asks an actor where it runs. The answer arrives once the actor has a process."""


@dataclass(frozen=True, slots=True)
class StartWorker(ControlRequest[WorkerEndpoint]):
    """Loads the model and binds the ports. A repeated call gets the result or the error of the first."""

    share: CpuShare | None
    """The worker's CPU share; None on a GPU."""


@dataclass(frozen=True, slots=True)
class LatestProgress:
    """The latest progress of a worker's start; None once the start is over."""

    progress: StartProgress | None


@dataclass(frozen=True, slots=True)
class WaitProgress(ControlRequest[LatestProgress]):
    """Asks for the progress of a start. The answer arrives once there is progress since the last call."""


@dataclass(frozen=True, slots=True)
class StopWorker(ControlRequest[Done]):
    """Ends the worker, but not its actor."""


ACTOR_CODEC = ControlCodec((*WORKER_CALLS, Introduce, StartWorker, WaitProgress, StopWorker))


class WorkerActor:
    """The actor: a worker, and the one method that Ray calls."""

    def __init__(
        self, config: BatonConfig, digest: str, model_path: Path, role: WorkerRole, name: str
    ) -> None:
        """`digest`: see `keys_of_node`."""
        write_logs(config.logging, component="worker", fleet=config.cluster.name, worker=name)
        self._config = config
        self._digest = digest
        self._arguments = (model_path, role, name)
        self._progress = Latest[StartProgress]()
        self._log_download = paced(logger.info)
        self._starting = threading.Lock()
        self._endpoint: WorkerEndpoint | None = None
        self._start_error: Exception | None = None

    def call(self, frame: bytes) -> bytes:
        """The reply to a control call."""
        return ACTOR_CODEC.carry_out(frame, self._answer)

    def _answer(self, request: ControlRequest[Any]) -> object:
        match request:
            case Introduce():
                return self._introduce()
            case StartWorker():
                return self._start_once(request.share)
            case WaitProgress():
                return LatestProgress(self._progress.take_newest())
            case StopWorker():
                self._worker.stop()
                return Done()
        return self._control.call(request)

    def _introduce(self) -> Introduction:
        if self._endpoint is None:
            return introduction_here()
        status = self._worker.status()
        return replace(introduction_here(), endpoint=replace(self._endpoint, role=status.role), status=status)

    def _start_once(self, share: CpuShare | None) -> WorkerEndpoint:
        with self._starting:
            if self._start_error is not None:
                raise self._start_error
            try:
                return self._endpoint or self._start(share)
            except Exception as error:
                self._start_error = error
                raise

    def _start(self, share: CpuShare | None) -> WorkerEndpoint:
        # Ray reports an error in the constructor as the actor's death, so the worker starts here. The imports are here
        # because the controller imports this class and must not load torch.
        let_openmp_sleep()
        with imports():
            from engine.loading.pretrained import default_cache_dir, folder_here
            from worker.control_calls import WorkerControl
            from worker.process import build_worker

        config = on_node(self._config, ray.util.get_node_ip_address())
        keys = keys_of_node(config.network, self._digest)
        model_path, role, name = self._arguments
        try:
            model_path = folder_here(
                config.model.path,
                model_path,
                default_cache_dir(os.environ),
                self._report_download,
                weights=config.model.load_format == "auto",
            )
            self._worker = build_worker(config, keys, model_path, role, name, share)
            endpoint = self._worker.start(self._progress.put)
            settle()
        finally:
            self._progress.close()
        self._control = WorkerControl(self._worker)
        self._endpoint = endpoint
        return endpoint

    def _report_download(self, text: str, fraction: float) -> None:
        self._log_download(text, fraction)
        self._progress.put(StartProgress(text, round(1000 * fraction), 1000))


def introduction_here() -> Introduction:
    """The introduction of the actor in this process, without a worker."""
    node_id = ray.get_runtime_context().get_node_id()
    return Introduction(node_id, socket.gethostname(), os.getpid(), find_machine())


def keys_of_node(network: NetworkConfig, digest: str) -> ClusterKeys:
    """The cluster's keys, from the secret that this node has: neither secret nor keys travel through Ray.

    Raises ConfigError if the node has no secret, or another secret than the command that started the fleet.
    `digest`: that command's `keys_digest`.
    """
    keys = derive_keys(load_secret(network, os.environ, may_create=False))
    if keys_digest(keys) != digest:
        raise ConfigError(
            f"network.secret_file: the cluster secret on host {socket.gethostname()} differs from that of the "
            f"command that started the fleet; give this node the same file, or the same {SECRET_VARIABLE} before "
            "Ray starts there"
        )
    return keys


class Latest(Generic[T]):
    """Hands the latest of many values from one thread to another; values that were not taken in time are skipped."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._value: T | None = None
        self._is_closed = False

    def put(self, value: T) -> None:
        with self._changed:
            self._value = value
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the stream of values."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take_newest(self) -> T | None:
        """Waits for a value newer than the last one taken; None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._value is not None or self._is_closed)
            value, self._value = self._value, None
            return value


def on_node(config: BatonConfig, node_address: str) -> BatonConfig:
    """The configuration of a worker on one node. A worker that listens everywhere advertises its node's Ray address."""
    network = config.network
    if network.advertise_host is not None or network.bind_host not in WILDCARDS:
        return config
    advertised = network.with_values("network", advertise_host=node_address)
    return config.model_copy(update={"network": advertised})
