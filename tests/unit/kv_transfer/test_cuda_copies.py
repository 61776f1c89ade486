"""Runs as rows: the same bytes, in as few calls of the driver as their distances allow."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.cuda.memory import MAX_PITCH, MIN_ROWS, in_rows, queue_copies
from kv_transfer.transport.base import Runs, TransportError
from tests.factories.fake_cuda import FakeDriver, FakeHost
from tests.factories.pool_readers import make_runs

Flat = list[tuple[int, int, int]]


def flat(runs: Runs) -> Flat:
    return list(zip(runs.remote.tolist(), runs.local.tolist(), runs.lengths.tolist(), strict=True))


def unrolled(runs: Runs) -> Flat:
    """What the rows say."""
    return [
        (rows.remote + row * rows.remote_step, rows.local + row * rows.local_step, rows.row_nbytes)
        for rows in in_rows(runs)
        for row in range(rows.num_rows)
    ]


SMALL = st.integers(0, 3)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(SMALL, SMALL, st.integers(0, 2)), max_size=12))
def test_rows_are_the_same_runs_in_the_same_order(runs: Flat) -> None:
    assert unrolled(make_runs(*runs)) == runs


def test_heads_of_planes_become_one_copy_each_plane() -> None:
    heads = [
        (plane * 1000 + head * 64, plane * 4000 + head * 128, 32) for plane in range(5) for head in range(8)
    ]
    rows = list(in_rows(make_runs(*heads)))
    assert [row.num_rows for row in rows] == [8] * 5
    assert {(row.remote_step, row.local_step) for row in rows} == {(64, 128)}


def test_neither_overlapping_nor_far_nor_backward_steps_are_rows() -> None:
    for step in (31, MAX_PITCH + 1, -64):
        runs = make_runs(*((5 * 2**33 + row * step, row * 64, 32) for row in range(5)))
        assert [rows.num_rows for rows in in_rows(runs)] == [1] * 5
        swapped = Runs(runs.local, runs.remote, runs.lengths)
        assert [rows.num_rows for rows in in_rows(swapped)] == [1] * 5


@pytest.mark.parametrize(("takes_rows", "num_calls"), [(True, 3), (False, MIN_ROWS + 2)])
def test_the_bytes_arrive_whether_or_not_the_device_takes_rows(takes_rows: bool, num_calls: int) -> None:
    host = FakeHost()
    driver = FakeDriver(host, takes_rows=takes_rows)
    source, to, stream = driver.allocate(4096), driver.allocate(4096), driver.make_stream()
    host.memories[source][:] = np.random.default_rng(0).bytes(4096)
    regular = [(row * 100, 1000 + row * 64, 32) for row in range(MIN_ROWS)]
    others = [(3000, 0, 5), (3100, 7, 5)]
    queue_copies(driver, make_runs(*regular, *others), source, to, stream)
    expected = bytearray(4096)
    for there, here, length in regular + others:
        expected[here : here + length] = host.memories[source][there : there + length]
    assert host.memories[to] == expected
    assert driver.num_queued == num_calls


def test_what_plain_copies_are_refused_too_is_an_error() -> None:
    driver = FakeDriver(FakeHost(), is_slow=True, room=1, takes_rows=False)
    memory, stream = driver.allocate(4096), driver.make_stream()
    with pytest.raises(TransportError, match="out of memory"):
        queue_copies(
            driver, make_runs(*((row * 64, row * 32, 16) for row in range(8))), memory, memory, stream
        )
    assert len(driver.queued) == 1
