"""The CPU cores that this process may use, and how to keep a process to some of them."""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core. Its logical CPUs share the units that compute, so a second thread there gains little."""

    cpus: tuple[int, ...]
    """The logical CPUs of this core that this process may use."""
    node: int
    """Its NUMA node: cores of one node share a memory controller."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use of its machine."""

    cores: tuple[Core, ...]
    """Those of its affinity, node by node."""
    num_cores: int
    """How many of them it may keep busy: fewer than there are where a cgroup has a smaller quota."""
    may_pin: bool = True
    """Under a quota no core is this process's own: others with a quota would be pinned to the same ones."""


@dataclass(frozen=True, slots=True)
class CpuShare:
    """A worker's part of its machine."""

    num_threads: int
    """Threads that compute, of each rank."""
    cpus: tuple[int, ...] = ()
    """The logical CPUs that all threads of the worker keep to; empty: it is not pinned."""

    @property
    def environment(self) -> dict[str, str]:
        """For the worker's process, before it loads OpenMP. Threads that share a core must not wait busily: they would
        keep the core from the thread that they wait for.
        """
        return {} if self.cpus else {"OMP_WAIT_POLICY": "PASSIVE"}


def find_machine(root: Path = _ROOT) -> Machine:
    """Reads the affinity, the topology and the quota. Where the topology is unknown, each CPU is a core of its own."""
    allowed = os.sched_getaffinity(0)
    system = root / "sys/devices/system"
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for cpu in _cpus_in(folder / "cpulist")
    }
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(allowed):
        siblings = _cpus_in(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") or (cpu,)
        mine = tuple(sorted(allowed.intersection(siblings) | {cpu}))
        cores.setdefault(mine, Core(mine, nodes.get(cpu, 0)))
    ordered = tuple(sorted(cores.values(), key=lambda core: (core.node, core.cpus)))
    quota = min(_quotas(root), default=float(len(allowed)))
    if quota >= len(allowed):
        return Machine(ordered, len(ordered))
    return Machine(ordered, max(1, min(len(ordered), int(quota))), may_pin=False)


def choose_cpus(cores: Collection[Core], num_cores: int) -> tuple[int, ...]:
    """The logical CPUs of so many of these cores, all of one NUMA node if one has enough; empty if there are too few.

    Of several such nodes, the one with the most cores in the list: workers spread over the memory controllers.
    """
    nodes = [[core for core in cores if core.node == node] for node in sorted({core.node for core in cores})]
    fitting = [node for node in nodes if len(node) >= num_cores]
    chosen = max(fitting, key=len) if fitting else [core for node in nodes for core in node]
    if len(chosen) < num_cores:
        return ()
    return tuple(sorted(cpu for core in chosen[:num_cores] for cpu in core.cpus))


def pin(cpus: Collection[int]) -> None:
    """Keeps all present threads of this process to these CPUs, and so those that they start; nothing if empty."""
    if not cpus:
        return
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:  # the thread has just ended
            continue


def cpus_text(cpus: Collection[int]) -> str:
    """As Linux writes it, e.g. `0-3,8`."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)


def cpus_in_text(text: str) -> tuple[int, ...]:
    """The inverse of `cpus_text`. ValueError for any other text."""
    spans = [span.partition("-") for span in text.split(",") if span]
    return tuple(cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1))


def _cpus_in(path: Path) -> tuple[int, ...]:
    """The list in a file; empty if there is no such file."""
    try:
        return cpus_in_text(path.read_text().strip())
    except OSError:
        return ()


def _quotas(root: Path) -> Iterator[float]:
    """The CPUs' worth of time that each cgroup around this process grants, where one does."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controllers  # version 2 names no controllers
        own = base / path.lstrip("/")
        for folder in [own, *own.parents]:
            if folder.is_relative_to(base):
                yield from _quota_of(folder)


def _quota_of(folder: Path) -> Iterator[float]:
    """Version 2 has one file, version 1 two. Nothing where they are missing, or say something unknown."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return
