"""How workers share the cores of the machines they are on; knows no process and no Ray.

Only for engines that compute on a CPU. Each rank's threads are as many as the configuration says; where it says
nothing, ranks get equal parts of what is left. The cores of a machine are divided in the same proportions.
"""

from collections.abc import Collection

from baton.config import BatonConfig
from baton.system.cpus import CpuShare, Machine, choose_cpus
from baton.worker import WorkerRole


class CpuShares:
    """Remembers which worker has which CPUs of which node. A replica keeps its CPUs, whatever process fills it."""

    def __init__(self, config: BatonConfig) -> None:
        self._config = config
        self._cpus: dict[str, tuple[str, tuple[int, ...]]] = {}
        """By worker: its node, and its CPUs there."""

    def take(
        self,
        name: str,
        role: WorkerRole,
        node: str,
        machine: Machine,
        alive: Collection[str],
        num_nodes: int = 1,
    ) -> CpuShare:
        """The share of a worker that is about to start. `alive`: the workers that have processes; `num_nodes`: over
        which the fleet spreads.

        It is not pinned if too few cores are free, or if the machine's cores are not this process's own.
        """
        num_threads, num_cores = divide(self._config, role, machine.num_cores, num_nodes)
        if not machine.may_pin:
            return CpuShare(num_threads)
        before = self._cpus.pop(name, None)
        if before is None or before[0] != node:
            others = [self._cpus[other] for other in alive if other in self._cpus]
            taken = {cpu for where, cpus in others if where == node for cpu in cpus}
            free = [core for core in machine.cores if taken.isdisjoint(core.cpus)]
            before = node, choose_cpus(free, num_cores * self._config.num_ranks(role))
        self._cpus[name] = before
        return CpuShare(num_threads, before[1])

    def note(self, name: str, node: str, cpus: tuple[int, ...]) -> None:
        """A worker that a former controller started has these."""
        self._cpus[name] = node, cpus


def divide(config: BatonConfig, role: WorkerRole, num_cores: int, num_nodes: int = 1) -> tuple[int, int]:
    """Threads and cores of each rank of a worker of this role, if the fleet spreads over so many such machines.

    0 cores if all threads together are more than the cores: then no worker is pinned, and the system balances them.
    """
    num_ranks = {each: _most_workers(config, each) * config.num_ranks(each) for each in WorkerRole}
    num_ranks[role] = max(num_ranks[role], config.num_ranks(role))  # also a role that the fleet began without
    threads = {each: config.num_threads(each) for each in WorkerRole}
    total = num_cores * num_nodes
    left = total - sum(num_ranks[each] * (threads[each] or 0) for each in WorkerRole)
    num_open = sum(num_ranks[each] for each in WorkerRole if threads[each] is None)
    equal = max(1, min(num_cores, left // max(1, num_open)))
    wanted = sum(num_ranks[each] * (threads[each] or equal) for each in WorkerRole)
    num_threads = threads[role] or equal
    return num_threads, min(num_cores, num_threads * total // wanted) if wanted <= total else 0


def _most_workers(config: BatonConfig, role: WorkerRole) -> int:
    """The workers that the fleet begins with; under autoscaling, the most it may have."""
    if config.autoscaling.mode == "off":
        return int(getattr(config.cluster, role.value))
    return config.worker_bounds(role)[1]
