"""PrefixIndex: which worker has which blocks in its prefix cache, learned from KV events; knows no requests.

    hash of a block  ->  its workers, as the bits of one int       equal sets of workers are one object
    worker           ->  its bit, and a log of its stored blocks   8 bytes a block, needed to remove them
                                                                  (some 64 more while the log is shortened)

Workers send 8 bytes of each hash. 60 bits of them are the key, since such an int takes 32 bytes of memory,
and a longer int takes 48. Among ten million blocks, two have the same key with a probability of one in twenty
thousand. Then the index may list a block for a worker that does not have it. This costs time, but no answer
becomes wrong.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.block_hash import SHORT_HASH_BYTES
from baton.messages.request_plane import KVEvents

Key = int
"""60 bits of a block's hash."""

MAX_SHARED_SETS = 65_536
"""Up to this number of different sets, equal sets are one object. With more, some sets are stored more than once, which
only costs memory."""

MAX_NAMED_SETS = 1024

MIN_SWEEP = 1024
LOG_SLACK = 1024


@dataclass(slots=True)
class _Place:
    """A worker's bit, and its blocks. The bit can be used again once no set contains it."""

    name: str
    bit: int
    log: "array[int]" = field(default_factory=lambda: array("Q"))
    """Keys of all blocks that the worker stored. Removed blocks stay in the log until there are too many of them."""
    former_log: "array[int]" = field(default_factory=lambda: array("Q"))
    """The rest of a log that had too many removed blocks. The keys of blocks that the worker still has are copied from
    it to `log`, a few at a time."""
    copied: set[Key] = field(default_factory=set)
    """The keys that were copied already. Empty while `former_log` is empty."""
    num_blocks: int = 0
    next_number: int | None = None
    """Number of the next expected KVEvents. None after a gap: then the index needs a new listing."""


