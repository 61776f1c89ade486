"""EventWriter: turns an answer's steps into the Messages API's server-sent events; does no I/O.

    message_start (content_block_start content_block_delta* content_block_stop)* message_delta message_stop

A ping follows the first content_block_start, as in Anthropic's own streams. There is an event per token, so
the constant parts are ready-made texts. The JSON is ASCII, because some clients split lines at characters
such as U+2028.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gateway.http.anthropic.answers import MessageEnd, MessageUsage
from gateway.http.anthropic.content import BlockCloses, BlockGrows, BlockKind, BlockOpens, BlockStep
from gateway.http.anthropic.whole import MessageHead, usage_json
from gateway.http.whole_json import ascii_json

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

DELTAS = {
    BlockKind.TEXT: '{"type":"text_delta","text":',
    BlockKind.THINKING: '{"type":"thinking_delta","thinking":',
    BlockKind.TOOL_USE: '{"type":"input_json_delta","partial_json":',
}
SIGNATURE = '{"type":"signature_delta","signature":""}'


@dataclass(slots=True)
class EventWriter:
    """Writes one answer's events."""

    head: MessageHead
    _has_pinged: bool = False

    def opening(self, usage: MessageUsage) -> bytes:
        """The event before the first step."""
        message = f'{self.head.json}"content":[],"stop_reason":null,"stop_sequence":null,"usage":{usage_json(usage)}}}'
        return _event("message_start", f'"message":{message}')

    def steps(self, steps: Iterable[BlockStep]) -> bytes:
        return b"".join(map(self._step, steps))

    def closing(self, stop: MessageEnd, usage: MessageUsage) -> bytes:
        """The events after the last step."""
        reason = f'{{"stop_reason":"{stop.stop_reason}","stop_sequence":{ascii_json(stop.stop_sequence)}}}'
        return _event("message_delta", f'"delta":{reason},"usage":{usage_json(usage)}') + MESSAGE_STOP

    def _step(self, step: BlockStep) -> bytes:
        match step:
            case BlockOpens():
                start = _event(
                    "content_block_start",
                    f'"index":{step.index},"content_block":{self.head.empty_block(step)}',
                )
                if self._has_pinged:
                    return start
                self._has_pinged = True
                return start + PING
            case BlockGrows(index, kind, piece):
                return _delta(index, f"{DELTAS[kind]}{ascii_json(piece)}}}")
            case BlockCloses(index, kind):
                stop = _event("content_block_stop", f'"index":{index}')
                return _delta(index, SIGNATURE) + stop if kind is BlockKind.THINKING else stop


def error_event(body: dict[str, Any]) -> bytes:
    """The last event of a failed stream."""
    return f"event: error\ndata: {json.dumps(body)}\n\n".encode("ascii")


def _delta(index: int, delta: str) -> bytes:
    return _event("content_block_delta", f'"index":{index},"delta":{delta}')


def _event(name: str, rest: str) -> bytes:
    return f'event: {name}\ndata: {{"type":"{name}",{rest}}}\n\n'.encode("ascii")
