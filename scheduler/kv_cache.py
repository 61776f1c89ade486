"""KVCache: the scheduler's only view of memory: slots for tokens, prefix hits, blocks of ended requests.

a request's table:   | prefix hits | computed | new in this step | spare slots of the last block |
                     |<------- full blocks may be cached ------->|

With several KV groups (`baton/kv_groups.py`), each row of a table has one block per group. A block that has
left the window of its group returns to the pool, and the null block replaces it in the table.
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from baton.block_hash import extend_block_hashes
from baton.kv_groups import ONE_GROUP, KVGroups
from baton.worker import KVBlockCounts
from scheduler.block_events import BlockEvents
from scheduler.block_pool import Block, BlockPool
from scheduler.block_table import NEVER, BlockTable
from scheduler.prefix_hits import cached_rows
from scheduler.request import Request

PENDING_EVENTS_PER_BLOCK = 4
"""Limit of unread block events, per block of the pool. Beyond this limit, a full listing is shorter."""


class KVCache:
    """Every block belongs to the pool, to tables, to a lease or to the quarantine; see `check_integrity`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool,
        hash_key: bytes | None,
        groups: KVGroups = ONE_GROUP,
    ) -> None:
        """Processes that share `hash_key` (16 to 64 secret bytes) recognize each other's block hashes.

        None: a random key.
        """
        self.block_size = block_size
        self.is_caching = enable_caching
        self.groups = groups
        self._num_groups, self._has_windows = groups.num_groups, groups.num_windowed > 0
        self.events = BlockEvents(PENDING_EVENTS_PER_BLOCK * num_blocks, lambda: self._pool.cached_hashes)
        self._pool = BlockPool(num_blocks, self.events, self._num_groups)
        self._hash_key = hash_key if hash_key is not None else secrets.token_bytes(32)
        self._tables: dict[str, BlockTable] = {}
        self._leased: dict[str, list[Block]] = {}
        self._num_leases: Counter[int] = Counter()
        """By block id: the number of its leases. It may be more than 1, since finished prefills may share a prefix."""
        self._quarantined: dict[str, list[Block]] = {}

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_usable(self) -> int:
        return self._pool.num_usable

    @property
    def num_tables(self) -> int:
        """Number of unfinished requests that hold blocks."""
        return len(self._tables)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for `num_tokens` tokens in all groups, even those that a windowed group no longer needs."""
        return -(-num_tokens // self.block_size) * self._num_groups

    def num_tokens_in(self, hits: Sequence[Block]) -> int:
        """Number of tokens in the rows of `hits`."""
        return len(hits) // self._num_groups * self.block_size

    def tokens_arrived(self, request: Request) -> None:
        """Hashes the blocks that the newest tokens completed. Call it when the request has `next_hash_at` tokens."""
        if not self.is_caching:
            request.next_hash_at = NEVER
            return
        hashes, size = request.block_hashes, self.block_size
        extend_block_hashes(hashes, request.all_token_ids, size, self._hash_key, request.cache_salt)
        request.next_hash_at = (len(hashes) + 1) * size

    def may_hit(self, request: Request) -> bool:
        """Whether the prefix cache is read for this request."""
        return self.is_caching and not request.skip_reading_prefix_cache

    def find_cached_prefix(self, request: Request, num_loaded: int | None = None) -> list[Block]:
        """The longest cached prefix of whole rows that leaves at least one token to compute. Changes nothing.

        `num_loaded`: another worker sends the KV of the first `num_loaded` tokens, except for this prefix. None: no
        worker sends any.
        """
        if not self.may_hit(request):
            return []
        block_hashes = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        if self._num_groups == 1 and self.groups.num_full:
            return self._pool.cached_prefix(block_hashes)
        num_before_window = (
            None if num_loaded is None else self.groups.num_rows_before_window(num_loaded, self.block_size)
        )
        return cached_rows(self._pool, block_hashes, self.groups, self.block_size, num_before_window)

    def is_held(self, request_id: str) -> bool:
        """Whether blocks are leased or quarantined under this id."""
        return request_id in self._leased or request_id in self._quarantined

    def num_missing(
        self, request: Request, num_tokens: int, hits: Sequence[Block] = (), num_ready: int = 0
    ) -> int:
        """How many free blocks the request takes for `num_tokens` tokens.

        A hit that no request holds is one of the free blocks, so it counts, too.

        The arguments are those of `open_table`.
        """
        num_held = len(request.block_table.blocks) if request.block_table else 0
        num_revived = [block.ref_count for block in hits].count(0)
        num_new = max(0, self.num_blocks_for(num_tokens) - num_held - len(hits))
        if num_ready and self._has_windows:
            num_before_window = self.groups.num_rows_before_window(num_ready, self.block_size)
            num_null = num_before_window - (num_held + len(hits)) // self._num_groups
            num_new = max(0, num_new - max(0, num_null) * self.groups.num_windowed)
        return num_new + num_revived

    def open_table(
        self,
        request: Request,
        num_tokens: int,
        hits: Sequence[Block] = (),
        *,
        cache_up_to: int | None = None,
        num_spare: int = 0,
        num_ready: int = 0,
    ) -> bool:
        """Allocates a table for the first `num_tokens` tokens of a request: `hits` first, then new blocks.

        Full blocks of the first `cache_up_to` tokens (None: `num_tokens`) can be hit from now on. The KV of the first
        `num_ready` tokens exists already, or a load will bring it. So in the rows of these tokens, a windowed group
        gets a block only if later tokens need the block. Returns False, and changes nothing, if fewer than `num_spare`
        blocks would be left free.
        """
        assert request.block_table is None, f"{request.request_id} has blocks"
        num_before_window = 0
        if self._has_windows:
            num_ready = max(num_ready, self.num_tokens_in(hits))
            num_before_window = self.groups.num_rows_before_window(num_ready, self.block_size)
            hits = [
                self._pool.null if self._is_before_window(i, num_before_window) else block
                for i, block in enumerate(hits)
            ]
        if self.num_missing(request, num_tokens, hits, num_ready) + num_spare > self._pool.num_free:
            return False
        table = request.block_table = BlockTable(self.block_size, self.is_caching, self.groups)
        self._tables[request.request_id] = table
        self._pool.touch(self._without_null(hits))  # before allocating, which must not evict the hits
        num_hit_rows = len(hits) // self._num_groups
        num_new_rows = -(-num_tokens // self.block_size) - num_hit_rows
        table.append([*hits, *self._new_rows(num_new_rows, num_before_window - num_hit_rows)])
        if hits:
            table.set_cached(num_hit_rows)
        if num_before_window:
            table.set_before_window(num_before_window)
        self._cache_full_blocks(request, table, num_tokens if cache_up_to is None else cache_up_to)
        return True

    def extend_table(self, request: Request, num_tokens: int) -> Sequence[Block] | None:
        """Makes room for the first `num_tokens` tokens of a request that has blocks; returns the added blocks.

        Full blocks of the first `num_tokens` tokens can be hit from now on. Returns None, and adds no block,
        if too few blocks are free. In both cases, blocks that have left the window are freed.
        """
        table = request.block_table
        assert table is not None, f"{request.request_id} has no blocks"
        if num_tokens < table.due_at:
            return ()
        if request.num_computed_tokens >= table.leaves_at:
            self._free_before_window(table, request.num_computed_tokens)
        new: Sequence[Block] = ()
        if num_tokens > table.num_slots:
            num_new = -(-num_tokens // self.block_size) * self._num_groups - len(table.blocks)
            if num_new > self._pool.num_free:
                return None
            is_single = self._num_groups == 1
            new = self._pool.allocate(num_new) if is_single else self._new_rows(num_new // self._num_groups)
            table.append(new)
        if num_tokens >= table.cache_at:
            self._cache_full_blocks(request, table, num_tokens)
        return new

    def cache_received(self, request: Request, num_tokens: int) -> None:
        """Makes the received and verified blocks of the first `num_tokens` tokens available for hits."""
        assert request.block_table is not None
        self._cache_full_blocks(request, request.block_table, num_tokens)

    def block_ids(self, request: Request) -> tuple[int, ...]:
        return request.block_table.block_ids if request.block_table else ()

    def needed_entries(self, request: Request) -> list[int]:
        """The indices in `block_ids(request)` of the computed blocks that the request's later tokens need."""
        return self.groups.needed_entries(request.num_computed_tokens, self.block_size)

    def withdraw_uncomputed(self, request: Request) -> None:
        """Removes from the prefix cache the blocks that this step would have filled.

        Called for a request that drops out of the step, before its blocks are freed.
        """
        table = request.block_table
        assert table is not None
        first = request.num_computed_tokens // self.block_size * self._num_groups
        for block in table.blocks[first : table.num_cached * self._num_groups]:
            self._pool.forget(block)

    def free(self, request: Request) -> None:
        """Gives the request's blocks back, tail first, so that the head of its chain is evicted last.

        Its computed blocks become available for hits, even a block whose last token was in flight until now. Blocks
        that unfinished steps still compute do not become available.
        """
        if request.block_table is not None:
            num_cacheable = request.num_computed_tokens - request.num_output_placeholders
            self._cache_full_blocks(request, request.block_table, num_cacheable)
        self._free(self._take_blocks(request))

    def lease(self, request: Request) -> None:
        """Leases an ended request's blocks to a remote reader until `end_hold`.

        Blocks that have left the window are freed at once.
        """
        if request.block_table is not None:
            self._free_before_window(request.block_table, request.num_computed_tokens)
        blocks = list(self._without_null(self._in_eviction_order(self._take_blocks(request))))
        self._leased[request.request_id] = blocks
        self._num_leases.update(block.block_id for block in blocks)

    def quarantine(self, request: Request, num_hit_blocks: int) -> None:
        """Frees an ended request's first `num_hit_blocks` blocks, and quarantines the others until `end_hold`."""
        blocks = self._take_blocks(request)
        self._free(blocks[:num_hit_blocks])
        may_be_written = self._in_eviction_order(blocks[num_hit_blocks:])
        self._quarantined[request.request_id] = list(self._without_null(may_be_written))

    def end_hold(self, request_id: str) -> bool:
        """Frees the blocks that are leased or quarantined under this id. False if there are none."""
        leased = self._leased.pop(request_id, None)
        for block in leased or ():
            self._num_leases[block.block_id] -= 1
            if not self._num_leases[block.block_id]:
                del self._num_leases[block.block_id]
        blocks = leased if leased is not None else self._quarantined.pop(request_id, None)
        if blocks is None:
            return False
        self._pool.free(blocks)
        return True

    def forget_prefixes(self) -> None:
        """Makes all blocks computed so far, and blocks that build on them, unavailable for hits.

        Blocks in use stay in use.
        """
        self._pool.forget_all()
        for table in self._tables.values():
            table.stop_caching()

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
        owners: Counter[int] = Counter()
        for blocks in [
            *[t.blocks for t in self._tables.values()],
            *self._leased.values(),
            *self._quarantined.values(),
        ]:
            owners.update(block.block_id for block in blocks)
        owners[self._pool.null.block_id] = 1
        for table in self._tables.values():
            self._check_rows(table)
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

    def _new_rows(self, num_rows: int, num_before_window: int = 0) -> list[Block]:
        """Allocates rows. Windowed groups get the null block in the first `num_before_window` of them."""
        if self._num_groups == 1 and num_before_window <= 0:
            return self._pool.allocate(num_rows)
        starts = [
            [self._pool.null] * (num_before_window if group >= self.groups.num_full else 0)
            for group in range(self._num_groups)
        ]
        columns = [start + self._pool.allocate(num_rows - len(start)) for start in starts]
        return list(chain.from_iterable(zip(*columns, strict=True)))

    def _free_before_window(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Frees blocks that no later token's window reaches; the null block takes their places."""
        num_before_window = max(
            table.num_before_window, self.groups.num_rows_before_window(num_computed_tokens, self.block_size)
        )
        for group in range(self.groups.num_full, self._num_groups):
            for row in range(num_before_window - 1, table.num_before_window - 1, -1):
                index = row * self._num_groups + group
                self._pool.free([table.blocks[index]])
                table.blocks[index] = self._pool.null
        table.set_before_window(num_before_window)

    def _is_before_window(self, index: int, num_before_window: int) -> bool:
        """Whether this entry of a table is a windowed group's, in one of the first `num_before_window` rows."""
        row, group = divmod(index, self._num_groups)
        return row < num_before_window and group >= self.groups.num_full

    def _free(self, blocks: Sequence[Block]) -> None:
        """Drops one reference of each block in these rows."""
        self._pool.free(self._without_null(self._in_eviction_order(blocks)))

    def _in_eviction_order(self, blocks: Sequence[Block]) -> Iterable[Block]:
        """The blocks group by group, each group from its tail: the order in which vLLM V1 frees them."""
        if self._num_groups == 1:
            return reversed(blocks)
        return chain.from_iterable(reversed(blocks[g :: self._num_groups]) for g in range(self._num_groups))

    def _without_null(self, blocks: Iterable[Block]) -> Iterable[Block]:
        if not self._has_windows:
            return blocks
        null = self._pool.null
        return [block for block in blocks if block is not null]

    def _cache_full_blocks(self, request: Request, table: BlockTable, num_tokens: int) -> None:
        num_full = min(num_tokens, request.num_tokens) // self.block_size
        if num_full <= table.num_cached or table.cache_at == NEVER:
            return
        blocks, block_hashes, null = table.blocks, request.block_hashes, self._pool.null
        num_groups, cache = self._num_groups, self._pool.cache
        for group in range(num_groups):
            for row in range(table.num_cached, num_full):
                block = blocks[row * num_groups + group]
                if block is not null:
                    cache(block, block_hashes[row], group)
        table.set_cached(num_full)

    def _check_rows(self, table: BlockTable) -> None:
        """Asserts that null blocks are exactly where blocks of windowed groups have left the window."""
        assert len(table.blocks) == table.num_rows * self._num_groups, "a row lacks the block of a group"
        for index, block in enumerate(table.blocks):
            is_before_window = self._is_before_window(index, table.num_before_window)
            assert (block is self._pool.null) == is_before_window, f"{block} is entry {index} of a table"
