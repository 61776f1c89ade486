"""Several Ray nodes on this machine, whose raylets may be killed and stopped; loopback only.

Ray reads its environment when it is first imported, so `prepare` comes before that, and the nodes live in a process of
their own: the one that runs tests.chaos.
"""

import os
import secrets
import signal
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import psutil

from tests.factories.sabotage import obeying

SYSTEM_CONFIG = {
    # No idle Python process per CPU.
    "prestart_worker_first_driver": False,
    # A lost node is noticed after about two seconds, instead of sixteen.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 4,
}
NUM_TRIES = 3
_STORE_BYTES = 80 * 2**20


def prepare(environment: MutableMapping[str, str], sabotage: Path | None = None) -> None:
    """Keeps Ray on loopback, and keeps other processes out. Only processes with this environment may join.

    Workers look in the folder `sabotage` for how to break.
    """
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    environment["RAY_AUTH_MODE"] = "token"
    environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if sabotage is not None:
        environment.update(obeying(sabotage))


class Machines:
    """A head that runs no work, and nodes that do. `kill` and `stop` hit a raylet as the kernel would."""

    def __init__(self, num_nodes: int, cpus_per_node: int) -> None:
        assert "RAY_AUTH_TOKEN" in os.environ, "prepare() first"
        self._cpus_per_node = cpus_per_node
        self._cluster: Any = _begin_cluster()
        self._num_wanted = num_nodes
        self.replenish()

    @property
    def address(self) -> str:
        address: str = self._cluster.address
        return address

    @property
    def raylet_pids(self) -> list[int]:
        """The pids of the raylets of the nodes that run work."""
        return [_raylet(node).pid for node in self._nodes]

    def raylet_of(self, pid: int) -> int:
        """The raylet of the node on which this process runs."""
        ancestors = {process.pid for process in psutil.Process(pid).parents()}
        return next(raylet for raylet in self.raylet_pids if raylet in ancestors)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on the nodes: Ray's own processes, workers, and the controller."""
        return psutil.Process().children(recursive=True)

    def kill(self, pid: int) -> None:
        """`kill -9` of a raylet. The node's workers notice this, and end. No other process of the node is left,
        either."""
        node = self._node_of(pid)
        os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)

    def replenish(self) -> int:
        """Replaces every node whose raylet is gone, for example because it was stopped for so long that the cluster
        gave it up. Returns the number of such nodes. If a new node does not start, the next call tries again."""
        for node in [node for node in self._nodes if _raylet(node).poll() is not None]:
            self._cluster.remove_node(node, allow_graceful=False)
        num_missing = self._num_wanted - len(self._nodes)
        for _ in range(num_missing):
            try:
                self._cluster.add_node(
                    wait=False, num_cpus=self._cpus_per_node, object_store_memory=_STORE_BYTES
                )
            except Exception as error:  # Ray raises a bare exception if a busy machine takes too long
                print(f"a node did not start: {error}", flush=True)
                break
        return num_missing

    def shut_down(self) -> None:
        for node in self._nodes:
            if _raylet(node).poll() is None:
                os.kill(_raylet(node).pid, signal.SIGCONT)  # a stopped process does not even die
        self._cluster.shutdown()

    @property
    def _nodes(self) -> list[Any]:
        return sorted(self._cluster.worker_nodes, key=lambda node: _raylet(node).pid)

    def _node_of(self, pid: int) -> Any:
        return next(node for node in self._nodes if _raylet(node).pid == pid)


def _begin_cluster() -> Any:
    """Begins a cluster with a head. Ray allows half a minute for the start, which may be too short on a busy
    machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    head: dict[str, Any] = {
        "num_cpus": 0,
        "include_dashboard": False,
        "object_store_memory": _STORE_BYTES,
        "_system_config": SYSTEM_CONFIG,
    }
    for _ in range(NUM_TRIES - 1):
        try:
            cluster.add_node(**head)
        except Exception as error:
            print(f"the head did not start: {error}", flush=True)
            cluster.shutdown()
        else:
            return cluster
    cluster.add_node(**head)
    return cluster


def _raylet(node: Any) -> Any:
    """The node's raylet, as a subprocess.Popen."""
    return node.all_processes["raylet"][0].process
