"""PrefixIndex: which worker has which blocks in its prefix cache, by the workers' events; knows no request, no
policy.

    hash of a block  ->  its workers, as the bits of one int       equal sets of workers are one object
    worker           ->  its bit, and a log of its stored blocks   8 bytes a block, for their removal

Workers send 8 bytes of each hash; 60 bits of them are the key, since such an int takes 32 bytes of memory and a
longer one 48. Among ten million blocks, two have the same key with a probability of one in twenty thousand. Then a
worker is credited with a block it lacks, which costs time and nothing else.
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
"""Sets of workers that are shared as one object each; more sets only cost memory."""

MAX_NAMED_SETS = 1024

MIN_SWEEP = 1024
LOG_SLACK = 1024


@dataclass(slots=True)
class _Place:
    """A worker's bit, reusable once no set contains it."""

    name: str
    bit: int
    log: "array[int]" = field(default_factory=lambda: array("Q"))
    """Everything that the worker stored; removed blocks stay until there are too many of them."""
    num_blocks: int = 0
    next_number: int | None = None
    """Number of the KVEvents that continue its listing; None: there is a gap, and only a new listing helps."""


class PrefixIndex:
    """Fed with KVEvents, queried with prompts. A departure is O(1); its remains are swept later, bit by bit."""

    def __init__(self) -> None:
        self._holders: dict[Key, int] = {}
        self._shared_sets: dict[int, int] = {}
        self._places: dict[str, _Place] = {}
        self._names: list[str] = []
        """By the position of a bit."""
        self._names_of: dict[int, list[str]] = {}
        """Names for recently queried sets: those of common prompts recur."""
        self._present = 0
        """Bits of workers whose listing is complete; other bits in a set belong to departed workers."""
        self._departed: deque[_Place] = deque()
        self._free_bits: list[int] = []

    @property
    def num_entries(self) -> int:
        """Distinct blocks, including those of departed workers that are not swept yet."""
        return len(self._holders)

    def is_known(self, worker: str) -> bool:
        """Whether the worker sent a listing, with no gap since."""
        place = self._places.get(worker)
        return place is not None and place.next_number is not None

    def num_blocks(self, worker: str) -> int:
        """How many blocks a worker has; 0 if it is unknown."""
        place = self._places.get(worker)
        return place.num_blocks if place else 0

    def apply(self, worker: str, events: KVEvents) -> bool:
        """Applies a worker's events. False: earlier events are missing, and all are ignored until the worker's next
        listing; what was known before the gap stays."""
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
        self._sweep(MIN_SWEEP + 4 * (len(stored) + len(removed)))
        return True

    def forget(self, worker: str) -> None:
        """Removes all of the worker's blocks; its next events must be a listing. Unknown names are no error."""
        place = self._places.pop(worker, None)
        if place is not None:
            self._present ^= place.bit
            self._departed.append(place)

    def lookup(self, keys: Iterable[Key]) -> dict[str, int]:
        """For each worker, how many leading blocks of a chain it has without a gap; workers with none are left out."""
        get, alive, depth, former = self._holders.get, self._present, 0, None
        found: dict[str, int] = {}
        for key in keys:
            holders = get(key, 0)
            if holders is not former:  # equal sets are one object, so a chain rarely gets here
                former = holders
                remaining = holders & alive
                if depth and remaining != alive:
                    self._note(found, alive ^ remaining, depth)
                if not remaining:
                    return found
                alive = remaining
            depth += 1
        if depth:
            self._note(found, alive, depth)
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
            logged = {key for key in place.log if self._holders.get(key, 0) & place.bit}
            assert len(logged) == place.num_blocks, f"{place.name}: blocks are missing from its log"
            assert len(place.log) <= 2 * place.num_blocks + LOG_SLACK or place not in self._places.values()
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
        self._shorten_log(place)

    def _remove(self, place: _Place, keys: Iterable[Key]) -> None:
        holders_of, shared, bit, num_gone = self._holders, self._shared_sets, place.bit, 0
        for key in keys:
            holders = holders_of.get(key, 0)
            if not holders & bit:
                continue
            holders ^= bit
            if holders:
                holders_of[key] = shared.setdefault(holders, holders)
            else:
                del holders_of[key]
            num_gone += 1
        place.num_blocks -= num_gone
        self._shorten_log(place)

    def _shorten_log(self, place: _Place) -> None:
        """Bounds the log to twice the memory that it needs."""
        if len(place.log) > 2 * place.num_blocks + LOG_SLACK:
            get, bit = self._holders.get, place.bit
            place.log = array("Q", dict.fromkeys(key for key in place.log if get(key, 0) & bit))

    def _sweep(self, num_keys: int) -> None:
        """Removes up to `num_keys` blocks of departed workers from the sets; a worker with an empty
        log is forgotten.
        """
        while self._departed and num_keys > 0:
            place = self._departed[0]
            keys = place.log[-num_keys:]
            del place.log[-num_keys:]
            num_keys -= len(keys)
            log, place.log = place.log, array("Q")
            self._remove(place, keys)
            place.log = log
            if not log:
                self._departed.popleft()
                self._free_bits.append(place.bit)


def short_keys(block_hashes: Iterable[bytes]) -> list[Key]:
    """The index's keys for blocks, from whole hashes or from the part that workers send."""
    return _keys(b"".join([block_hash[:SHORT_HASH_BYTES] for block_hash in block_hashes]))


def _keys(short_hashes: bytes) -> list[Key]:
    values = array("Q")
    values.frombytes(short_hashes)
    return [value >> 4 for value in values]


def _bits(holders: int) -> Iterable[int]:
    while holders:
        yield holders & -holders
        holders &= holders - 1
