"""How workers share the cores of their machines; knows no process and no Ray.

Used only for engines that compute on a CPU. The configuration may set the number of threads of a rank. Ranks
without this setting get equal parts of the remaining cores. The cores of a machine are divided in proportion to the
threads.
"""

from collections.abc import Collection

from baton.config import BatonConfig
from baton.system.cpus import CpuShare, Machine, choose_cpus
from baton.worker import WorkerRole


class CpuShares:
    """Remembers each worker's share of each machine.

    After a restart or a change of role, a replica gets the same share again, unless another worker has its
    cores.
    """

    def __init__(self, config: BatonConfig) -> None:
        self._config = config
        self._pinned: dict[tuple[str, str], CpuShare] = {}
        """The latest pinned share of each worker on each host, by worker name and host. An entry stays when its worker
        ends, so that a replica that restarts gets its cores back."""

    def reserve(
        self,
        name: str,
        role: WorkerRole,
        host: str,
        machine: Machine,
        alive: Collection[str],
        num_nodes: int = 1,
    ) -> CpuShare:
        """The share of a worker that is about to start.

        `alive`: the workers that have processes on this host. `num_nodes`: the number of machines of the
        fleet. The share is not pinned if too few cores are free, or if `machine` does not allow it.
        """
        num_threads, num_cores = divide(self._config, role, machine.num_cores, num_nodes)
        if not machine.may_pin:
            return CpuShare(num_threads)
        others = [
            self._pinned[other, host] for other in alive if other != name and (other, host) in self._pinned
        ]
        taken = {cpu for share in others for cpu in share.cpus}
        free = [core for core in machine.cores if taken.isdisjoint(core.cpus)]
        before = self._pinned.pop((name, host), None)
        if before is not None and {cpu for core in free for cpu in core.cpus}.issuperset(before.cpus):
            share = before
        else:
            share = CpuShare(num_threads, choose_cpus(free, num_cores * self._config.num_ranks(role)))
        self.note(name, host, share)
        return share

    def note(self, name: str, host: str, share: CpuShare) -> None:
        """Records a worker's share, for example that of a worker that a former controller started."""
        if share.cpus:
            self._pinned[name, host] = share

    def forget(self, name: str) -> None:
        """Forgets the shares of a worker that was removed, since its name is never used again."""
        self._pinned = {key: share for key, share in self._pinned.items() if key[0] != name}


def divide(config: BatonConfig, role: WorkerRole, num_cores: int, num_nodes: int = 1) -> tuple[int, int]:
    """Threads and cores of each rank of a worker of this role, in a fleet on `num_nodes` machines with `num_cores`
    cores each.

    The number of cores is 0 if the fleet has more threads than cores. Then no worker is pinned, and the
    operating system balances the threads.
    """
    num_ranks = {each: most_workers(config, each) * config.num_ranks(each) for each in WorkerRole}
    # At its start, the fleet may have no worker of this role.
    num_ranks[role] = max(num_ranks[role], config.num_ranks(role))
    threads = {each: config.num_threads(each) for each in WorkerRole}
    total = num_cores * num_nodes
    rest = total - sum(num_ranks[each] * (threads[each] or 0) for each in WorkerRole)
    num_open = sum(num_ranks[each] for each in WorkerRole if threads[each] is None)
    equal = max(1, min(num_cores, rest // max(1, num_open)))
    wanted = sum(num_ranks[each] * (threads[each] or equal) for each in WorkerRole)
    num_threads = threads[role] or equal
    return num_threads, min(num_cores, num_threads * total // wanted) if wanted <= total else 0


def most_workers(config: BatonConfig, role: WorkerRole) -> int:
    """The number of workers of this role that the fleet begins with; with autoscaling, the maximum."""
    if config.autoscaling.mode == "off":
        return config.num_workers(role)
    return config.worker_bounds(role)[1]
