"""Three classical schedulers as models, written rule by rule from their descriptions.

They use none of our code.

`NanoVLLM` and `MiniVLLM` have two phases: a step either prefills whole prompts, or decodes. `Mixed` does both
in one step, like the scheduler in a book's chapter on nano-vLLM. A test calls a model for one step after
another. The model returns the step's requests in order, each with the number of tokens that the step
computes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.factories.scheduling import EOS, token_at

Step = list[tuple[str, int]]
NextToken = Callable[[str, int], int]


@dataclass
class Sequence:
    """A request as a model follows it."""

    name: str
    tokens: list[int]
    max_tokens: int
    ignore_eos: bool = False
    max_model_len: int | None = None
    """Limit for prompt and completion together. Only MiniVLLM uses it."""
    num_completion_tokens: int = 0
    num_cached: int = 0
    """Number of tokens that its last prefill found in the prefix cache."""
    blocks: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)


class BlockManager:
    """Blocks by number. The least recently freed block is used first, and loses its content."""

    def __init__(self, num_blocks: int, block_size: int, is_caching: bool) -> None:
        self.size = block_size
        self.free = deque(range(num_blocks))
        self._is_caching = is_caching
        self._num_owners = [0] * num_blocks
        self._text: list[tuple[int, ...] | None] = [None] * num_blocks
        """For each full block: all tokens from the beginning of the sequence to the end of the block."""
        self._holders: dict[tuple[int, ...], list[int]] = {}

    def can_allocate(self, seq: Sequence) -> bool:
        """Whether enough blocks are free for all of the sequence, even if some of it is cached."""
        return len(self.free) >= self._num_blocks(seq)

    def allocate(self, seq: Sequence) -> None:
        """Allocates the sequence's blocks.

        Cached full blocks come first, as many as there are without a gap. At least one token is left to
        compute.
        """
        assert not seq.blocks
        for end in range(self.size, len(seq), self.size):
            holders = self._holders.get(tuple(seq.tokens[:end]))
            if not holders:
                break
            seq.blocks.append(holders[0])
        for block in seq.blocks:
            if not self._num_owners[block]:
                self.free.remove(block)
            self._num_owners[block] += 1
        num_hits = len(seq.blocks)
        seq.num_cached = num_hits * self.size
        while len(seq.blocks) < self._num_blocks(seq):
            self._take(seq)
        self._fill(seq, num_hits)

    def needs_block(self, seq: Sequence) -> bool:
        """Whether the sequence's last token, which a decode step computes, begins a new block."""
        return len(seq) % self.size == 1

    def can_append(self, seq: Sequence) -> bool:
        return len(self.free) >= self.needs_block(seq)

    def append(self, seq: Sequence) -> None:
        if self.needs_block(seq):
            self._take(seq)
        self._fill(seq, (len(seq) - 1) // self.size)

    def deallocate(self, seq: Sequence) -> None:
        """Frees the blocks. The last block is freed first, and so is used first."""
        for block in reversed(seq.blocks):
            self._num_owners[block] -= 1
            if not self._num_owners[block]:
                self.free.append(block)
        seq.blocks = []

    def _num_blocks(self, seq: Sequence) -> int:
        return -(-len(seq) // self.size)

    def _take(self, seq: Sequence) -> None:
        block = self.free.popleft()
        if (text := self._text[block]) is not None:
            self._holders[text].remove(block)
            self._text[block] = None
        self._num_owners[block] = 1
        seq.blocks.append(block)

    def _fill(self, seq: Sequence, first: int) -> None:
        """Caches the blocks from `first` on that this step fills."""
        for index in range(first, len(seq) // self.size if self._is_caching else 0):
            text = tuple(seq.tokens[: (index + 1) * self.size])
            self._text[seq.blocks[index]] = text
            self._holders.setdefault(text, []).append(seq.blocks[index])


class ClassicalScheduler:
    """The common part of the three: two queues, preemption, and how a step's tokens are processed."""

    def __init__(
        self,
        *,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        next_token: NextToken = token_at,
    ) -> None:
        self.blocks = BlockManager(
            num_blocks - 1, block_size, enable_prefix_caching
        )  # our pool reserves a null block
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.preempted: list[str] = []
        """The sequences that were preempted in this step, in order."""
        self.has_both = False
        """Whether this step has both prefills and decodes."""
        self._next_token = next_token

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def step(self) -> Step:
        self.preempted = []
        prefills, decodes = self.schedule()
        self.has_both = bool(prefills and decodes)
        step = [(seq.name, len(seq) - seq.num_cached) for seq in prefills] + [
            (seq.name, 1) for seq in decodes
        ]
        for seq in prefills + decodes:
            self._postprocess(seq)
        return step

    def schedule(self) -> tuple[list[Sequence], list[Sequence]]:
        """The step's prefills, and its decodes."""
        raise NotImplementedError

    def preempt(self, seq: Sequence) -> None:
        self.blocks.deallocate(seq)
        self.waiting.appendleft(seq)
        self.preempted.append(seq.name)

    def _postprocess(self, seq: Sequence) -> None:
        token = self._next_token(seq.name, seq.num_completion_tokens)
        seq.tokens.append(token)
        seq.num_completion_tokens += 1
        if self._has_ended(seq, token):
            self.blocks.deallocate(seq)
            self.running.remove(seq)

    def _has_ended(self, seq: Sequence, token: int) -> bool:
        return (not seq.ignore_eos and token == EOS) or seq.num_completion_tokens == seq.max_tokens


class NanoVLLM(ClassicalScheduler):
    """Two phases. A step has a limited number of places, but more sequences may run.

    A prompt uses budget only for tokens that are not cached.
    """

    def schedule(self) -> tuple[list[Sequence], list[Sequence]]:
        prefills = self._prefill()
        return (prefills, []) if prefills else ([], self._decode())

    def _prefill(self) -> list[Sequence]:
        prefills: list[Sequence] = []
        num_charged = 0
        while self.waiting and len(prefills) < self.max_num_seqs:
            seq = self.waiting[0]
            if num_charged + len(seq) > self.max_num_batched_tokens or not self.blocks.can_allocate(seq):
                break
            self.blocks.allocate(seq)
            num_charged += self._charge(seq)
            self.running.append(self.waiting.popleft())
            prefills.append(seq)
        return prefills

    def _charge(self, seq: Sequence) -> int:
        return len(seq) - seq.num_cached

    def _decode(self) -> list[Sequence]:
        """Decodes the first sequences.

        A sequence that lacks a block preempts the last ones, or else itself.
        """
        decodes: list[Sequence] = []
        while self.running and len(decodes) < self.max_num_seqs:
            seq = self.running.popleft()
            while not self.blocks.can_append(seq):
                if not self.running:
                    self.preempt(seq)
                    break
                self.preempt(self.running.pop())
            else:
                self.blocks.append(seq)
                decodes.append(seq)
        self.running.extendleft(reversed(decodes))
        return decodes


class MiniVLLM(NanoVLLM):
    """Like nano-vLLM, with these differences.

    A prompt uses budget for its whole length. Decodes keep to the budget. A sequence gets room for its next
    token before the model checks whether the step has a place for the sequence.
    """

    def _charge(self, seq: Sequence) -> int:
        return len(seq)

    def _decode(self) -> list[Sequence]:
        decodes: list[Sequence] = []
        while self.running:
            seq = self.running.popleft()
            if not self.blocks.can_append(seq):
                if not self.running:
                    self.preempt(seq)
                    break
                self.running.appendleft(seq)
                self.preempt(self.running.pop())
            elif len(decodes) >= min(self.max_num_batched_tokens, self.max_num_seqs):
                self.running.appendleft(seq)
                break
            else:
                self.blocks.append(seq)
                decodes.append(seq)
        self.running.extendleft(reversed(decodes))
        return decodes

    def _has_ended(self, seq: Sequence, token: int) -> bool:
        is_too_long = seq.max_model_len is not None and len(seq) >= seq.max_model_len
        return is_too_long or super()._has_ended(seq, token)


class Mixed(ClassicalScheduler):
    """Computes prompts first, without a budget. All other running sequences decode in the same step.

    If blocks are missing, the last of these sequences are preempted in the same step, until the others have enough
    blocks. The number of slots is that of the chapter's example, since its code has no slots.
    """

    def schedule(self) -> tuple[list[Sequence], list[Sequence]]:
        decodes, prefills = list(self.running), []
        while self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not self.blocks.can_allocate(seq):
                break
            self.blocks.allocate(seq)
            self.running.append(self.waiting.popleft())
            prefills.append(seq)
        while sum(map(self.blocks.needs_block, decodes)) > len(self.blocks.free):
            victim = decodes.pop()
            self.running.remove(victim)
            self.preempt(victim)
        for seq in decodes:
            self.blocks.append(seq)
        return prefills, decodes
