"""PagedMemory: the content of a pool's slots, for fakes of computing and moving parts."""

from collections.abc import Sequence
from itertools import accumulate

from baton.kv_groups import NULL_BLOCK_ID, ONE_GROUP, KVGroups


class PagedMemory:
    """The content of every slot of the pool.

    A slot's KV depends on all tokens up to it, and so does its stand-in.

    Each KV group has its own stand-ins. The null block is never written.
    """

    def __init__(self, block_size: int, groups: KVGroups = ONE_GROUP) -> None:
        self.block_size = block_size
        self.groups = groups
        self._blocks: dict[int, list[int]] = {}
        self._host_blocks: dict[int, list[int]] = {}

    def write(self, block_ids: Sequence[int], contents: Sequence[int], start: int = 0) -> None:
        """Writes `contents[i]` into the slots of position `start + i`."""
        for position, content in enumerate(contents, start):
            row, offset = divmod(position, self.block_size)
            for group in range(self.groups.num_groups):
                block_id = block_ids[row * self.groups.num_groups + group]
                if block_id != NULL_BLOCK_ID:
                    slots = self._blocks.setdefault(block_id, [0] * self.block_size)
                    slots[offset] = _of_group(content, group)

    def copy_out(self, block_id: int, host_block_id: int) -> None:
        self._host_blocks[host_block_id] = list(self._blocks.get(block_id, [0] * self.block_size))

    def copy_in(self, host_block_id: int, block_id: int) -> None:
        self._blocks[block_id] = list(self._host_blocks[host_block_id])

    def holds(self, block_ids: Sequence[int], contents: Sequence[int], first: int) -> bool:
        """Whether attention finds these contents in the slots of each group.

        `contents` are those of the token at position `first`, and of the tokens after it.
        """
        nothing, num_groups = [0] * self.block_size, self.groups.num_groups
        num_rows = -(-len(contents) // self.block_size)
        for group in range(num_groups):
            is_windowed = group >= self.groups.num_full
            start = max(0, first - self.groups.window + 1) if is_windowed else 0
            own = block_ids[group : num_rows * num_groups : num_groups]
            slots = [slot for block_id in own for slot in self._blocks.get(block_id, nothing)]
            if slots[start : len(contents)] != [_of_group(content, group) for content in contents[start:]]:
                return False
        return True


def _of_group(content: int, group: int) -> int:
    return content + group


def kv_of(token_ids: Sequence[int], previous: int = 0) -> list[int]:
    """The stand-ins of the KV of `token_ids`. `previous` is the stand-in of the token before them."""
    return list(accumulate(token_ids, lambda before, token: hash((before, token)), initial=previous))[1:]