class PrefixIndex:
    """Gets KVEvents, and is queried with the keys of a prompt's blocks.

    To forget a worker is O(1). Later calls of `apply` remove its blocks, a few at a time.
    """

    def __init__(self) -> None:
        self._holders: dict[Key, int] = {}
        self._shared_sets: dict[int, int] = {}
        self._places: dict[str, _Place] = {}
        self._names: list[str] = []
        """Worker names, by the position of the worker's bit."""
        self._names_of: dict[int, list[str]] = {}
        """Cache: the names of the workers of recently queried sets of bits. Requests with the same prefix query the
        same sets."""
        self._present = 0
        """Bits in use. Other bits in a set belong to workers that left, or to an earlier listing of a worker."""
        self._departed: deque[_Place] = deque()
        self._free_bits: list[int] = []

    @property
    def num_entries(self) -> int:
        """Number of distinct blocks, including blocks of forgotten workers that are not removed yet."""
        return len(self._holders)

    def is_known(self, worker: str) -> bool:
        """Whether the worker sent a listing, and no events are missing since then."""
        place = self._places.get(worker)
        return place is not None and place.next_number is not None

    def apply(self, worker: str, events: KVEvents) -> bool:
        """Applies a worker's events. Returns False if earlier events are missing. Then all events are ignored
        until the worker's next listing, and blocks that were known before the gap stay."""
        if events.is_anew:
            self.forget(worker)
            self._arrive(worker)
        place = self._places.get(worker)
        if place is None or (not events.is_anew and events.number != place.next_number):
            if place is not None:
                place.next_number = None
            return False
        place.next_number = events.number + 1
        removed, stored = _keys(events.removed), _keys(events.stored)
        self._remove(place, removed)
        self._store(place, stored)
        num_keys = len(stored) + len(removed)
        self._shorten_log(place, MIN_SWEEP + 4 * num_keys)
        self._sweep(MIN_SWEEP + num_keys)
        return True

    def forget(self, worker: str) -> None:
        """Removes all blocks of the worker. Its next events must be a listing. Unknown names are ignored."""
        place = self._places.pop(worker, None)
        if place is not None:
            self._present ^= place.bit
            place.copied = set()
            self._departed.append(place)

    def lookup(self, keys: Iterable[Key]) -> dict[str, int]:
        """For each worker, how many leading blocks of a chain it has without a gap. Leaves out workers that have none
        of the blocks."""
        get, matching, depth, previous = self._holders.get, self._present, 0, None
        found: dict[str, int] = {}
        for key in keys:
            holders = get(key, 0)
            if holders is not previous:  # rarely true, since equal sets are one object
                previous = holders
                remaining = holders & matching
                if depth and remaining != matching:
                    self._note(found, matching ^ remaining, depth)
                if not remaining:
                    return found
                matching = remaining
            depth += 1
        if depth:
            self._note(found, matching, depth)
        return found

    def check_integrity(self) -> None:
        """Asserts that sets, counts and logs are consistent; visits everything."""
        counts = dict.fromkeys((place.bit for place in [*self._places.values(), *self._departed]), 0)
        for holders in self._holders.values():
            assert holders, "a block without a worker"
            for bit in _bits(holders):
                counts[bit] += 1  # KeyError: a bit without a worker
        for place in [*self._places.values(), *self._departed]:
            assert counts[place.bit] == place.num_blocks, f"{place.name}: {counts[place.bit]} blocks"
            logged = {key for key in place.log + place.former_log if self._holders.get(key, 0) & place.bit}
            assert len(logged) == place.num_blocks, f"{place.name}: blocks are missing from its log"
            is_short = len(place.log) <= 2 * place.num_blocks + LOG_SLACK
            assert is_short or place.former_log or place in self._departed, f"{place.name}: its log grows"
        bits = [*counts, *self._free_bits]
        assert sorted(bits) == [1 << position for position in range(len(self._names))], f"bits {bits}"

    def _note(self, found: dict[str, int], holders: int, depth: int) -> None:
        names = self._names_of.get(holders)
        if names is None:
            if len(self._names_of) == MAX_NAMED_SETS:
                self._names_of.clear()
            names = self._names_of[holders] = [self._names[bit.bit_length() - 1] for bit in _bits(holders)]
        found.update(dict.fromkeys(names, depth))

    def _arrive(self, worker: str) -> None:
        if self._free_bits:
            bit = self._free_bits.pop()
            self._names[bit.bit_length() - 1] = worker
            self._names_of.clear()
        else:
            bit = 1 << len(self._names)
            self._names.append(worker)
        self._places[worker] = _Place(worker, bit)
        self._present |= bit

    def _store(self, place: _Place, keys: Sequence[Key]) -> None:
        holders_of, shared, bit, num_new = self._holders, self._shared_sets, place.bit, 0
        get, share = holders_of.get, shared.setdefault
        if len(shared) > MAX_SHARED_SETS:
            shared.clear()
        for key in keys:
            holders = get(key)
            if holders is None:
                holders_of[key] = bit
            elif holders & bit:
                continue
            else:
                holders |= bit
                holders_of[key] = share(holders, holders)
            num_new += 1
        place.num_blocks += num_new
        place.log.extend(keys)

    def _remove(self, place: _Place, keys: Iterable[Key]) -> None:
        holders_of, shared, bit, num_removed = self._holders, self._shared_sets, place.bit, 0
        for key in keys:
            holders = holders_of.get(key, 0)
            if not holders & bit:
                continue
            holders ^= bit
            if holders:
                holders_of[key] = shared.setdefault(holders, holders)
            else:
                del holders_of[key]
            num_removed += 1
        place.num_blocks -= num_removed

    def _shorten_log(self, place: _Place, num_keys: int) -> None:
        """Limits the log to two or three times the number of stored blocks. Looks at `num_keys` keys."""
        get, bit, copied = self._holders.get, place.bit, place.copied
        for key in place.former_log[-num_keys:]:
            if get(key, 0) & bit and key not in copied:
                copied.add(key)
                place.log.append(key)
        del place.former_log[-num_keys:]
        if not place.former_log:
            copied.clear()
            if len(place.log) > 2 * place.num_blocks + LOG_SLACK:
                place.former_log, place.log = place.log, array("Q")

    def _sweep(self, num_keys: int) -> None:
        """Removes up to `num_keys` blocks of forgotten workers from the sets. Once such a worker's log is empty,
        its bit is free again.
        """
        while self._departed and num_keys > 0:
            place = self._departed[0]
            log = place.log or place.former_log
            keys = log[-num_keys:]
            del log[-num_keys:]
            num_keys -= len(keys)
            self._remove(place, keys)
            if not place.log and not place.former_log:
                self._departed.popleft()
                self._free_bits.append(place.bit)


def short_keys(block_hashes: Iterable[bytes]) -> list[Key]:
    """The index's keys of blocks, made from complete hashes or from the short hashes that workers send."""
    return _keys(b"".join([block_hash[:SHORT_HASH_BYTES] for block_hash in block_hashes]))


def _keys(short_hashes: bytes) -> list[Key]:
    values = array("Q")
    values.frombytes(short_hashes)
    return [value >> 4 for value in values]


def _bits(holders: int) -> Iterable[int]:
    while holders:
        yield holders & -holders
        holders &= holders - 1
