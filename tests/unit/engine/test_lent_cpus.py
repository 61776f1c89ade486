"""Lent CPUs: who may compute with a CPU, what follows if its worker or its borrower dies, and the file they share."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast
from unittest.mock import Mock, call

import pytest

from engine.lent_cpus import LendingPipeline, LentCpus
from engine.native.library import native_library
from engine.pipeline import ThreadedPipeline
from tests.unit.engine.test_pipeline import Echo, make_plan

HERE, THERE = (sorted(os.sched_getaffinity(0)) * 2)[:2]
"""Two CPUs: one of workers that compute, and one that is lent."""
NOWHERE = 1023
"""A CPU that no machine of ours has: of a worker that lends nothing, and runs on HERE."""

pytestmark = pytest.mark.usefixtures("forked_workers")

needs_two_cpus = pytest.mark.skipif(
    native_library() is None or HERE == THERE, reason="needs a C++ compiler and two CPUs"
)

WORKER = """
import ctypes, json, os, sys, time
from pathlib import Path
import numpy as np
from engine.lent_cpus import LentCpus
from engine.native.library import native_library
from engine.native.products import FloatLayer, Products, STORE

folder, cpu, own, *others = sys.argv[1:]
os.sched_setaffinity(0, {int(cpu)})
library = native_library()
products = Products(library)
FLOAT32, NUM_ROWS, NUM_INPUTS, NUM_OUTPUTS = 0, 128, 576, 3072
weights_OI = np.random.default_rng(0).random((NUM_OUTPUTS, NUM_INPUTS), np.float32)
packed = np.zeros(products.float_packed_bytes(NUM_OUTPUTS, NUM_INPUTS, FLOAT32), np.uint8)
products.float_pack(weights_OI.ctypes.data, NUM_OUTPUTS, NUM_INPUTS, FLOAT32, packed.ctypes.data, 1)
layer = FloatLayer(packed.ctypes.data, None, NUM_OUTPUTS, NUM_INPUTS, FLOAT32, 0)
x_TI = weights_OI[:NUM_ROWS]

def multiply():
    y_TO = np.zeros((NUM_ROWS, NUM_OUTPUTS), np.float32)
    x, y = (x_TI.ctypes.data, NUM_INPUTS, FLOAT32), (y_TO.ctypes.data, NUM_OUTPUTS, FLOAT32)
    products.float_product.one(ctypes.byref(layer), *x, *y, NUM_ROWS, STORE, 1)
    return y_TO

alone_TO = multiply()
lent = LentCpus(library, [int(own)], [int(cpu) for cpu in others], "fleet", Path(folder))
for line in sys.stdin:
    before = lent.borrowed_s()
    match line.strip():
        case "begin step":
            lent.begin_step()
        case "end step":
            lent.end_step()
            time.sleep(0.01)  # CPUs are lent a little later
        case "multiply":
            for _ in range(100):  # so that a guest gets its CPU on a busy machine, too
                assert np.array_equal(multiply(), alone_TO)
    print(json.dumps(lent.borrowed_s() - before), flush=True)
