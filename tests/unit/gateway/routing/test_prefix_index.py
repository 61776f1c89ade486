"""The prefix index always equals the workers' reports, however they come, go and lose messages."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.messages.request_plane import KVEvents
from gateway.routing.prefix_index import LOG_SLACK, MIN_SWEEP, PrefixIndex, short_keys

CHAIN = [number.to_bytes(32, "big")[::-1] for number in range(16, 16 * 9, 16)]
KEYS = short_keys(CHAIN)


def hashes(*positions: int) -> bytes:
    return b"".join(CHAIN[position][:8] for position in positions)


def account(*positions: int) -> KVEvents:
    return KVEvents(0, True, b"", hashes(*positions))


def test_a_hit_is_a_prefix_without_a_gap() -> None:
    index = PrefixIndex()
    for worker, positions in {"w0": (0, 1, 2), "w1": (0, 2, 3), "w2": (1, 2), "w3": (0, 1, 2)}.items():
        assert index.apply(worker, account(*positions))
    assert index.lookup(KEYS) == {"w0": 3, "w1": 1, "w3": 3}
    assert index.lookup(KEYS[:2]) == {"w0": 2, "w1": 1, "w3": 2}
    assert index.lookup([]) == PrefixIndex().lookup(KEYS) == {}


def test_events_change_what_a_worker_has() -> None:
    index = PrefixIndex()
    index.apply("w0", account(0, 1, 2))
    assert index.apply("w0", KVEvents(1, False, hashes(1, 5), hashes(3, 3, 0)))
    assert index.lookup(KEYS) == {"w0": 1}
    assert index._places["w0"].num_blocks == 3
    assert index.apply("w0", KVEvents(2, False, hashes(1), hashes(1)))  # removed first, then stored
    assert index.lookup(KEYS) == {"w0": 4}


def test_after_a_gap_only_a_new_account_counts() -> None:
    index = PrefixIndex()
    assert not index.apply("w0", KVEvents(4, False, b"", hashes(0)))
    index.apply("w0", account(0))
    assert not index.apply("w0", KVEvents(2, False, b"", hashes(1)))
    assert not index.apply("w0", KVEvents(3, False, b"", hashes(1)))
    assert not index.apply(
        "w0", KVEvents(1, False, b"", hashes(1))
    )  # too late: what followed is lost already
    assert index.lookup(KEYS) == {"w0": 1}
    assert index.apply("w0", account(0, 1))
    assert index.apply("w0", KVEvents(1, False, b"", hashes(2)))
    assert index.lookup(KEYS) == {"w0": 3}


def test_a_departure_is_forgotten_at_once_and_its_place_is_reused() -> None:
    index = PrefixIndex()
    for number in range(100):
        index.apply("w0", account(0, 1))
        index.apply(f"guest{number}", account(0, 1, 2))
        index.forget(f"guest{number}")
        assert index.lookup(KEYS) == {"w0": 2}
        index.check_integrity()
    assert len(index._names) <= 6
    index.forget("nobody")


def test_a_large_departure_is_swept_little_by_little() -> None:
    index = PrefixIndex()
    many = b"".join(number.to_bytes(8, "little") for number in range(16, 16 * 20_001, 16))
    index.apply("w0", KVEvents(0, True, b"", many))
    index.forget("w0")
    index.apply("w1", account(0))
    assert 20_000 - 2 * MIN_SWEEP < index.num_entries <= 20_000
    for number in range(1, 30):
        index.apply("w1", KVEvents(number, False, b"", b""))
        index.check_integrity()
    assert index.num_entries == 1


def test_a_log_does_not_grow_for_ever() -> None:
    index = PrefixIndex()
    index.apply("w0", account())
    for number in range(1, 5000):
        index.apply("w0", KVEvents(number, False, hashes(0, 1), hashes(0, 1)))
    assert len(index._places["w0"].log) <= 2 * 2 + LOG_SLACK
    index.check_integrity()


def test_a_large_log_is_shortened_little_by_little() -> None:
    """A gateway's event loop must not stand while a worker's log of a million blocks is copied."""
    index = PrefixIndex()
    many = b"".join(number.to_bytes(8, "little") for number in range(16, 16 * 20_001, 16))
    index.apply("w0", KVEvents(0, True, b"", many))
    index.apply("w0", KVEvents(1, False, many, many[: 8 * 5_000]))
    num_left = [len(index._places["w0"].former_log)]
    assert num_left == [25_000]
    for number in range(2, 40):
        index.apply("w0", KVEvents(number, False, hashes(0), hashes(1)))
        index.check_integrity()
        num_left.append(len(index._places["w0"].former_log))
    assert max(before - after for before, after in pairwise(num_left)) == MIN_SWEEP + 8
    assert num_left[-1] == 0
    assert len(index._places["w0"].log) <= index._places["w0"].num_blocks + 40
    assert not index._places["w0"].copied


WORKERS = st.sampled_from(["w0", "w1", "w2", "w3"])
POSITIONS = st.lists(st.integers(0, len(CHAIN) - 1), max_size=6)
MOVES: st.SearchStrategy[tuple[str, str, list[int], list[int]]] = st.one_of(
    st.tuples(st.just("account"), WORKERS, POSITIONS, st.just([])),
    st.tuples(st.just("events"), WORKERS, POSITIONS, POSITIONS),
    st.tuples(st.just("lost"), WORKERS, POSITIONS, POSITIONS),
    st.tuples(st.just("forget"), WORKERS, st.just([]), st.just([])),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(MOVES, max_size=60))
def test_index_equals_a_naive_model(moves: list[tuple[str, str, list[int], list[int]]]) -> None:
    """The model: a set for each worker, and the number of the next message for those in step."""
    index = PrefixIndex()
    model: dict[str, set[int]] = {}
    sent: dict[str, int] = {}
    in_step: set[str] = set()
    for move, worker, stored, removed in moves:
        if move == "account":
            assert index.apply(worker, account(*stored))
            model[worker], sent[worker] = set(stored), 1
            in_step.add(worker)
        elif move == "lost":  # on its way
            sent[worker] = sent.get(worker, 0) + 1
            in_step.discard(worker)
        elif move == "events":
            events = KVEvents(sent.get(worker, 0), False, hashes(*removed), hashes(*stored))
            sent[worker] = sent.get(worker, 0) + 1
            assert index.apply(worker, events) == (worker in in_step)
            if worker in in_step:
                model[worker] = (model[worker] - set(removed)) | set(stored)
        else:
            index.forget(worker)
            model.pop(worker, None)
            in_step.discard(worker)
        index.check_integrity()
        hits = {name: next(i for i in range(9) if i not in blocks) for name, blocks in model.items()}
        assert index.lookup(KEYS) == {name: depth for name, depth in hits.items() if depth}
        assert {name: place.num_blocks for name, place in index._places.items()} == {
            name: len(blocks) for name, blocks in model.items()
        }
