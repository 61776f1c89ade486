"""A whole message: collects it from its steps, and writes it as JSON in pieces that are quick to make."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import StringIO

from pydantic import TypeAdapter
from pydantic_core import to_json

from gateway.call_ids import CallIds
from gateway.http.anthropic.answers import MessageEnd, MessageUsage
from gateway.http.anthropic.call_input import input_pieces
from gateway.http.anthropic.content import BlockGrows, BlockKind, BlockOpens, BlockStep
from gateway.http.whole_json import string_pieces

_USAGE = TypeAdapter(MessageUsage)


@dataclass(slots=True)
class MessageHead:
    """Writes the beginning of an answer, and the ids of its calls."""

    request_id: str
    model: str
    call_ids: CallIds = field(default_factory=CallIds)

    @property
    def json(self) -> str:
        """The beginning of the message's JSON object, without its closing brace."""
        start = {"id": f"msg_{self.request_id}", "type": "message", "role": "assistant", "model": self.model}
        return f"{json.dumps(start, separators=(',', ':'))[:-1]},"

    def empty_block(self, block: BlockOpens) -> str:
        """The JSON of a block without content, in ASCII."""
        match block.kind:
            case BlockKind.TEXT:
                return '{"type":"text","text":""}'
            case BlockKind.THINKING:
                return '{"type":"thinking","thinking":"","signature":""}'
            case BlockKind.TOOL_USE:
                return f"{self.call_start(block)}{{}}}}"

    def call_start(self, block: BlockOpens) -> str:
        """A call's JSON up to its input."""
        call_id = self.call_ids.of(block.call, "toolu_")
        return f'{{"type":"tool_use","id":"{call_id}","name":{json.dumps(block.name)},"input":'


@dataclass(slots=True)
class CollectedMessage:
    """A message's blocks so far."""

    _blocks: list[tuple[BlockOpens, StringIO]] = field(default_factory=list)

    def on_steps(self, steps: Iterable[BlockStep]) -> None:
        for step in steps:
            if isinstance(step, BlockOpens):
                self._blocks.append((step, StringIO()))
            elif isinstance(step, BlockGrows):
                self._blocks[-1][1].write(step.piece)

    def write(self, head: MessageHead, stop: MessageEnd, usage: MessageUsage) -> Iterator[str]:
        yield f'{head.json}"content":['
        for index, (block, content) in enumerate(self._blocks):
            yield "," if index else ""
            yield from _block(head, block, content.getvalue())
        end = {"stop_reason": stop.stop_reason, "stop_sequence": stop.stop_sequence}
        yield f"],{to_json(end).decode()[1:-1]},"
        yield f'"usage":{usage_json(usage)}}}'


def usage_json(usage: MessageUsage) -> str:
    return _USAGE.dump_json(usage).decode()


def _block(head: MessageHead, block: BlockOpens, content: str) -> Iterator[str]:
    if block.kind is BlockKind.TOOL_USE:
        yield head.call_start(block)
        yield from input_pieces(content)
        yield "}"
        return
    kind = block.kind.value
    yield f'{{"type":"{kind}","{kind}":"'
    yield from string_pieces(content)
    yield '","signature":""}' if block.kind is BlockKind.THINKING else '"}'
