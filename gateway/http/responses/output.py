"""Output: the items of an answer while the model generates it, and the changes of these items.

in_progress --> completed
     |--------> incomplete      the answer ended within the item
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from types import MappingProxyType
from typing import Literal

from baton.request import TokenLogprobs
from gateway.call_ids import CallIds
from gateway.conversation import AnswerEvent, ArgumentsDelta, CallBegins, CallEnds, Reasoning, Text
from gateway.http.openai.logprobs import ChatTokens, LogprobColumns
from gateway.http.whole_json import json_string, string_pieces
from gateway.token_parts import TextLogprobs

ItemStatus = Literal["in_progress", "completed", "incomplete"]


@dataclass(slots=True, eq=False)
class OutputItem:
    """One item. Its JSON is written in pieces that are each quick to make."""

    id: str
    index: int
    status: ItemStatus = "in_progress"
    _text: StringIO = field(default_factory=StringIO)

    def add(self, text: str) -> None:
        self._text.write(text)

    def text_json(self) -> Iterator[str]:
        """The item's whole text as a JSON string with quotes, in pieces."""
        yield '"'
        yield from string_pieces(self._text.getvalue())
        yield '"'

    def part(self) -> Iterator[str]:
        """The JSON of the item's only part, in pieces. Empty if the item has no part."""
        return iter(())

    def json(self, *, is_empty: bool = False) -> Iterator[str]:
        """The item's JSON, in pieces. `is_empty`: without content, as it was when the item began."""
        raise NotImplementedError

    def context_json(self) -> Iterator[str]:
        """The JSON that a later turn needs of this item, in pieces."""
        return self.json()


@dataclass(slots=True, eq=False)
class MessageOutput(OutputItem):
    """A message for the user."""

    tokens: ChatTokens | None = None
    """Writes log-probabilities; None if the client does not want them."""
    logprobs: LogprobColumns = field(default_factory=LogprobColumns)

    def logprobs_json(self, columns: LogprobColumns | None = None) -> Iterator[str]:
        """The JSON list of the log-probabilities of `columns`, or of all tokens."""
        if self.tokens is None:
            return iter(("[]",))
        return self.tokens.positions(self.logprobs if columns is None else columns)

    def part(self) -> Iterator[str]:
        return self._part(self.logprobs_json())

    def json(self, *, is_empty: bool = False) -> Iterator[str]:
        return self._json(iter(()) if is_empty else self.part())

    def context_json(self) -> Iterator[str]:
        return self._json(self._part(iter(("[]",))))

    def _part(self, logprobs: Iterator[str]) -> Iterator[str]:
        yield '{"type":"output_text","text":'
        yield from self.text_json()
        yield ',"annotations":[],"logprobs":'
        yield from logprobs
        yield "}"

    def _json(self, part: Iterator[str]) -> Iterator[str]:
        yield f'{{"id":{json_string(self.id)},"type":"message","role":"assistant","status":"{self.status}","content":['
        yield from part
        yield "]}"


@dataclass(slots=True, eq=False)
class ReasoningOutput(OutputItem):
    """The model's reasoning. `content` contains the text itself; there is no summary."""

    def part(self) -> Iterator[str]:
        yield '{"type":"reasoning_text","text":'
        yield from self.text_json()
        yield "}"

    def json(self, *, is_empty: bool = False) -> Iterator[str]:
        yield f'{{"id":{json_string(self.id)},"type":"reasoning","status":"{self.status}","summary":[],"content":['
        if not is_empty:
            yield from self.part()
        yield '],"encrypted_content":null}'


@dataclass(slots=True, eq=False, kw_only=True)
class CallOutput(OutputItem):
    """A call that the client should make. The item's text is the call's arguments."""

    call_id: str
    name: str
    namespace: str | None = None

    def json(self, *, is_empty: bool = False) -> Iterator[str]:
        yield f'{{"id":{json_string(self.id)},"type":"function_call","status":"{self.status}",'
        if self.namespace is not None:
            yield f'"namespace":{json_string(self.namespace)},'
        yield f'"call_id":{json_string(self.call_id)},"name":{json_string(self.name)},"arguments":'
        yield from ('""',) if is_empty else self.text_json()
        yield "}"


@dataclass(frozen=True, slots=True)
class ItemOpened:
    """A new item began."""

    item: OutputItem


@dataclass(frozen=True, slots=True)
class ItemGrew:
    """The open item got more text."""

    item: OutputItem
    text: str
    logprobs: LogprobColumns | None = None