"""


class Worker:
    """A process with LentCpus, which computes products."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def begin_step(self) -> None:
        self._tell("begin step")

    def end_step(self) -> None:
        self._tell("end step")

    def borrows(self) -> bool:
        """Multiplies, and returns whether CPUs of others helped."""
        return self._tell("multiply") > 0.0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _tell(self, command: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(command, file=self.process.stdin, flush=True)
        return cast("float", json.loads(self.process.stdout.readline()))


@contextmanager
def worker(folder: Path, cpu: int, own: int, *others: int) -> Iterator[Worker]:
    """A worker on this CPU, which lends `own`."""
    command = [
        sys.executable,
        "-m",
        "tests.factories.code",
        WORKER,
        str(folder),
        *map(str, (cpu, own, *others)),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


@needs_two_cpus
def test_a_step_computes_with_the_cpu_of_a_worker_that_computes_nothing(tmp_path: Path) -> None:
    with worker(tmp_path, HERE, HERE, THERE) as busy, worker(tmp_path, THERE, THERE, HERE) as lender:
        assert not busy.borrows(), "no step is under way"
        busy.begin_step()
        assert not busy.borrows(), "the other worker may still load"
        lender.begin_step()
        assert not lender.borrows(), "a worker in a step lends nothing"
        lender.end_step()
        assert busy.borrows()
        lender.begin_step()
        assert not busy.borrows(), "its worker has taken the CPU back"
        lender.end_step()
        assert busy.borrows()
        busy.end_step()
        assert not busy.borrows()


@needs_two_cpus
def test_one_worker_at_a_time_borrows_a_cpu(tmp_path: Path) -> None:
    with (
        worker(tmp_path, THERE, THERE) as lender,
        worker(tmp_path, HERE, HERE, THERE) as first,
        worker(tmp_path, HERE, NOWHERE, THERE) as second,
    ):
        lender.end_step()
        first.begin_step()
        second.begin_step()
        assert first.borrows()
        assert not second.borrows()
        first.end_step()
        assert second.borrows()


@needs_two_cpus
def test_the_death_of_a_worker_or_of_a_borrower_is_healed(tmp_path: Path) -> None:
    with worker(tmp_path, THERE, THERE) as lender, worker(tmp_path, HERE, NOWHERE, THERE) as second:
        second.begin_step()
        with worker(tmp_path, HERE, HERE, THERE) as borrower:
            lender.end_step()
            borrower.begin_step()
            assert borrower.borrows()
            borrower.kill()
        assert not second.borrows()
        lender.begin_step()
        lender.end_step()
        assert second.borrows(), "the worker that lends the CPU has taken it from the dead"
        lender.begin_step()
        lender.kill()
        assert not second.borrows(), "its worker has not reported that it computes nothing"
        with worker(tmp_path, THERE, THERE) as successor:
            assert not second.borrows()
            successor.end_step()
            assert second.borrows()
            successor.kill()
            assert second.borrows(), "a dead worker needs no CPU"


def test_cpus_are_lent_whenever_no_step_is_under_way() -> None:
    cpus = Mock(spec=LentCpus)
    pipeline = LendingPipeline(ThreadedPipeline(Echo()), cpus)
    assert cpus.mock_calls == [call.end_step()], "loading is over"
    cpus.reset_mock()
    pipeline.submit(make_plan(1))
    assert cpus.mock_calls == [call.begin_step()]
    pipeline.submit(make_plan(-1))
    pipeline.take_result()
    pipeline.submit(make_plan(3))
    pipeline.take_result()
    assert cpus.mock_calls == [call.begin_step()]
    assert pipeline.take_result().output is not None
    assert cpus.mock_calls == [call.begin_step(), call.end_step()]
    pipeline.submit(make_plan(4))
    cpus.reset_mock()
    pipeline.close()
    assert cpus.mock_calls == [call.end_step()]


def lent_cpus(folder: Path, fleet: str, error: int = 0) -> LentCpus:
    library = Mock(baton_open_lent_cpus=Mock(return_value=error))
    return LentCpus(library, [0], [1], fleet, folder)


def test_workers_of_a_fleet_share_a_file_which_the_last_one_removes(tmp_path: Path) -> None:
    workers = [lent_cpus(tmp_path, fleet) for fleet in ("a", "b", "a")]
    prefix = f"baton-cpus-1-{os.geteuid()}-{os.getppid()}"
    files = {tmp_path / f"{prefix}-a", tmp_path / f"{prefix}-b"}
    assert set(tmp_path.iterdir()) == files
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    workers[0].close()
    assert set(tmp_path.iterdir()) == files
    workers[1].close()
    workers[2].close()
    assert set(tmp_path.iterdir()) == set()


def test_an_error_names_the_file_that_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, "no room")))
    with pytest.raises(OSError, match=f"no room: '{tmp_path}/baton-cpus-"):
        lent_cpus(tmp_path, "a")


def test_a_file_whose_workers_all_died_is_removed(tmp_path: Path) -> None:
    ours, of_another = (f"baton-cpus-1-{os.geteuid() + more}-1-baton" for more in (0, 1))
    for name in (ours, of_another):
        (tmp_path / name).touch()
    in_use = lent_cpus(tmp_path, "a")
    lent_cpus(tmp_path, "b").close()
    assert {path.name for path in tmp_path.iterdir()} == {
        f"baton-cpus-1-{os.geteuid()}-{os.getppid()}-a",
        of_another,
    }
    in_use.close()


def test_a_worker_that_finds_its_file_removed_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, flock = lent_cpus(tmp_path, "a"), fcntl.flock

    def close_first(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        former.close()
        flock(file, how)

    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))  # it does not look at the file before
    monkeypatch.setattr(fcntl, "flock", close_first)
    successor = lent_cpus(tmp_path, "a")
    assert len(os.listdir(tmp_path)) == 1
    successor.close()
    assert os.listdir(tmp_path) == []


def test_what_is_no_file_of_this_user_stays(tmp_path: Path) -> None:
    """Another user may make such a file. At a pipe, a worker would wait for ever."""
    pipe, folder = (tmp_path / f"baton-cpus-1-{os.geteuid()}-{name}" for name in ("pipe", "folder"))
    os.mkfifo(pipe)
    folder.mkdir()
    lent_cpus(tmp_path, "fleet").close()
    assert set(tmp_path.iterdir()) == {pipe, folder}


def test_memory_that_cannot_be_shared_is_an_os_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        lent_cpus(tmp_path, "fleet", error=12)
    assert os.listdir(tmp_path) == []
    (tmp_path / f"baton-cpus-1-{os.geteuid()}-{os.getppid()}-link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        lent_cpus(tmp_path, "link")
    with pytest.raises(FileNotFoundError):
        lent_cpus(tmp_path / "missing", "fleet")
