"""BlockTable: one request's blocks in token order, with thresholds that show at once whether there is work to do."""

from scheduler.block_pool import Block

NEVER = 2**62


class BlockTable:
    """A request's blocks; the first `num_cached` of them are in the cache."""

    __slots__ = ("_block_size", "blocks", "cache_at", "num_cached", "num_slots")

    def __init__(self, block_size: int, may_cache: bool) -> None:
        self._block_size = block_size
        self.blocks: list[Block] = []
        self.num_slots = 0
        """Tokens that its blocks have room for."""
        self.num_cached = 0
        self.cache_at = block_size if may_cache else NEVER
        """The number of tokens at which the next block can be cached."""

    def append(self, blocks: list[Block]) -> None:
        self.blocks += blocks
        self.num_slots += len(blocks) * self._block_size

    def set_cached(self, num_blocks: int) -> None:
        """Notes that the first `num_blocks` blocks are in the cache now."""
        self.num_cached = num_blocks
        self.cache_at = (num_blocks + 1) * self._block_size

    def stop_caching(self) -> None:
        """Excludes the table from caching: its content was computed for a prefix cache that has since been reset."""
        self.cache_at = NEVER

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple([block.block_id for block in self.blocks])