@dataclass(frozen=True, slots=True)
class ItemClosed:
    """The item ended."""

    item: OutputItem


Change = ItemOpened | ItemGrew | ItemClosed

NO_NAMESPACES: Mapping[str, tuple[str, str]] = MappingProxyType({})


class ResponseOutput:
    """The items of one answer. Items never overlap, so at most one is open."""

    def __init__(
        self,
        request_id: str,
        tokens: ChatTokens | None,
        namespaces: Mapping[str, tuple[str, str]] = NO_NAMESPACES,
    ) -> None:
        """`namespaces`: for each function's name that the model knows, the function's namespace, and its name there."""
        self._namespaces = namespaces
        self._request_id = request_id
        self._call_ids = CallIds()
        self._tokens = tokens
        self._open: OutputItem | None = None
        self._logprobs: list[TextLogprobs] = []
        """Log-probabilities of tokens whose text has not arrived yet."""
        self._messages: list[MessageOutput] = []
        self.items: list[OutputItem] = []

    def on_events(
        self, events: Iterable[AnswerEvent], logprobs: Sequence[TextLogprobs] = ()
    ) -> Iterator[Change]:
        """The changes that these events cause. `logprobs`: the log-probabilities of the tokens of messages, in order,
        each with the number of its message."""
        if self._tokens is not None:
            self._logprobs += logprobs
        for event in events:
            match event:
                case Text(text):
                    if not isinstance(self._open, MessageOutput):
                        yield from self._begin_message()
                    yield self._grow(text, self._logprobs_of_message())
                case Reasoning(text):
                    if not isinstance(self._open, ReasoningOutput):
                        yield from self._begin(ReasoningOutput(*self._id_and_index("rs")))
                    yield self._grow(text)
                case CallBegins(index, name):
                    namespace, name = self._namespaces.get(name, (None, name))
                    call_id = self._call_ids.of(index)
                    call = CallOutput(
                        *self._id_and_index("fc"), call_id=call_id, name=name, namespace=namespace
                    )
                    yield from self._begin(call)
                case ArgumentsDelta(_, json):
                    yield self._grow(json)
                case CallEnds():
                    yield from self._close("completed")

    def end(self, is_cut: bool) -> Iterator[Change]:
        """The changes at the answer's end. `is_cut`: the answer ended before the model had finished. If a
        finished answer has no item, it gets an empty message."""
        if not self.items and not is_cut:
            yield from self._begin_message()
        late = [*self._logprobs_of_message(), *(each for _, each in self._logprobs)]
        if isinstance(self._open, MessageOutput) and late:
            yield self._grow("", late)
        is_incomplete = is_cut or isinstance(self._open, CallOutput)
        yield from self._close("incomplete" if is_incomplete else "completed")

    def _id_and_index(self, prefix: str) -> tuple[str, int]:
        index = len(self.items)
        return f"{prefix}_{self._request_id}_{index}", index

    def _begin_message(self) -> Iterator[Change]:
        message = MessageOutput(*self._id_and_index("msg"), tokens=self._tokens)
        self._messages.append(message)
        return self._begin(message)

    def _begin(self, item: OutputItem) -> Iterator[Change]:
        yield from self._close("completed")
        self.items.append(item)
        self._open = item
        yield ItemOpened(item)

    def _grow(self, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> ItemGrew:
        assert self._open is not None, "an item has begun"
        self._open.add(text)
        if not isinstance(self._open, MessageOutput) or not logprobs:
            return ItemGrew(self._open, text)
        self._open.logprobs.extend(logprobs)
        return ItemGrew(self._open, text, LogprobColumns(logprobs))

    def _logprobs_of_message(self) -> list[TokenLogprobs]:
        """Takes those waiting log-probabilities that belong to the open message.

        The text of a long piece may come before its tokens. So log-probabilities of an earlier message may arrive after
        this message has ended. They are added to the earlier message: a stream has sent it already, but a whole answer
        sends it later.
        """
        taken, waiting = list[TokenLogprobs](), list[TextLogprobs]()
        for number, each in self._logprobs:
            place = max(number, 0)  # tokens without text may come before the first message
            if place >= len(self._messages):
                waiting.append((number, each))
            elif (message := self._messages[place]) is self._open:
                taken.append(each)
            else:
                message.logprobs.extend([each])
        self._logprobs = waiting
        return taken

    def _close(self, status: ItemStatus) -> Iterator[Change]:
        if self._open is not None:
            self._open.status = status
            yield ItemClosed(self._open)
            self._open = None
