"""How workers share a machine's cores: equal parts unless the configuration says otherwise, and no core twice."""

from typing import Any

import pytest

from baton.config import BatonConfig
from baton.system.cpus import Core, CpuShare, Machine
from baton.worker import WorkerRole
from cluster.controller.cpu_shares import CpuShares, divide
from cluster.controller.desired import worker_names

P, D = WorkerRole.PREFILL, WorkerRole.DECODE


def make_machine(num_cores: int, num_nodes: int = 1) -> Machine:
    cores = tuple(Core((number,), number * num_nodes // num_cores) for number in range(num_cores))
    return Machine(cores, num_cores)


def make_config(cluster: dict[str, Any], **sections: dict[str, Any]) -> BatonConfig:
    return BatonConfig.from_mapping({"cluster": cluster, **sections})


def shares_of(config: BatonConfig, machine: Machine) -> list[CpuShare]:
    shares, alive, taken = CpuShares(config), list[str](), []
    for name, role in worker_names(config.cluster):
        taken.append(shares.reserve(name, role, "here", machine, alive))
        alive.append(name)
    return taken


@pytest.mark.parametrize(
    ("cluster", "num_cores", "num_nodes", "prefill", "decode"),
    [
        ({"prefill": 1, "decode": 1}, 2, 1, (1, 1), (1, 1)),
        ({"prefill": 1, "decode": 1}, 8, 1, (4, 4), (4, 4)),
        ({"prefill": 1, "decode": 2}, 8, 1, (2, 2), (2, 2)),
        ({"prefill": 0, "decode": 1}, 8, 1, (4, 4), (8, 8)),
        ({"prefill": 1, "decode": 1, "prefill_num_threads": 6}, 8, 1, (6, 6), (2, 2)),
        (
            {"prefill": 1, "decode": 1, "prefill_num_threads": 1, "decode_num_threads": 1},
            8,
            1,
            (1, 4),
            (1, 4),
        ),
        ({"prefill": 1, "decode": 1, "decode_tensor_parallel": 3}, 8, 1, (2, 2), (2, 2)),
        ({"prefill": 4, "decode": 4}, 8, 2, (2, 2), (2, 2)),
        ({"prefill": 1, "decode": 1}, 8, 4, (8, 8), (8, 8)),
        ({"prefill": 2, "decode": 1}, 2, 1, (1, 0), (1, 0)),
        ({"prefill": 1, "decode": 1, "decode_num_threads": 4}, 2, 1, (1, 0), (4, 0)),
    ],
)
def test_threads_and_cores_of_each_rank(
    cluster: dict[str, Any],
    num_cores: int,
    num_nodes: int,
    prefill: tuple[int, int],
    decode: tuple[int, int],
) -> None:
    config = make_config(cluster)
    assert divide(config, D, num_cores, num_nodes) == decode
    assert divide(config, P, num_cores, num_nodes) == prefill


def test_num_threads_of_the_engine_are_those_of_both_roles() -> None:
    config = make_config({"prefill": 1, "decode": 1, "decode_num_threads": 3}, engine={"num_threads": 1})
    assert (divide(config, P, 4), divide(config, D, 4)) == ((1, 1), (3, 3))


def test_room_is_kept_for_workers_that_autoscaling_may_start() -> None:
    config = make_config({"prefill": 1, "decode": 1}, autoscaling={"mode": "on", "max_decode": 3})
    assert divide(config, D, 8) == (2, 2)
    off = make_config({"prefill": 1, "decode": 1}, autoscaling={"mode": "off", "max_decode": 3})
    assert divide(off, D, 8) == (4, 4)


def test_workers_of_one_machine_get_cores_of_their_own() -> None:
    config = make_config({"prefill": 1, "decode": 1})
    assert shares_of(config, make_machine(4)) == [CpuShare(2, (0, 1)), CpuShare(2, (2, 3))]


def test_a_worker_keeps_within_a_numa_node_and_the_next_one_goes_to_the_other() -> None:
    config = make_config({"prefill": 1, "decode": 2})
    shares = shares_of(config, make_machine(12, num_nodes=2))
    assert [share.cpus for share in shares] == [(0, 1, 2, 3), (6, 7, 8, 9), (4, 5, 10, 11)], (
        "the last fits in none"
    )
    assert shares_of(make_config({"prefill": 0, "decode": 1}), make_machine(4, 2)) == [
        CpuShare(4, (0, 1, 2, 3))
    ]


def test_more_workers_than_cores_are_not_pinned() -> None:
    assert shares_of(make_config({"prefill": 1, "decode": 2}), make_machine(2)) == [CpuShare(1)] * 3


def test_under_a_quota_workers_share_its_threads_and_are_not_pinned() -> None:
    machine = Machine(make_machine(16).cores, 4, may_pin=False)
    assert shares_of(make_config({"prefill": 1, "decode": 1}), machine) == [CpuShare(2)] * 2


def test_a_replica_keeps_its_cores_and_those_of_a_former_worker_are_free() -> None:
    shares, machine = CpuShares(make_config({"prefill": 1, "decode": 1})), make_machine(2)
    first = shares.reserve("w0", P, "here", machine, [])
    second = shares.reserve("w1", D, "here", machine, ["w0"])
    assert (first.cpus, second.cpus) == ((0,), (1,))
    assert shares.reserve("w0", P, "here", machine, ["w0", "w1"]) == first, (
        "its next incarnation may overlap this one"
    )
    assert shares.reserve("w2", D, "here", machine, ["w0", "w1"]).cpus == (), "there is none left"
    assert shares.reserve("w3", D, "here", machine, ["w0"]).cpus == (1,)


def test_the_cores_of_a_worker_that_was_removed_are_forgotten() -> None:
    shares, machine = CpuShares(make_config({"prefill": 1, "decode": 1})), make_machine(2)
    shares.reserve("w0", P, "here", machine, [])
    for host in ("here", "there"):
        shares.note("w1", host, CpuShare(1, (1,)))
    shares.forget("w1")
    assert shares.reserve("w1", D, "here", machine, []).cpus == (0,)
    assert shares.reserve("w1", D, "there", machine, []).cpus == (0,)
    assert shares.reserve("w0", P, "here", machine, []).cpus == (0,)


def test_cores_are_counted_by_node_also_those_that_a_former_controller_gave() -> None:
    shares, machine = CpuShares(make_config({"prefill": 1, "decode": 1})), make_machine(2)
    shares.note("w0", "left", CpuShare(1, (0,)))
    assert shares.reserve("w1", D, "left", machine, ["w0"]).cpus == (1,)
    assert shares.reserve("w2", D, "right", machine, ["w0", "w1"]).cpus == (0,)
    assert shares.reserve("w0", P, "right", machine, ["w1", "w2"]).cpus == (1,), "it has moved"


def test_cores_that_another_worker_got_meanwhile_are_not_given_twice() -> None:
    shares, machine = CpuShares(make_config({"prefill": 1, "decode": 1})), make_machine(2)
    shares.reserve("w0", P, "here", machine, [])
    assert shares.reserve("w1", D, "here", machine, ["w0"]).cpus == (1,)
    assert shares.reserve("w2", D, "here", machine, ["w0"]).cpus == (1,), "w1 has no process"
    assert shares.reserve("w1", D, "here", machine, ["w0", "w2"]).cpus == ()
    assert shares.reserve("w1", D, "here", machine, ["w0"]).cpus == (1,), "w2 has none either"


def test_cores_of_a_worker_whose_next_incarnation_failed_elsewhere_are_still_its_own() -> None:
    shares, machine = CpuShares(make_config({"prefill": 1, "decode": 1})), make_machine(2)
    first = shares.reserve("w0", P, "left", machine, [])
    shares.reserve("w0", P, "right", machine, [])
    assert shares.reserve("w1", D, "left", machine, ["w0"]).cpus == (1,)
    assert shares.reserve("w0", P, "left", machine, ["w0", "w1"]) == first


def test_a_worker_that_changed_its_role_keeps_the_threads_of_its_cores() -> None:
    config = make_config({"prefill": 1, "decode": 2, "prefill_num_threads": 6, "decode_num_threads": 1})
    shares, machine = CpuShares(config), make_machine(8)
    assert shares.reserve("w0", P, "here", machine, []) == CpuShare(6, (0, 1, 2, 3, 4, 5))
    assert shares.reserve("w1", D, "here", machine, ["w0"]) == CpuShare(1, (6,))
    assert shares.reserve("w1", P, "here", machine, ["w0"]) == CpuShare(1, (6,))
    assert shares.reserve("w0", D, "here", machine, ["w1"]) == CpuShare(6, (0, 1, 2, 3, 4, 5))
