"""The CPU cores that this process may use, and how to keep a process to some of them."""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.system.cgroups import cgroups

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core. Its logical CPUs share computing units, so a second thread gains little."""

    cpus: tuple[int, ...]
    """The logical CPUs of this core that this process may use."""
    node: int
    """The core's NUMA node: cores of one node share a memory controller."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use of its machine."""

    cores: tuple[Core, ...]
    """The cores in the affinity of this process, node by node."""
    num_cores: int
    """How many of the cores it may keep busy: fewer than all of them if a cgroup has a smaller quota."""
    may_pin: bool = True
    """False under a quota: other processes with a quota might be pinned to the same cores."""


@dataclass(frozen=True, slots=True)
class CpuShare:
    """A worker's part of its machine."""

    num_threads: int
    """How many threads of each rank compute."""
    cpus: tuple[int, ...] = ()
    """The logical CPUs that all threads of the worker keep to; empty: it is not pinned."""


def let_openmp_sleep() -> None:
    """Lets threads of OpenMP, with which PyTorch computes, sleep while they wait. Call this before PyTorch is imported.

    Threads that wait busily would take cores from the threads of our own kernels, and from the threads that they wait
    for.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def find_machine(root: Path = _ROOT) -> Machine:
    """Reads affinity, topology and quota. If the topology is unknown, each CPU counts as a core."""
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
    """The logical CPUs of `num_cores` of these cores, of one NUMA node if possible; empty if too few exist.

    If several nodes have enough cores, takes the node with the most of these cores: so workers spread over
    the memory controllers.
    """
    nodes = [[core for core in cores if core.node == node] for node in sorted({core.node for core in cores})]
    fitting = [node for node in nodes if len(node) >= num_cores]
    chosen = max(fitting, key=len) if fitting else [core for node in nodes for core in node]
    if len(chosen) < num_cores:
        return ()
    return tuple(sorted(cpu for core in chosen[:num_cores] for cpu in core.cpus))


def pin(cpus: Collection[int]) -> None:
    """Pins this process's threads, and the threads that they start, to these CPUs; does nothing if `cpus` is empty."""
    if not cpus:
        return
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:  # the thread has just ended
            continue


def cpus_text(cpus: Collection[int]) -> str:
    """The CPUs as Linux writes them, e.g. `0-3,8`."""
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
    """The quota of each cgroup around this process, in CPUs; cgroups without a quota are left out."""
    for folder in cgroups("cpu", root):
        yield from _quota_of(folder)


def _quota_of(folder: Path) -> Iterator[float]:
    """The quota of one cgroup, if it has a known one. Version 2 has one file for it, version 1 has two."""
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
