"""What a worker asks of Ray, and whether a cluster can hold a fleet."""

from typing import Any

import pytest
import ray

from baton.config import BatonConfig
from baton.errors import ClusterError
from baton.worker import WorkerRole
from cluster.on_ray.placement import (
    Bundle,
    NodeRoom,
    bundle_of,
    check_room,
    choose_node,
    fits,
    labels_of,
    labels_text,
    num_machines,
)


def test_a_cpu_worker_asks_for_its_cpus() -> None:
    config = BatonConfig.from_mapping({"cluster": {"cpus_per_worker": 0.5}})
    assert bundle_of(config, WorkerRole.PREFILL) == {"CPU": 0.5}


def test_a_cuda_worker_asks_for_one_gpu_too() -> None:
    config = BatonConfig.from_mapping({"engine": {"device": "cuda"}})
    assert bundle_of(config, WorkerRole.DECODE) == {"CPU": 1.0, "GPU": 1.0}


def test_a_worker_of_several_ranks_asks_for_a_gpu_and_its_cpus_for_each() -> None:
    config = BatonConfig.from_mapping(
        {
            "engine": {"device": "cuda", "tensor_parallel": 4},
            "cluster": {"prefill_tensor_parallel": 2, "cpus_per_worker": 1.5},
        }
    )
    assert bundle_of(config, WorkerRole.PREFILL) == {"CPU": 3.0, "GPU": 2.0}
    assert bundle_of(config, WorkerRole.DECODE) == {"CPU": 6.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("count", "nodes", "room"),
    [
        (2, [{"CPU": 2.0}], True),
        (3, [{"CPU": 2.0}], False),
        (3, [{"CPU": 2.0}, {"CPU": 1.0}], True),
        (2, [{"CPU": 1.5}, {"CPU": 1.5}], True),
        (3, [{"CPU": 1.5}, {"CPU": 1.5}], False),  # 3 CPUs in all, but no node has the third one whole
        (1, [], False),
        (1, [{"memory": 1e9}], False),
    ],
)
def test_room_is_counted_per_node(count: int, nodes: list[Bundle], room: bool) -> None:
    assert fits([{"CPU": 1.0}] * count, nodes) is room


def test_the_scarcest_resource_decides() -> None:
    nodes: list[Bundle] = [{"CPU": 16.0, "GPU": 2.0}]
    assert fits([{"CPU": 1.0, "GPU": 1.0}] * 2, nodes)
    assert not fits([{"CPU": 1.0, "GPU": 1.0}] * 3, nodes)


def test_fractions_are_not_lost_to_rounding() -> None:
    assert fits([{"CPU": 0.1}] * 3, [{"CPU": 0.3}])


def test_unequal_workers_find_room_side_by_side() -> None:
    small, large = {"GPU": 1.0}, {"GPU": 4.0}
    assert fits([small, small, large], [{"GPU": 2.0}, {"GPU": 4.0}])
    assert not fits([small, small, large], [{"GPU": 3.0}, {"GPU": 3.0}])  # ranks of one worker share a host


