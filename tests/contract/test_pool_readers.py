"""What every PoolReader promises, whatever moves the bytes."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer.transport.base import MAX_DESCRIPTION_BYTES, Bytes, PoolReader, Runs, TransportError
from tests.factories.pool_readers import IMPLEMENTATIONS, AnyOwner, finish, make_owner, make_runs, pattern

BLOCK = 64 * 1024
NUM_BLOCKS = 64
NBYTES = NUM_BLOCKS * BLOCK


@pytest.fixture(scope="module", params=list(IMPLEMENTATIONS))
def implementation(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if not IMPLEMENTATIONS[name].is_available():
        pytest.skip(f"{name} cannot run here: {IMPLEMENTATIONS[name].needs}")
    return name


@pytest.fixture(scope="module")
def owner(implementation: str) -> Iterator[AnyOwner]:
    with make_owner(implementation, NBYTES, seed=1) as owner:
        yield owner


@pytest.fixture
def mortal(implementation: str) -> Iterator[AnyOwner]:
    """An owner for one test only. The test may stop it or kill it."""
    with make_owner(implementation, NBYTES, seed=2) as owner:
        yield owner


@pytest.fixture
def pool(implementation: str) -> Bytes:
    return IMPLEMENTATIONS[implementation].allocate(NBYTES).reshape(NUM_BLOCKS, BLOCK)


@pytest.fixture
def reader(implementation: str, pool: Bytes) -> Iterator[PoolReader]:
    reader = IMPLEMENTATIONS[implementation].make(pool)
    yield reader
    reader.close()


def whole_pool() -> Runs:
    return make_runs((0, 0, NBYTES))


def expected(owner: AnyOwner, runs: Runs) -> Bytes:
    """A pool of zeros after these runs were read into it."""
    pool = np.zeros(NBYTES, np.uint8)
    for remote, local, length in zip(runs.remote, runs.local, runs.lengths, strict=True):
        pool[local : local + length] = owner.pattern[remote : remote + length]
    return pool.reshape(NUM_BLOCKS, BLOCK)


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param(make_runs((3 * BLOCK, 7 * BLOCK, BLOCK)), id="one block"),
        pytest.param(make_runs(*((i * BLOCK, (63 - i) * BLOCK, BLOCK) for i in range(64))), id="reversed"),
        pytest.param(make_runs(*((i * BLOCK, i * BLOCK, BLOCK) for i in range(9))), id="adjoining"),
        pytest.param(make_runs(*((i * 4096, i * 8192 + 512, 512) for i in range(500))), id="strided pieces"),
        pytest.param(make_runs((1, NBYTES - 3, 3), (NBYTES - 1, 5, 1)), id="odd bytes at the edges"),
        pytest.param(make_runs((0, BLOCK, 0), (5, 9, 4)), id="an empty run"),
        pytest.param(make_runs(), id="nothing"),
    ],
)
def test_the_right_bytes_arrive_and_no_others_change(
    owner: AnyOwner, reader: PoolReader, pool: Bytes, runs: Runs
) -> None:
    remote = reader.open(owner.description)
    number = remote.read(runs)
    assert finish(reader, [number]) == {number: None}
    np.testing.assert_array_equal(pool, expected(owner, runs))
    remote.close()


def test_a_pool_is_read_as_it_is_now(mortal: AnyOwner, reader: PoolReader, pool: Bytes) -> None:
    remote = reader.open(mortal.description)
    for seed in (11, 12):
        mortal.refill(seed)
        finish(reader, [remote.read(whole_pool())])
        np.testing.assert_array_equal(pool.reshape(-1), mortal.pattern)


def test_many_reads_at_once_from_two_pools(
    owner: AnyOwner, mortal: AnyOwner, reader: PoolReader, pool: Bytes
) -> None:
    owners = (owner, mortal)
    remotes = [reader.open(each.description) for each in owners]
    numbers = [remotes[i % 2].read(make_runs((i * BLOCK, i * BLOCK, BLOCK))) for i in range(NUM_BLOCKS)]
    assert finish(reader, numbers) == dict.fromkeys(numbers)
    for i in range(NUM_BLOCKS):
        np.testing.assert_array_equal(pool[i], owners[i % 2].pattern.reshape(pool.shape)[i])


def test_reads_go_on_and_on(owner: AnyOwner, reader: PoolReader, pool: Bytes) -> None:
    remote = reader.open(owner.description)
    for i in range(2000):
        number = remote.read(make_runs((i % NUM_BLOCKS * BLOCK, 0, BLOCK)))
        assert finish(reader, [number]) == {number: None}
    np.testing.assert_array_equal(pool[0], owner.pattern.reshape(pool.shape)[1999 % NUM_BLOCKS])


def test_a_process_can_read_its_own_pool(implementation: str, reader: PoolReader, pool: Bytes) -> None:
    source = IMPLEMENTATIONS[implementation].allocate(NBYTES)
    source[:] = pattern(NBYTES, seed=3)
    other = IMPLEMENTATIONS[implementation].make(source)
    description = other.describe()
    assert description is not None
    number = reader.open(description).read(whole_pool())
    assert finish(reader, [number]) == {number: None}
    np.testing.assert_array_equal(pool.reshape(-1), source)
    other.close()


def test_a_pool_can_be_opened_twice(owner: AnyOwner, reader: PoolReader) -> None:
    first, second = reader.open(owner.description), reader.open(owner.description)
    first.close()
    first.close()
    number = second.read(whole_pool())
    assert finish(reader, [number]) == {number: None}
    third = reader.open(owner.description)
    second.close()
    number = third.read(whole_pool())
    assert finish(reader, [number]) == {number: None}


def test_a_description_is_small_and_stays_the_same(reader: PoolReader) -> None:
    description = reader.describe()
    assert description is not None
    assert len(description) <= MAX_DESCRIPTION_BYTES
    assert reader.describe() == description


@pytest.mark.parametrize(
    "description",
    [b"", b"\0", b"nixl", bytes(MAX_DESCRIPTION_BYTES), bytes(MAX_DESCRIPTION_BYTES + 1)],
    ids=["empty", "a zero", "a word", "zeros", "too long"],
)
def test_what_is_no_description_is_refused(reader: PoolReader, description: bytes) -> None:
    with pytest.raises(TransportError):
        reader.open(description)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_description_that_was_cut_is_refused(
    owner: AnyOwner, reader: PoolReader, data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, len(owner.description) - 1))
    with pytest.raises(TransportError):
        reader.open(owner.description[:length])


def test_the_pool_of_a_process_that_is_gone_cannot_be_opened(mortal: AnyOwner, reader: PoolReader) -> None:
    mortal.kill()
    with pytest.raises(TransportError):
        reader.open(mortal.description)


@pytest.mark.parametrize(
    "run",
    [
        (NBYTES, 0, 1),
        (NBYTES - 1, 0, 2),
        (-1, 0, 1),
        (0, -1, 1),
        (0, NBYTES, 1),
        (0, NBYTES - 1, 2),
        (2**63 - 1, 0, 1),
        (2**62, 0, 2**62),
        (0, 0, -1),
    ],
)
def test_runs_outside_a_pool_are_refused(
    owner: AnyOwner, reader: PoolReader, pool: Bytes, run: tuple[int, int, int]
) -> None:
    remote = reader.open(owner.description)
    with pytest.raises(TransportError):
        remote.read(make_runs((0, 0, BLOCK), run))
    assert reader.poll() == []
    assert not pool.any()


def test_a_closed_pool_is_not_read(owner: AnyOwner, reader: PoolReader, pool: Bytes) -> None:
    remote = reader.open(owner.description)
    remote.close()
    with pytest.raises(TransportError):
        remote.read(whole_pool())
    assert not pool.any()


@pytest.mark.parametrize("is_warm", [False, True], ids=["first", "later"])
def test_a_read_from_a_killed_process_ends_with_an_error_or_with_what_was_there(
    mortal: AnyOwner, owner: AnyOwner, reader: PoolReader, pool: Bytes, is_warm: bool
) -> None:
    remote = reader.open(mortal.description)
    if is_warm:
        finish(reader, [remote.read(whole_pool())])
    mortal.kill()
    pool[:] = 0
    errors = finish(reader, read_what_is_there(remote.read, whole_pool()))
    if None in errors.values():  # mapped memory outlives its process
        np.testing.assert_array_equal(pool.reshape(-1), mortal.pattern)
    remote.close()
    assert_reads(owner, reader, pool)


@pytest.mark.parametrize("is_warm", [False, True], ids=["first", "later"])
def test_a_process_killed_while_it_is_read(
    mortal: AnyOwner, owner: AnyOwner, reader: PoolReader, pool: Bytes, is_warm: bool
) -> None:
    remote = reader.open(mortal.description)
    if is_warm:
        finish(reader, [remote.read(whole_pool())])
    numbers = [remote.read(whole_pool()) for _ in range(4)]
    mortal.kill()
    for error in finish(reader, numbers).values():
        if error is None:
            np.testing.assert_array_equal(pool.reshape(-1), mortal.pattern)
    remote.close()
    assert_reads(owner, reader, pool)


@pytest.mark.parametrize("is_warm", [False, True], ids=["first", "later"])
def test_nothing_is_written_once_a_pool_is_closed(
    mortal: AnyOwner, owner: AnyOwner, reader: PoolReader, pool: Bytes, is_warm: bool
) -> None:
    """The peer does not answer, so a reader that needs its help cannot end its reads otherwise."""
    remote, other = reader.open(mortal.description), reader.open(owner.description)
    if is_warm:
        finish(reader, [remote.read(whole_pool())])
    mortal.stop()
    numbers = [remote.read(whole_pool()) for _ in range(3)]
    remote.close()
    pool[:] = 0
    assert {done.number for done in reader.poll()} == set(numbers)
    mortal.resume()
    reader.poll()
    assert not pool.any()
    number = other.read(whole_pool())
    assert finish(reader, [number]) == {number: None}
    np.testing.assert_array_equal(pool.reshape(-1), owner.pattern)


def test_a_reader_may_be_closed_while_it_reads(mortal: AnyOwner, implementation: str, pool: Bytes) -> None:
    reader = IMPLEMENTATIONS[implementation].make(pool)
    remote = reader.open(mortal.description)
    mortal.stop()
    remote.read(whole_pool())
    reader.close()
    pool[:] = 0
    mortal.resume()
    assert not pool.any()


def read_what_is_there(read: Callable[[Runs], int], runs: Runs) -> list[int]:
    """The number of the read; none if the read cannot begin."""
    try:
        return [read(runs)]
    except TransportError:
        return []


def assert_reads(owner: AnyOwner, reader: PoolReader, pool: Bytes) -> None:
    """Checks that this pool can be read, whatever happened with other peers."""
    number = reader.open(owner.description).read(whole_pool())
    assert finish(reader, [number]) == {number: None}
    np.testing.assert_array_equal(pool.reshape(-1), owner.pattern)
