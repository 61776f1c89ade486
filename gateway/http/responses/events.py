"""ResponseEvents: turns the changes of a response's output into server-sent events; does no I/O.

    created, in_progress, (item added, [part added], delta*, done, [part done], item done)*,
    completed | incomplete | failed

Events are numbered from 0. A `keepalive` may come between the events of two deltas. OpenAI also sends it, but does not
document it. The JSON is ASCII, because some clients split lines at characters such as U+2028.
"""

from collections.abc import Iterable, Iterator, Sequence

from gateway.http.openai.logprobs import LogprobColumns
from gateway.http.responses.output import (
    CallOutput,
    Change,
    ItemClosed,
    ItemGrew,
    ItemOpened,
    MessageOutput,
    OutputItem,
    ReasoningOutput,
)
from gateway.http.responses.response_json import BEGUN, ResponseJson, ResponseState
from gateway.http.whole_json import ascii_json, in_ascii

LAST_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.failed",
}
"""The last event's name, by the response's status. A cancelled response has the event of a failed one."""

TEXT_EVENTS: dict[type[OutputItem], str] = {
    MessageOutput: "response.output_text",
    ReasoningOutput: "response.reasoning_text",
    CallOutput: "response.function_call_arguments",
}
"""Names of the events of an item's text, without `.delta` and `.done`."""

EMPTY_PARTS: dict[type[OutputItem], str] = {
    MessageOutput: '{"type":"output_text","text":"","annotations":[],"logprobs":[]}',
    ReasoningOutput: '{"type":"reasoning_text","text":""}',
}
"""The only part of an item, without content. Calls have no part."""


class ResponseEvents:
    """Writes one stream. All methods but `ping` return text in pieces that are each quick to make."""

    def __init__(self, response: ResponseJson) -> None:
        self._response = response
        self._sequence_number = 0

    def ping(self) -> bytes:
        """The events that tell a client that its response still runs. If the stream has not begun, these are its first
        events."""
        if self._sequence_number == 0:
            return "".join(self.opening()).encode("ascii")
        return f"{self._begin('keepalive').removesuffix(',')}}}\n\n".encode("ascii")

    def opening(self) -> Iterator[str]:
        """The first events; nothing if the stream has begun."""
        if self._sequence_number > 0:
            return
        for name in ("response.created", "response.in_progress"):
            yield from self._response_event(name, BEGUN, ())

    def of(self, changes: Iterable[Change]) -> Iterator[str]:
        """The events of each change. Use up this iterator before the output changes again."""
        for change in changes:
            match change:
                case ItemOpened(item):
                    yield from self._opened(item)
                case ItemGrew(item, text, logprobs):
                    yield from self._grown(item, text, logprobs)
                case ItemClosed(item):
                    yield from self._closed(item)

    def ending(self, state: ResponseState, items: Sequence[OutputItem]) -> Iterator[str]:
        """The last event, which contains the whole response."""
        yield from self._response_event(LAST_EVENTS[state.status], state, items)

    def _opened(self, item: OutputItem) -> Iterator[str]:
        yield from self._item_event("response.output_item.added", item, is_empty=True)
        if part := EMPTY_PARTS.get(type(item)):
            yield from self._part_event("response.content_part.added", item, iter((part,)))

    def _grown(self, item: OutputItem, text: str, logprobs: LogprobColumns | None) -> Iterator[str]:
        yield self._begin(f"{TEXT_EVENTS[type(item)]}.delta")
        yield f'{_place(item)},"delta":{ascii_json(text)}'
        if isinstance(item, MessageOutput):
            yield ',"logprobs":'
            yield from map(in_ascii, ("[]",) if logprobs is None else item.logprobs_json(logprobs))
        yield "}\n\n"

    def _closed(self, item: OutputItem) -> Iterator[str]:
        yield self._begin(f"{TEXT_EVENTS[type(item)]}.done")
        yield f'{_place(item)},"{"arguments" if isinstance(item, CallOutput) else "text"}":'
        yield from map(in_ascii, item.text_json())
        if isinstance(item, MessageOutput):
            yield ',"logprobs":'
            yield from map(in_ascii, item.logprobs_json())
        yield "}\n\n"
        if type(item) in EMPTY_PARTS:
            yield from self._part_event("response.content_part.done", item, item.part())
        yield from self._item_event("response.output_item.done", item, is_empty=False)

    def _item_event(self, name: str, item: OutputItem, *, is_empty: bool) -> Iterator[str]:
        yield self._begin(name)
        yield f'"output_index":{item.index},"item":'
        yield from map(in_ascii, item.json(is_empty=is_empty))
        yield "}\n\n"

    def _part_event(self, name: str, item: OutputItem, part: Iterator[str]) -> Iterator[str]:
        yield self._begin(name)
        yield f'{_place(item)},"part":'
        yield from map(in_ascii, part)
        yield "}\n\n"

    def _response_event(self, name: str, state: ResponseState, items: Sequence[OutputItem]) -> Iterator[str]:
        yield self._begin(name)
        yield '"response":'
        yield from map(in_ascii, self._response.pieces(state, items))
        yield "}\n\n"

    def _begin(self, name: str) -> str:
        number = self._sequence_number
        self._sequence_number += 1
        return f'event: {name}\ndata: {{"type":"{name}","sequence_number":{number},'


def _place(item: OutputItem) -> str:
    """The keys that say where an item's text belongs in the output. A call has no parts, so no
    `content_index`."""
    part = "" if isinstance(item, CallOutput) else ',"content_index":0'
    return f'"item_id":{ascii_json(item.id)},"output_index":{item.index}{part}'
