"""`build_worker`: which CPUs a worker lends, and which CPUs of others it may borrow."""

import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from baton.config import BatonConfig
from baton.system.cpus import Core, CpuShare, Machine
from baton.worker import WorkerRole
from tests.factories.security import KEYS
from worker import process

MACHINE = Machine(tuple(Core((2 * i, 2 * i + 1), 0) for i in range(4)), 4)
"""Four cores with two logical CPUs each."""


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The class LentCpus."""
    lent_cpus = Mock()
    monkeypatch.setattr(process, "LentCpus", lent_cpus)
    monkeypatch.setattr(process, "native_library", Mock())
    monkeypatch.setattr(process, "pin", Mock())
    monkeypatch.setattr(process, "find_machine", lambda: MACHINE)
    return lent_cpus


def build(share: CpuShare | None, **cluster: Any) -> None:
    config = BatonConfig.from_mapping({"cluster": {"name": "fleet", **cluster}})
    process.build_worker(config, KEYS, Path("model"), WorkerRole.DECODE, "d0", share)


def test_a_worker_borrows_one_cpu_of_each_core_that_is_not_its_own(lent: Mock) -> None:
    build(CpuShare(1, (2, 3)))
    (_, own, others, fleet), _ = lent.call_args
    assert (set(own), set(others), fleet) == ({2, 3}, {0, 4, 6}, "fleet")


def test_a_worker_of_several_ranks_only_lends(lent: Mock) -> None:
    build(CpuShare(1, (0, 1, 2, 3)), decode_tensor_parallel=2)
    (_, own, others, _), _ = lent.call_args
    assert (set(own), set(others)) == ({0, 1, 2, 3}, set())


@pytest.mark.parametrize(
    ("share", "cluster"),
    [
        (None, {}),
        (CpuShare(4), {}),
        (CpuShare(1, (2, 3)), {"lend_cores": False}),
        (CpuShare(1, (1023, 1024)), {}),
    ],
    ids=["no share", "not pinned", "lend_cores: false", "a CPU with too high a number"],
)
def test_a_worker_that_lends_nothing(lent: Mock, share: CpuShare | None, cluster: dict[str, Any]) -> None:
    build(share, **cluster)
    assert not lent.called


def test_without_shared_memory_a_worker_starts_and_says_so(
    lent: Mock, caplog: pytest.LogCaptureFixture
) -> None:
    lent.side_effect = FileNotFoundError(2, "No such file or directory", "/dev/shm")
    with caplog.at_level(logging.WARNING):
        build(CpuShare(1, (2, 3)))
    assert "this worker lends and borrows no cores: [Errno 2] No such file" in caplog.text
