"""A whole message: collects it from its steps, and writes it as JSON in pieces that are quick to make."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import StringIO

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from gateway.choices import CallIds
from gateway.http.anthropic.answers import Stop, Usage
from gateway.http.anthropic.content import BlockGrows, BlockKind, BlockOpens, BlockStep
from gateway.http.whole_json import PIECE_CHARACTERS, string_pieces

_USAGE = TypeAdapter(Usage)


@dataclass(slots=True)
class Head:
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
        name = self.call_ids.of(block.call, "toolu_")
        return f'{{"type":"tool_use","id":"{name}","name":{json.dumps(block.name)},"input":'


@dataclass(slots=True)
class CollectedMessage:
    """A message's blocks so far."""

    _blocks: list[tuple[BlockOpens, StringIO]] = field(default_factory=list)

    def take(self, steps: Iterable[BlockStep]) -> None:
        for step in steps:
            if isinstance(step, BlockOpens):
                self._blocks.append((step, StringIO()))
            elif isinstance(step, BlockGrows):
                self._blocks[-1][1].write(step.piece)

    def write(self, head: Head, stop: Stop, usage: Usage) -> Iterator[str]:
        yield f'{head.json}"content":['
        for index, (block, content) in enumerate(self._blocks):
            yield "," if index else ""
            yield from _block(head, block, content.getvalue())
        end = {"stop_reason": stop.stop_reason, "stop_sequence": stop.stop_sequence}
        yield f"],{to_json(end).decode()[1:-1]},"
        yield f'"usage":{usage_json(usage)}}}'


def usage_json(usage: Usage) -> str:
    return _USAGE.dump_json(usage).decode()


def _input(arguments: str) -> str:
    """A call's input as JSON. Whole arguments are the input as they are written, as in a stream: numbers beyond a
    double cannot be written again. If the answer ended within the call, the input has the parts that are
    complete, as clients of a stream get them. Without a grammar, a model may write arguments that are not an
    object; then the input is empty."""
    for allow_partial in (False, True):
        try:
            value = from_json(arguments or "{}", allow_inf_nan=False, allow_partial=allow_partial)
        except ValueError:
            continue
        if not isinstance(value, dict):
            return "{}"
        return to_json(value, inf_nan_mode="null").decode() if allow_partial else arguments or "{}"
    return "{}"


def _block(head: Head, block: BlockOpens, content: str) -> Iterator[str]:
    if block.kind is BlockKind.TOOL_USE:
        yield head.call_start(block)
        written = _input(content)
        yield from (
            written[begin : begin + PIECE_CHARACTERS] for begin in range(0, len(written), PIECE_CHARACTERS)
        )
        yield "}"
        return
    kind = block.kind.value
    yield f'{{"type":"{kind}","{kind}":"'
    yield from string_pieces(content)
    yield '","signature":""}' if block.kind is BlockKind.THINKING else '"}'