@pytest.mark.parametrize(
    ("resources", "bundle", "message"),
    [
        (
            {"CPU": 8.0},
            {"CPU": 1.0, "GPU": 1.0},
            "engine.device: got 'cuda', but Ray finds no GPU on any node",
        ),
        ({"CPU": 8.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, "no room for 2 workers of 1 CPU, 1 GPU each"),
        ({"CPU": 1.0}, {"CPU": 1.0}, "no room for 2 workers of 1 CPU each"),
    ],
)
def test_an_error_for_lack_of_room_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, resources: Bundle, bundle: Bundle, message: str
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": resources}])
    monkeypatch.setattr(ray, "available_resources", lambda: resources)
    with pytest.raises(ClusterError, match=message):
        check_room([bundle] * 2)
    check_room([{"CPU": 1.0}])


def test_a_role_may_ask_for_resources_and_labels_of_its_own() -> None:
    config = BatonConfig.from_mapping(
        {
            "cluster": {
                "ray_address": "auto",
                "prefill_resources": {"prefill": 1},
                "decode_labels": {"role": "decode"},
            }
        }
    )
    assert bundle_of(config, WorkerRole.PREFILL) == {"CPU": 1.0, "prefill": 1.0}
    assert bundle_of(config, WorkerRole.DECODE) == {"CPU": 1.0}
    assert labels_of(config, WorkerRole.PREFILL) == {}
    assert labels_of(config, WorkerRole.DECODE) == {"role": "decode"}


def test_an_error_for_lack_of_labelled_nodes_names_the_labels() -> None:
    labels = {"ray_address": "auto", "decode_labels": {"role": "decode", "zone": "in(a,b)"}}
    assert labels_text(BatonConfig.from_mapping({"cluster": labels})) == (
        "; decode workers go to nodes with labels {role: decode, zone: in(a,b)} only (cluster.decode_labels)"
    )
    assert labels_text(BatonConfig()) == ""


def room(
    node_id: str, num_workers: int = 0, cpus: float = 4.0, *, head: bool = False, **labels: str
) -> NodeRoom:
    return NodeRoom(node_id, head, {"CPU": cpus}, labels, num_workers)


@pytest.mark.parametrize(
    ("rooms", "chosen"),
    [
        ([room("a", 1), room("b")], "b"),  # the fewest of the fleet
        ([room("a", head=True), room("b", 3)], "b"),  # the head last
        ([room("a", head=True), room("b", cpus=0.5)], "a"),
        ([room("b"), room("a")], "a"),
        ([room("a", cpus=0.0)], None),
        ([], None),
    ],
)
def test_workers_are_spread_and_the_head_is_the_last_resort(
    rooms: list[NodeRoom], chosen: str | None
) -> None:
    assert choose_node({"CPU": 1.0}, {}, rooms) == chosen


def test_labels_that_a_node_must_have() -> None:
    rooms = [room("a", zone="x"), room("b", 5, zone="y")]
    assert choose_node({"CPU": 1.0}, {"zone": "y"}, rooms) == "b"
    assert choose_node({"CPU": 1.0}, {"zone": "z"}, rooms) is None
    assert choose_node({"CPU": 1.0}, {"zone": "!x"}, rooms) is None  # a condition, which Ray will see to


def test_a_node_that_leaves_takes_nothing_whatever_room_it_has() -> None:
    leaving = NodeRoom("a", False, {"CPU": 8.0}, {}, 0, is_draining=True)
    staying = NodeRoom("b", True, {"CPU": 1.0}, {}, 3)
    assert choose_node({"CPU": 1.0}, {}, [leaving, staying]) == "b"
    assert choose_node({"CPU": 2.0}, {}, [leaving, staying]) is None


def test_another_node_is_preferred_to_those_where_the_worker_failed_to_start() -> None:
    rooms = [room("a"), room("b", 3), room("c", head=True)]
    assert choose_node({"CPU": 1.0}, {}, rooms, failed_on={"a"}) == "b"
    assert choose_node({"CPU": 1.0}, {}, rooms, failed_on={"b"}) == "a"
    assert choose_node({"CPU": 1.0}, {}, [rooms[0], rooms[2]], failed_on={"a"}) == "a", "the head last"
    assert choose_node({"CPU": 1.0}, {}, [*rooms, room("d", 4)], failed_on={"a", "b"}) == "d"


def node(host: str, cpus: float, *, is_draining: bool = False, **labels: str) -> NodeRoom:
    return NodeRoom(f"id of {host}", False, {}, labels, 0, is_draining, host, {"CPU": cpus})


@pytest.mark.parametrize(
    ("cluster", "nodes", "count"),
    [
        ({}, [node("a", 2.0)], 1),
        ({}, [node("a", 1.0)], 2),  # the other worker's pod is not up yet
        ({"prefill": 4, "decode": 8}, [node("a", 1.0)], 12),
        ({"prefill": 4, "decode": 8}, [node("a", 5.0), node("b", 5.0)], 3),
        ({"decode_tensor_parallel": 2}, [node("a", 2.0)], 2),
        ({"prefill": 0}, [node("a", 1.0)], 1),
        ({"prefill": 0, "decode_tensor_parallel": 2}, [node("a", 2.0), node("b", 1.0)], 1),
        ({}, [node("a", 2.0), node("b", 2.0), node("head", 0.0)], 2),
        ({}, [node("a", 2.0), node("b", 2.0, is_draining=True)], 1),
        ({}, [node("a", 1.0), node("a", 1.0)], 1),  # two nodes of Ray on one machine
        ({}, [node("elsewhere", 2.0)], 2),
    ],
)
def test_a_fleet_spreads_over_the_machines_that_it_finds_or_needs(
    cluster: dict[str, Any], nodes: list[NodeRoom], count: int
) -> None:
    assert num_machines(BatonConfig.from_mapping({"cluster": cluster}), "a", nodes) == count


def test_only_machines_with_a_role_s_labels_count() -> None:
    labels = {"prefill_labels": {"zone": "x"}, "decode_labels": {"zone": "x"}, "ray_address": "auto"}
    nodes = [node("a", 8.0, zone="x"), node("b", 8.0, zone="y"), node("c", 8.0)]
    assert num_machines(BatonConfig.from_mapping({"cluster": labels}), "a", nodes) == 1
    labels["decode_labels"] = {"zone": "!x"}
    assert num_machines(BatonConfig.from_mapping({"cluster": labels}), "a", nodes) == 3


def test_a_machine_for_autoscaling_s_most_workers_is_expected() -> None:
    config = BatonConfig.from_mapping({"autoscaling": {"mode": "on", "max_decode": 3}})
    assert num_machines(config, "a", [node("a", 2.0)]) == 2
