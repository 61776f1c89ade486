"""BlockTable: one request's blocks in token order, with thresholds that show at once whether there is work to do."""

from baton.kv_groups import KVGroups
from scheduler.block_pool import Block

NEVER = 2**62


class BlockTable:
    """A request's blocks, row by row as in `KVGroups`; the first `num_cached` rows are in the prefix cache."""

    __slots__ = (
        "_block_size",
        "_groups",
        "_num_groups",
        "blocks",
        "cache_at",
        "due_at",
        "leaves_at",
        "num_before_window",
        "num_cached",
        "num_slots",
    )

    def __init__(self, block_size: int, may_cache: bool, groups: KVGroups) -> None:
        self._block_size = block_size
        self._groups = groups
        self._num_groups = groups.num_full + groups.num_windowed
        self.blocks: list[Block] = []
        self.num_slots = 0
        """The number of tokens that the blocks have room for."""
        self.num_cached = 0
        self.num_before_window = 0
        """The number of rows before the window. In these rows, the windowed groups have null blocks."""
        self.cache_at = block_size if may_cache else NEVER
        """The number of tokens at which the next row can be cached."""
        self.leaves_at = groups.leaves_at(0, block_size) if groups.num_windowed else NEVER
        """The number of computed tokens at which the next row leaves the window."""
        self.due_at = 0
        """With fewer tokens than this, there is nothing to allocate, to cache or to give back."""

    def append(self, blocks: list[Block]) -> None:
        """Appends whole rows."""
        self.blocks += blocks
        self.num_slots = len(self.blocks) // self._num_groups * self._block_size
        self._note_due()

    def set_cached(self, num_rows: int) -> None:
        """Notes that the first `num_rows` rows are in the cache now."""
        self.num_cached = num_rows
        self.cache_at = (num_rows + 1) * self._block_size
        self._note_due()

    def set_before_window(self, num_rows: int) -> None:
        """Notes that the window has passed the first `num_rows` rows."""
        self.num_before_window = num_rows
        if self._groups.num_windowed:
            self.leaves_at = self._groups.leaves_at(num_rows, self._block_size)
        self._note_due()

    def stop_caching(self) -> None:
        """Excludes the table from caching: its content was computed for a prefix cache that has since been reset."""
        self.cache_at = NEVER
        self._note_due()

    @property
    def num_rows(self) -> int:
        return self.num_slots // self._block_size

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple([block.block_id for block in self.blocks])

    def _note_due(self) -> None:
        due_at = self.num_slots + 1
        if self.cache_at < due_at:
            due_at = self.cache_at
        self.due_at = due_at if due_at < self.leaves_at else self.leaves_at
