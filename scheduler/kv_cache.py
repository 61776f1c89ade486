"""KVCache: the scheduler's only view of memory. Slots for tokens, prefix hits, and blocks whose freeing has to wait.

a request's table:   | prefix hits | computed | new in this step | spare slots of the last block |
                     |<------- full blocks may be cached ------->|
"""

from collections import Counter
from collections.abc import Sequence

from baton.worker import KVBlockCounts
from scheduler.block_hash import BlockHasher
from scheduler.block_pool import Block, BlockPool
from scheduler.request import Request


class BlockTable:
    """One request's blocks in token order; the first `num_cached` of them were offered to others."""

    __slots__ = ("blocks", "may_cache", "num_cached")

    def __init__(self, may_cache: bool) -> None:
        self.blocks: list[Block] = []
        self.num_cached = 0
        self.may_cache = may_cache


class KVCache:
    """Every block belongs to the pool, to tables, to a lease or to the quarantine; see `check_integrity`."""

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool, hash_key: bytes) -> None:
        self.block_size = block_size
        self._enable_caching = enable_caching
        self._pool = BlockPool(num_blocks)
        self._hasher = BlockHasher(block_size, hash_key)
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
        """Requests that hold blocks, finished ones apart."""
        return len(self._tables)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def tokens_arrived(self, request: Request) -> None:
        """Hashes blocks that the request's newest tokens completed."""
        if self._enable_caching:
            self._hasher.extend(request)

    def find_cached_prefix(self, request: Request) -> list[Block]:
        """The longest cached prefix in full blocks, leaving at least one token to compute. Changes nothing."""
        hits: list[Block] = []
        if not self._enable_caching:
            return hits
        max_hits = (request.num_tokens - 1) // self.block_size
        for block_hash in request.block_hashes[:max_hits]:
            block = self._pool.cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def is_held(self, request_id: str) -> bool:
        """Whether blocks are leased or quarantined under this id."""
        return request_id in self._leased or request_id in self._quarantined

    def num_missing(self, request: Request, num_tokens: int, hits: Sequence[Block] = ()) -> int:
        """Free blocks it takes to give `request` room for `num_tokens` in all; hits that are free count too."""
        table = self._tables.get(request.request_id)
        num_held = len(table.blocks) if table else 0
        num_revived = sum(block.ref_count == 0 for block in hits)
        return max(0, self.num_blocks_for(num_tokens) - num_held - len(hits)) + num_revived

    def allocate_slots(
        self, request: Request, num_tokens: int, hits: Sequence[Block] = (), *, cache_up_to: int | None = None
    ) -> list[Block] | None:
        """Room for the request's first `num_tokens` tokens; returns the blocks beyond `hits` that this added.

        `hits` are prepended on first admission. Full blocks up to `cache_up_to` tokens (None: `num_tokens`) can be hit
        from now on. None: too few blocks are free, and nothing has changed.
        """
        table = self._tables.get(request.request_id)
        num_held = len(table.blocks) if table is not None else 0
        num_new = -(-num_tokens // self.block_size) - num_held - len(hits)
        new: list[Block] = []
        if num_new > 0 or table is None:
            if self.num_missing(request, num_tokens, hits) > self._pool.num_free:
                return None
            if table is None:
                table = self._tables[request.request_id] = BlockTable(self._enable_caching)
            self._pool.touch(hits)  # before allocating: a hit must not be evicted by its own request
            new = self._pool.allocate(num_new)
            table.blocks += [*hits, *new]
            table.num_cached += len(hits)
        self._cache_full_blocks(request, table, num_tokens if cache_up_to is None else cache_up_to)
        return new

    def cache_received(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens' blocks were filled from outside and verified: they can be hit now."""
        self._cache_full_blocks(request, self._tables[request.request_id], num_tokens)

    def block_ids(self, request: Request) -> tuple[int, ...]:
        table = self._tables.get(request.request_id)
        return tuple([block.block_id for block in table.blocks]) if table else ()

    def withdraw_uncomputed(self, request: Request) -> None:
        """Nobody may hit the blocks that this step was to fill: the request drops out of it, before it is freed."""
        table = self._tables[request.request_id]
        for block in table.blocks[request.num_computed_tokens // self.block_size : table.num_cached]:
            self._pool.forget(block)

    def free(self, request: Request) -> None:
        """Gives the request's blocks back, tail first, so that the head of its chain is evicted last."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self._pool.free(reversed(table.blocks))

    def lease(self, request: Request) -> None:
        """The request ended, but a reader elsewhere still needs its blocks until `end_hold`."""
        blocks = self._tables.pop(request.request_id).blocks
        self._leased[request.request_id] = blocks
        self._num_leases.update(block.block_id for block in blocks)

    def quarantine(self, request: Request, num_kept: int) -> None:
        """The request ended, but blocks after its first `num_kept` may still be written until `end_hold`."""
        blocks = self._tables.pop(request.request_id).blocks
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
        """Nothing computed so far can be hit any more, nor what builds on it; what is in use stays in use."""
        self._pool.forget_all()
        for table in self._tables.values():
            table.may_cache = False

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

    def _cache_full_blocks(self, request: Request, table: BlockTable, num_tokens: int) -> None:
        num_full = min(num_tokens, request.num_tokens) // self.block_size
        if num_full <= table.num_cached or not table.may_cache:
            return
        for index in range(table.num_cached, num_full):
            self._pool.cache(table.blocks[index], request.block_hashes[index])
        table.num_cached = num_full
