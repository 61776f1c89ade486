"""KVCache: the scheduler's only view of memory: slots for tokens, prefix hits, and blocks held after their request.

a request's table:   | prefix hits | computed | new in this step | spare slots of the last block |
                     |<------- full blocks may be cached ------->|
"""

from collections import Counter
from collections.abc import Sequence

from baton.block_hash import extend_block_hashes
from baton.kv import KVEvent
from baton.worker import KVBlockCounts
from scheduler.block_events import BlockEvents
from scheduler.block_pool import Block, BlockPool
from scheduler.block_table import NEVER, BlockTable
from scheduler.request import Request

PENDING_EVENTS_PER_BLOCK = 4
"""Block events kept for a slow reader; beyond this, a full listing is shorter."""


class KVCache:
    """Every block belongs to the pool, to tables, to a lease or to the quarantine; see `check_integrity`."""

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool, hash_key: bytes) -> None:
        """Processes that should recognise each other's block hashes share `hash_key`, 16 to 64 secret bytes."""
        self.block_size = block_size
        self.is_caching = enable_caching
        self._events = BlockEvents(PENDING_EVENTS_PER_BLOCK * num_blocks, lambda: self._pool.cached_hashes)
        self._pool = BlockPool(num_blocks, self._events)
        self._hash_key = hash_key
        self._tables: dict[str, BlockTable] = {}
        self._leased: dict[str, list[Block]] = {}
        self._num_leases: Counter[int] = Counter()
        """Leases by block id: two finished prefills may share a prefix."""
        self._quarantined: dict[str, list[Block]] = {}

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_usable(self) -> int:
        return self._pool.num_usable

    @property
    def num_tables(self) -> int:
        """Unfinished requests that hold blocks."""
        return len(self._tables)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def tokens_arrived(self, request: Request) -> None:
        """Hashes blocks that the request's newest tokens completed, each once; due when `next_hash_at` is reached."""
        if not self.is_caching:
            request.next_hash_at = NEVER
            return
        hashes, size = request.block_hashes, self.block_size
        extend_block_hashes(hashes, request.all_token_ids, size, self._hash_key, request.cache_salt)
        request.next_hash_at = (len(hashes) + 1) * size

    def may_hit(self, request: Request) -> bool:
        """Whether the prefix cache is read for this request."""
        return self.is_caching and not request.skip_reading_prefix_cache

    def find_cached_prefix(self, request: Request) -> list[Block]:
        """The longest cached prefix in full blocks, leaving at least one token to compute. Changes nothing."""
        if not self.may_hit(request):
            return []
        max_hits = (request.num_tokens - 1) // self.block_size
        return self._pool.cached_prefix(request.block_hashes[:max_hits])

    def is_held(self, request_id: str) -> bool:
        """Whether blocks are leased or quarantined under this id."""
        return request_id in self._leased or request_id in self._quarantined

    def num_missing(self, request: Request, num_tokens: int, hits: Sequence[Block] = ()) -> int:
        """Free blocks needed to give `request` room for `num_tokens` in all; free hits count too."""
        num_held = len(request.block_table.blocks) if request.block_table else 0
        num_revived = [block.ref_count for block in hits].count(0)
        return max(0, self.num_blocks_for(num_tokens) - num_held - len(hits)) + num_revived

    def open_table(
        self,
        request: Request,
        num_tokens: int,
        hits: Sequence[Block] = (),
        *,
        cache_up_to: int | None = None,
        num_spare: int = 0,
    ) -> bool:
        """Allocates blocks for the first `num_tokens` tokens of a request without any: `hits` first, then new ones.

        Full blocks up to `cache_up_to` tokens (None: `num_tokens`) can be hit from now on. False: fewer than
        `num_spare` blocks would be left free, and nothing has changed.
        """
        assert request.block_table is None, f"{request.request_id} has blocks"
        if self.num_missing(request, num_tokens, hits) + num_spare > self._pool.num_free:
            return False
        table = request.block_table = BlockTable(self.block_size, self.is_caching)
        self._tables[request.request_id] = table
        self._pool.touch(hits)  # before allocating: a request must not evict its own hits
        table.append([*hits, *self._pool.allocate(self.num_blocks_for(num_tokens) - len(hits))])
        if hits:
            table.set_cached(len(hits))
        self._cache_full_blocks(request, table, num_tokens if cache_up_to is None else cache_up_to)
        return True

    def extend_table(self, request: Request, num_tokens: int) -> Sequence[Block] | None:
        """Makes room for the first `num_tokens` tokens of a request that has blocks; returns the added blocks.

        Full blocks up to `num_tokens` tokens can be hit from now on. None: too few blocks are free, and nothing has
        changed.
        """
        table = request.block_table
        assert table is not None, f"{request.request_id} has no blocks"
        new: Sequence[Block] = ()
        if num_tokens > table.num_slots:
            num_new = self.num_blocks_for(num_tokens) - len(table.blocks)
            if num_new > self._pool.num_free:
                return None
            new = self._pool.allocate(num_new)
            table.append(new)
        if num_tokens >= table.cache_at:
            self._cache_full_blocks(request, table, num_tokens)
        return new

    def cache_received(self, request: Request, num_tokens: int) -> None:
        """The blocks of the first `num_tokens` tokens were filled from outside and verified: they can be hit now."""
        assert request.block_table is not None
        self._cache_full_blocks(request, request.block_table, num_tokens)

    def block_ids(self, request: Request) -> tuple[int, ...]:
        return request.block_table.block_ids if request.block_table else ()

    def withdraw_uncomputed(self, request: Request) -> None:
        """Makes blocks that this step was to fill unavailable for hits; called before a request that drops out of the
        step is freed.
        """
        table = request.block_table
        assert table is not None
        for block in table.blocks[request.num_computed_tokens // self.block_size : table.num_cached]:
            self._pool.forget(block)

    def free(self, request: Request) -> None:
        """Gives the request's blocks back, tail first, so that the head of its chain is evicted last.

        Its computed blocks can be hit, including a block completed by a token that was in flight until now. Blocks
        that a current step computes in vain cannot.
        """
        if request.block_table is not None:
            num_of_use = request.num_computed_tokens - request.num_output_placeholders
            self._cache_full_blocks(request, request.block_table, num_of_use)
        self._pool.free(reversed(self._take_blocks(request)))

    def lease(self, request: Request) -> None:
        """The request ended, but a remote reader needs its blocks until `end_hold`."""
        blocks = self._take_blocks(request)
        self._leased[request.request_id] = blocks
        self._num_leases.update(block.block_id for block in blocks)

    def quarantine(self, request: Request, num_kept: int) -> None:
        """The request ended, but blocks after its first `num_kept` may still be written until `end_hold`."""
        blocks = self._take_blocks(request)
        self._pool.free(reversed(blocks[:num_kept]))
        self._quarantined[request.request_id] = blocks[num_kept:]

    def end_hold(self, request_id: str) -> bool:
        """Frees what was leased or quarantined under this id; False if nothing was."""
        blocks = self._leased.pop(request_id, None)
        if blocks is not None:
            self._num_leases -= Counter(block.block_id for block in blocks)
        else:
            blocks = self._quarantined.pop(request_id, None)
        if blocks is None:
            return False
        self._pool.free(reversed(blocks))
        return True

    def forget_prefixes(self) -> None:
        """Makes all blocks computed so far, and those that build on them, unavailable for hits; blocks in use stay in
        use.
        """
        self._pool.forget_all()
        for table in self._tables.values():
            table.stop_caching()

    def take_events(self) -> list[KVEvent]:
        """Changes of the prefix cache since the last call, in order."""
        return self._events.take()

    def begin_events(self) -> list[KVEvent]:
        """A full listing of the prefix cache, from which `take_events` continues."""
        return self._events.begin()

    def ignore_events(self) -> None:
        """Keeps no events until `begin_events`."""
        self._events.ignore()

    def counts(self) -> KVBlockCounts:
        return KVBlockCounts(
            total=self._pool.num_usable,
            free=self._pool.num_free,
            leased=len(self._num_leases),
            quarantined=sum(map(len, self._quarantined.values())),
        )

    def check_integrity(self) -> None:
        """Asserts that every reference to a block has an owner, and every owner its references."""
        self._pool.check_integrity()
        owners: Counter[int] = Counter({0: 1})
        for blocks in [
            *[t.blocks for t in self._tables.values()],
            *self._leased.values(),
            *self._quarantined.values(),
        ]:
            owners.update(block.block_id for block in blocks)
        for block in self._pool.blocks:
            assert block.ref_count == owners[block.block_id], f"{block} has {owners[block.block_id]} owners"
        counts = self.counts()
        assert counts.referenced >= 0, f"more blocks are held than exist: {counts}"
        assert counts.leased == len({b.block_id for blocks in self._leased.values() for b in blocks})

    def _take_blocks(self, request: Request) -> list[Block]:
        """Closes the request's table; the caller now owns the references of its blocks."""
        table, request.block_table = request.block_table, None
        if table is None:
            return []
        del self._tables[request.request_id]
        return table.blocks

    def _cache_full_blocks(self, request: Request, table: BlockTable, num_tokens: int) -> None:
        num_full = min(num_tokens, request.num_tokens) // self.block_size
        if num_full <= table.num_cached or table.cache_at == NEVER:
            return
        for index in range(table.num_cached, num_full):
            self._pool.cache(table.blocks[index], request.block_hashes[index])
        table.set_cached(num_full)
