"""BlockPool: which blocks are free or referenced, and which content can be hit, by KV group; knows no request.

A free block keeps its content hash until it is allocated again. So the free list is also the cache's eviction
order: the block that was freed first is evicted first. Callers free the last block of a chain first, since a
prefix is more useful than its continuation.
"""

from collections.abc import Iterable, Iterator

from baton.kv_groups import NULL_BLOCK_ID
from scheduler.block_events import BlockEvents


class Block:
    """One KV block's bookkeeping; a node of the free list while it has no reference."""

    __slots__ = ("block_hash", "block_id", "group", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.group = 0
        """The KV group of its content; meaningless without a hash."""
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, is_hashed={self.block_hash is not None})"


class FreeList:
    """A doubly linked list through the blocks themselves: removing from the middle is O(1) and allocates nothing."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head, self._tail = Block(-1), Block(-1)  # sentinels
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.num_free = 0
        for block in blocks:
            self.append(block)

    def append(self, block: Block) -> None:
        last = self._tail.prev_free
        assert last is not None
        block.prev_free, block.next_free = last, self._tail
        last.next_free = self._tail.prev_free = block
        self.num_free += 1

    def remove(self, block: Block) -> None:
        before, after = block.prev_free, block.next_free
        assert before is not None, f"{block} is not free"
        assert after is not None, f"{block} is not free"
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self.num_free -= 1

    def pop_first(self) -> Block:
        first = self._head.next_free
        assert first is not None
        assert first is not self._tail, "no free block is left"
        self.remove(first)
        return first

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free


class BlockPool:
    """All blocks of one device. Callers check `num_free` first; a call either completes or asserts.

    `events` receives every content hash that becomes available or unavailable for hits in group 0. `forget_all`
    reports only that none is available any more.
    """

    def __init__(self, num_blocks: int, events: BlockEvents, num_groups: int = 1) -> None:
        assert num_blocks >= 2, "a pool needs at least 2 blocks: the null block and one more"
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.blocks[NULL_BLOCK_ID].ref_count = 1
        self.null = self.blocks[NULL_BLOCK_ID]
        """The null block. It is never allocated and never freed, since the pool itself holds its only reference."""
        self._free = FreeList(self.blocks[1:])
        self._caches: list[dict[bytes, list[Block]]] = [{} for _ in range(num_groups)]
        """For each group: the blocks of each content hash."""
        self._events = events

    @property
    def num_free(self) -> int:
        return self._free.num_free

    @property
    def num_usable(self) -> int:
        """The number of blocks, without the null block."""
        return len(self.blocks) - 1

    @property
    def cached_hashes(self) -> Iterable[bytes]:
        """Hashes of everything that can be hit in group 0, each once."""
        return self._caches[0].keys()

    def allocate(self, num_blocks: int) -> list[Block]:
        """Takes the least recently freed blocks, each with one reference; their cached content is forgotten."""
        taken = []
        for _ in range(num_blocks):
            block = self._free.pop_first()
            if block.block_hash is not None:
                self.forget(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Adds a reference to each block, which removes it from the free list and so protects it from eviction."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drops one reference of each block. A block without references is free. Of the blocks that become free, the
        first is evicted first."""
        for block in blocks:
            assert block.ref_count > 0, f"{block} was freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)

    def cache(self, block: Block, block_hash: bytes, group: int = 0) -> None:
        """Makes `block` a hit for `block_hash` in this group. Two blocks may have the same content."""
        assert block.block_hash is None, f"{block} is cached already"
        block.block_hash, block.group = block_hash, group
        cache = self._caches[group]
        holders = cache.get(block_hash)
        if holders is not None:
            holders.append(block)
            return
        cache[block_hash] = [block]
        if group == 0:
            self._events.stored(block_hash)

    def is_cached(self, block_hash: bytes, group: int) -> bool:
        return block_hash in self._caches[group]

    def cached_prefix(self, block_hashes: Iterable[bytes], group: int = 0) -> list[Block]:
        """The group's blocks for the leading hashes, up to the first hash that cannot be hit."""
        hits = []
        for holders in map(self._caches[group].get, block_hashes):
            if holders is None:
                break
            hits.append(holders[0])
        return hits

    def forget(self, block: Block) -> None:
        """Makes `block` unavailable for hits; does nothing if it already is."""
        if block.block_hash is None:
            return
        cache = self._caches[block.group]
        holders = cache[block.block_hash]
        holders.remove(block)
        if not holders:
            del cache[block.block_hash]
            if block.group == 0:
                self._events.removed(block.block_hash)
        block.block_hash = None

    def forget_all(self) -> None:
        """Empties the cache; blocks in use stay in use."""
        for cache in self._caches:
            for holders in cache.values():
                for block in holders:
                    block.block_hash = None
            cache.clear()
        self._events.cleared()

    def check_integrity(self) -> None:
        """Asserts that free list, reference counts and hash map are consistent."""
        free = list(self._free)
        assert len(free) == self.num_free == len({block.block_id for block in free}), "free list is damaged"
        assert all(block.ref_count == 0 for block in free), "a block in use is on the free list"
        num_idle = sum(block.ref_count == 0 for block in self.blocks)
        assert num_idle == len(free), f"{num_idle} blocks have no reference, {len(free)} are free"
        mapped = [block for cache in self._caches for holders in cache.values() for block in holders]
        hashed = [block for block in self.blocks if block.block_hash is not None]
        assert {block.block_id for block in mapped} == {block.block_id for block in hashed}, (
            "hash map is damaged"
        )
