"""ContentBlocks: turns an answer's events into steps of content blocks, which open, grow and close.

none --Text--> TEXT        an event of another kind, or the end, first closes the open block
none --Reasoning--> THINKING
none --CallBegins--> TOOL_USE --CallEnds--> none
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from gateway.conversation import AnswerEvent, ArgumentsDelta, CallBegins, CallEnds, Reasoning, Text


class BlockKind(Enum):
    """Anthropic's name of a block's type."""

    TEXT = "text"
    THINKING = "thinking"
    TOOL_USE = "tool_use"


@dataclass(frozen=True, slots=True)
class BlockOpens:
    """A block begins. Blocks are numbered from 0, and never overlap."""

    index: int
    kind: BlockKind
    name: str = ""
    """The tool's name if the block is a call."""
    call: int = 0
    """The call's number among the answer's calls if the block is a call."""


@dataclass(frozen=True, slots=True)
class BlockGrows:
    """More of the open block: text, thinking, or the JSON of a call's input."""

    index: int
    kind: BlockKind
    piece: str


@dataclass(frozen=True, slots=True)
class BlockCloses:
    """The open block is complete, or the answer ended within it."""

    index: int
    kind: BlockKind


BlockStep = BlockOpens | BlockGrows | BlockCloses


class ContentBlocks:
    """The blocks of one answer. A stream and a whole answer have the same blocks."""

    def __init__(self, shows_thinking: bool) -> None:
        """If `shows_thinking` is false, blocks of thinking are empty."""
        self._shows_thinking = shows_thinking
        self._open: BlockKind | None = None
        self._num_closed = 0
        self.asks_for_results = False
        """True if the answer so far has calls, and all of them are complete."""

    def on_events(self, events: Iterable[AnswerEvent]) -> list[BlockStep]:
        """The steps that these events cause."""
        steps: list[BlockStep] = []
        for event in events:
            match event:
                case Text(text):
                    self._grow(steps, BlockKind.TEXT, text)
                case Reasoning(text):
                    self._grow(steps, BlockKind.THINKING, text if self._shows_thinking else "")
                case CallBegins(call, name):
                    self._close(steps)
                    self.asks_for_results = False
                    self._start(steps, BlockOpens(self._num_closed, BlockKind.TOOL_USE, name, call))
                case ArgumentsDelta(_, json):
                    assert self._open is BlockKind.TOOL_USE
                    self._grow(steps, BlockKind.TOOL_USE, json)
                case CallEnds():
                    self.asks_for_results = True
                    self._close(steps)
        return steps

    def end(self) -> list[BlockStep]:
        """The steps at the end of the answer. No more events may follow."""
        steps: list[BlockStep] = []
        self._close(steps)
        return steps

    def _start(self, steps: list[BlockStep], block: BlockOpens) -> None:
        self._open = block.kind
        steps.append(block)

    def _grow(self, steps: list[BlockStep], kind: BlockKind, piece: str) -> None:
        if self._open is not kind:
            self._close(steps)
            self._start(steps, BlockOpens(self._num_closed, kind))
        if piece:
            steps.append(BlockGrows(self._num_closed, kind, piece))

    def _close(self, steps: list[BlockStep]) -> None:
        if self._open is not None:
            steps.append(BlockCloses(self._num_closed, self._open))
            self._open = None
            self._num_closed += 1
