"""BlockPool against a model of three plain containers: references, the eviction order, and possible hits."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from baton.kv import BlocksCleared, BlocksRemoved, BlocksStored
from baton.kv_groups import NULL_BLOCK_ID
from scheduler.block_events import BlockEvents
from scheduler.block_pool import Block, BlockPool

NUM_BLOCKS = 9


class BlockPoolMachine(RuleBasedStateMachine):
    """Chains of blocks are taken, cached, hit by others and given back in any order."""

    chains = Bundle("chains")

    def __init__(self) -> None:
        super().__init__()
        self.events = BlockEvents(max_pending=6, snapshot=lambda: self.pool.cached_hashes)
        self.pool = BlockPool(NUM_BLOCKS, self.events)
        self.known_to_reader: set[bytes] = set()
        self.num_references = dict.fromkeys(range(1, NUM_BLOCKS), 0)
        self.free_ids = list(range(1, NUM_BLOCKS))
        self.hash_to_ids: dict[bytes, list[int]] = {}

    @rule(target=chains, num_blocks=st.integers(0, NUM_BLOCKS))
    def allocate(self, num_blocks: int) -> object:
        if num_blocks > self.pool.num_free:
            return multiple()
        taken = self.pool.allocate(num_blocks)
        assert [block.block_id for block in taken] == self.free_ids[:num_blocks], "least recently freed first"
        del self.free_ids[:num_blocks]
        for block in taken:
            self.num_references[block.block_id] = 1
            self.forget_in_model(block.block_id)
        return taken

    @rule(chain=consumes(chains))
    def free(self, chain: list[Block]) -> None:
        self.pool.free(reversed(chain))
        for block in reversed(chain):
            self.num_references[block.block_id] -= 1
            if self.num_references[block.block_id] == 0:
                self.free_ids.append(block.block_id)

    @rule(target=chains, chain=chains, length=st.integers(0, NUM_BLOCKS))
    def share(self, chain: list[Block], length: int) -> list[Block]:
        return self.touch(chain[:length])

    @rule(target=chains, block_hash=st.sampled_from([b"a", b"b", b"c"]))
    def hit(self, block_hash: bytes) -> list[Block]:
        hits = self.pool.cached_prefix([block_hash])
        holders = self.hash_to_ids.get(block_hash, [])
        assert [block.block_id for block in hits] == holders[:1], "the oldest is hit"
        return self.touch(hits)

    @rule(chain=chains, index=st.integers(0, NUM_BLOCKS), block_hash=st.sampled_from([b"a", b"b", b"c"]))
    def cache(self, chain: list[Block], index: int, block_hash: bytes) -> None:
        if index < len(chain) and chain[index].block_hash is None:
            self.pool.cache(chain[index], block_hash)
            self.hash_to_ids.setdefault(block_hash, []).append(chain[index].block_id)

    @rule(chain=chains)
    def forget(self, chain: list[Block]) -> None:
        for block in chain:
            self.pool.forget(block)
            self.forget_in_model(block.block_id)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.hash_to_ids.clear()

    @rule(is_new_reader=st.booleans())
    def read_events(self, is_new_reader: bool) -> None:
        """A subscriber of the events knows exactly which blocks can be hit, however late it reads."""
        missed = self.events.take_events()
        for event in self.events.full_listing() if is_new_reader else missed:
            match event:
                case BlocksStored(block_hashes):
                    assert self.known_to_reader.isdisjoint(block_hashes)
                    self.known_to_reader.update(block_hashes)
                case BlocksRemoved(block_hashes):
                    assert self.known_to_reader.issuperset(block_hashes)
                    self.known_to_reader.difference_update(block_hashes)
                case BlocksCleared():
                    self.known_to_reader.clear()
        assert self.known_to_reader == {block_hash for block_hash, ids in self.hash_to_ids.items() if ids}

    @invariant()
    def pool_and_model_agree(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == len(self.free_ids)
        counts = {block.block_id: block.ref_count for block in self.pool.blocks}
        assert counts == {NULL_BLOCK_ID: 1, **self.num_references}
        for block_hash in (b"a", b"b", b"c"):
            assert bool(self.pool.cached_prefix([block_hash])) == bool(self.hash_to_ids.get(block_hash))

    def touch(self, blocks: list[Block]) -> list[Block]:
        self.pool.touch(blocks)
        for block in blocks:
            if self.num_references[block.block_id] == 0:
                self.free_ids.remove(block.block_id)
            self.num_references[block.block_id] += 1
        return blocks

    def forget_in_model(self, block_id: int) -> None:
        for holders in self.hash_to_ids.values():
            if block_id in holders:
                holders.remove(block_id)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
