"""Which cores a process may use, and pinning to some of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.system.cpus import Core, Machine, choose_cpus, cpus_in_text, cpus_text, find_machine


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


def make_root(root: Path, **files: str) -> Path:
    """A root folder with these files; `__` separates folders in their names."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.usefixtures("four_cpus")
def test_siblings_are_one_core_and_cores_are_ordered_by_node(tmp_path: Path) -> None:
    system = tmp_path / "sys/devices/system"
    for node, text in ((0, "1,3\n"), (1, "0,2\n")):
        make_root(system / f"node/node{node}", cpulist=text)
    for cpu, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        make_root(system / f"cpu/cpu{cpu}", topology__thread_siblings_list=f"{siblings}\n")
    assert find_machine(tmp_path) == Machine((Core((1, 3), 0), Core((0, 2), 1)), 2)


@pytest.mark.usefixtures("four_cpus")
def test_without_a_topology_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert find_machine(tmp_path) == Machine(tuple(Core((cpu,), 0) for cpu in range(4)), 4)


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("files", "num_cores"),
    [
        ({"proc__self__cgroup": "0::/pod\n", "sys__fs__cgroup__pod__cpu.max": "250000 100000\n"}, 2),
        ({"proc__self__cgroup": "0::/pod\n", "sys__fs__cgroup__pod__cpu.max": "max 100000\n"}, 4),
        ({"proc__self__cgroup": "0::/pod/box\n", "sys__fs__cgroup__pod__cpu.max": "10000 100000\n"}, 1),
        ({"proc__self__cgroup": "0::/gone\n", "sys__fs__cgroup__cpu.max": "300000 100000\n"}, 3),
        (
            {
                "proc__self__cgroup": "3:memory:/a\n2:cpu,cpuacct:/b\n",
                "sys__fs__cgroup__cpu,cpuacct__b__cpu.cfs_quota_us": "200000\n",
                "sys__fs__cgroup__cpu,cpuacct__b__cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc__self__cgroup": "2:cpu:/b\n",
                "sys__fs__cgroup__cpu__b__cpu.cfs_quota_us": "-1\n",
                "sys__fs__cgroup__cpu__b__cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        ({"proc__self__cgroup": "0::/pod\n", "sys__fs__cgroup__pod__cpu.max": "900000 100000\n"}, 4),
    ],
)
def test_a_quota_limits_the_cores_and_forbids_pinning(
    tmp_path: Path, files: dict[str, str], num_cores: int
) -> None:
    machine = find_machine(make_root(tmp_path, **files))
    assert (machine.num_cores, machine.may_pin) == (num_cores, num_cores == 4)


@pytest.mark.usefixtures("four_cpus")
def test_a_quota_of_more_cpus_than_cores_forbids_pinning_too(tmp_path: Path) -> None:
    for cpu, siblings in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        make_root(
            tmp_path / f"sys/devices/system/cpu/cpu{cpu}", topology__thread_siblings_list=f"{siblings}\n"
        )
    make_root(
        tmp_path, proc__self__cgroup="0::/pod\n", **{"sys__fs__cgroup__pod__cpu.max": "300000 100000\n"}
    )
    machine = find_machine(tmp_path)
    assert (len(machine.cores), machine.num_cores, machine.may_pin) == (2, 2, False)


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize("text", ["", "max", "much 100000", "200000 0"])
def test_a_quota_in_an_unknown_form_is_none(tmp_path: Path, text: str) -> None:
    root = make_root(tmp_path, proc__self__cgroup="0::/pod\n", **{"sys__fs__cgroup__pod__cpu.max": text})
    assert find_machine(root) == find_machine(tmp_path / "no such root")


def test_this_machine_has_a_core() -> None:
    machine = find_machine()
    assert {cpu for core in machine.cores for cpu in core.cpus} == os.sched_getaffinity(0)
    assert 1 <= machine.num_cores <= len(machine.cores)


def test_cpus_are_chosen_whole_cores_at_a_time() -> None:
    cores = [Core((0, 4), 0), Core((1, 5), 0), Core((2, 6), 1)]
    assert choose_cpus(cores, 2) == (0, 1, 4, 5)
    assert choose_cpus(cores, 3) == (0, 1, 2, 4, 5, 6)
    assert choose_cpus(cores, 4) == choose_cpus(cores, 0) == ()


@pytest.mark.parametrize(("cpus", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 8, 10, 11), "0-2,8,10-11")])
def test_cpus_as_text(cpus: tuple[int, ...], text: str) -> None:
    assert cpus_text(cpus) == text
    assert cpus_in_text(text) == cpus


def test_threads_that_run_and_those_to_come_are_pinned() -> None:
    program = """
import os, threading
from baton.system.cpus import pin
seen, may_look = [], threading.Event()
def look():
    may_look.wait()
    seen.append(os.sched_getaffinity(0))
before = threading.Thread(target=look)
before.start()
cpu = max(os.sched_getaffinity(0))
pin([])
pin([cpu])
may_look.set()
after = threading.Thread(target=look)
after.start()
before.join(); after.join()
assert seen == [{cpu}, {cpu}], seen
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
