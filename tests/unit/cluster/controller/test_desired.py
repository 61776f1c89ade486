"""Which workers there are to be, and that a controller's next incarnation reads what the last one wrote."""

from baton.config import ClusterConfig
from baton.worker import WorkerRole
from cluster.controller.desired import DesiredFleet


def test_it_begins_as_configured_and_names_say_no_role() -> None:
    desired = DesiredFleet.of(ClusterConfig(prefill=1, decode=2))
    assert [(replica.name, replica.role) for replica in desired.replicas.values()] == [
        ("w0", WorkerRole.PREFILL),
        ("w1", WorkerRole.DECODE),
        ("w2", WorkerRole.DECODE),
    ]


def test_a_name_is_never_used_twice() -> None:
    desired = DesiredFleet.of(ClusterConfig())
    del desired.replicas["w1"]
    assert desired.add(WorkerRole.DECODE).name == "w2"
    assert [desired.is_former(name) for name in ("w0", "w1", "w2", "w3", "prefill-0")] == [
        False,
        True,
        False,
        False,
        False,
    ]


def test_what_is_written_is_what_is_read() -> None:
    desired = DesiredFleet.of(ClusterConfig())
    desired.add(WorkerRole.PREFILL).num_starts = 7
    desired.replicas["w1"].is_draining = True
    assert DesiredFleet.from_json(desired.to_json()) == desired
    assert [replica.name for replica in desired.with_role(WorkerRole.DECODE)] == []
