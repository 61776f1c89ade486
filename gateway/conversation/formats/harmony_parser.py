"""HarmonyParser: one turn's messages as events, while they are written; see harmony.py for what they look like.

What follows no head, and what stands on an unknown channel, is text. The format's tokens are dropped wherever they
stand, and so is a head, or a token behind a message, that the answer's end cut off. Two messages of one kind have a
line's end between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.conversation.call_syntax import CallWriter, is_tool_name
from gateway.conversation.events import AnswerPart, Reasoning, Text
from gateway.conversation.formats.harmony_tokens import (
    ANALYSIS,
    CHANNEL,
    CONSTRAIN,
    ENDS,
    FUNCTIONS,
    HEADS,
    MESSAGE,
    RECIPIENT,
    START,
    TOKENS,
)
from gateway.conversation.messages import Tool
from gateway.conversation.reader import Markers, Steps
from gateway.conversation.stepwise import Stepwise

_TOKENS = Markers(TOKENS)
_WORD_ENDS = "< \t\r\n"
_MAX_WORD = 200


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before a message's content."""

    channel: str
    recipient: str


class HarmonyParser(Stepwise):
    """An AnswerParser. Text, in any pieces, gives the same events but for where they are cut."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        """`tools`: those that may be called; without any, there are no calls."""
        self._has_calls = bool(tools)
        self._part = AnswerPart.TEXT
        super().__init__()
        self._calls = CallWriter(tools, self._events.append)
        self._has_shown: set[AnswerPart] = set()
        self._is_new_message = False

    @property
    def part(self) -> AnswerPart:
        """Heads count as text."""
        return self._part

    @property
    def may_reason(self) -> bool:
        """Any message may be a thought."""
        return True

    def _run(self) -> Steps[None]:
        while (yield from self._reader.peek()):
            self._reader.begin_attempt()
            head = yield from self._head()
            if head is not None:
                self._reader.commit()
                yield from self._message(head)
            elif self._reader.has_met_end and (yield from self._is_marked()):
                return  # the answer ended within a head, of which nothing is to be read
            else:
                self._reader.rewind()
                yield from self._stray()

    def _head(self) -> Steps[Head | None]:
        """Within an attempt. None: there is none, or no whole one."""
        reader, recipient = self._reader, ""
        yield from reader.skip_spaces()
        if (yield from reader.next_is(START)):
            yield from reader.word(_WORD_ENDS, _MAX_WORD)
            yield from reader.skip_spaces()
        if (yield from reader.next_is(RECIPIENT)):
            recipient = yield from reader.word(_WORD_ENDS, _MAX_WORD)
            yield from reader.skip_spaces()
        if (yield from reader.next_is(MESSAGE)):
            return Head("", recipient)
        if not (yield from reader.next_is(CHANNEL)):
            return None
        channel = yield from reader.word(_WORD_ENDS, _MAX_WORD)
        while True:
            yield from reader.skip_spaces()
            if (yield from reader.next_is(MESSAGE)):
                return Head(channel, recipient)
            if (yield from reader.next_is(RECIPIENT)):
                recipient = yield from reader.word(_WORD_ENDS, _MAX_WORD)
            elif not (yield from reader.next_is(CONSTRAIN)) and not (
                # A kind of content, such as `json`, which says nothing new.
                yield from reader.word(_WORD_ENDS, _MAX_WORD)
            ):
                return None

    def _is_marked(self) -> Steps[bool]:
        """Whether the attempt, which is over, begins as only a head does."""
        self._reader.rewind()
        self._reader.begin_attempt()
        yield from self._reader.skip_spaces()
        for token in (*HEADS, RECIPIENT + FUNCTIONS):
            if (yield from self._reader.next_is(token)):
                return True
        return False

    def _message(self, head: Head) -> Steps[None]:
        self._is_new_message = True
        if (name := self._function(head.recipient)) is not None:
            self._part = AnswerPart.CALL
            is_call = yield from self._call(name)
            self._part = AnswerPart.TEXT
            if is_call:
                yield from self._reader.skip_spaces()
                yield from self._reader.drop_beginning(_TOKENS)
            yield from self._content(self._text)
        elif head.channel == ANALYSIS and not head.recipient:
            self._part = AnswerPart.REASONING
            yield from self._content(self._reasoning)
            self._part = AnswerPart.TEXT
        else:
            yield from self._content(self._text)
        yield from self._reader.drop_beginning(_TOKENS)

    def _function(self, recipient: str) -> str | None:
        """The function that a message is for."""
        name = recipient.removeprefix(FUNCTIONS)
        is_function = name in self._calls.tools or (name != recipient and is_tool_name(name))
        return name if self._has_calls and is_function else None

    def _call(self, name: str) -> Steps[bool]:
        """Reads the arguments, if that is what the content is."""
        reader = self._reader
        yield from reader.skip_spaces()
        if (yield from reader.peek()) == "{":
            self._calls.begin(name)
            if (yield from reader.json_container(self._calls.add)):
                self._calls.end()
            return True
        reader.begin_attempt()
        for token in ENDS:
            if (yield from reader.next_is(token)):
                self._calls.begin(name)
                self._calls.add("{}")
                self._calls.end()
                reader.rewind()
                return True
        reader.rewind()
        return False

    def _content(self, show: Callable[[str], None]) -> Steps[None]:
        """Shows a message's content, and reads its end. A new head ends it too."""
        reader = self._reader
        while True:
            num_spaces, length = yield from reader.until(_TOKENS, show)
            show(reader.take(num_spaces))
            if not length:
                return
            reader.begin_attempt()
            token = reader.take(length)
            if token in HEADS:
                reader.rewind()
                return
            reader.commit()
            if token in ENDS:
                return

    def _stray(self) -> Steps[None]:
        """A token in the wrong place, or text without a head."""
        reader = self._reader
        reader.begin_attempt()
        for token in TOKENS:
            if (yield from reader.next_is(token)):
                reader.commit()
                return
        reader.rewind()
        yield from self._content(self._text)

    def _text(self, text: str) -> None:
        if text:
            self._events.append(Text(self._separated(AnswerPart.TEXT, text)))

    def _reasoning(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(self._separated(AnswerPart.REASONING, text)))

    def _separated(self, part: AnswerPart, text: str) -> str:
        is_next = self._is_new_message and part in self._has_shown
        self._is_new_message = False
        self._has_shown.add(part)
        return f"\n{text}" if is_next else text
