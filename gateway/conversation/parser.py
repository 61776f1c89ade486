"""TurnParser: turns an assistant's turn into events while the model writes it.

    [reasoning] ( text | section of calls )*
    [reasoning] ( formatted text | sections of calls )      if a response format holds for the text

If a text begins like a call but is none, it counts as text. There is one exception: if the answer has a call
already, or must call, and ends within such a text, the text is dropped as an unfinished call. Spaces around
reasoning and calls are dropped. Once formatted text has begun, no call can follow, since a JSON string may contain the
text of a marker.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.conversation.answer_parser import AnswerParser
from gateway.conversation.call_syntax import CallSyntax, CallWriter
from gateway.conversation.events import AnswerPart, Reasoning, Text
from gateway.conversation.messages import Tool
from gateway.conversation.reader import Markers, Steps


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags before and after a model's reasoning."""

    begin: str
    end: str


class TurnParser(AnswerParser):
    """Parses the turns of all models except models with harmony. Reasoning can only be at the beginning of a turn. A
    text that begins like a call is part of a call until it is clear that it is none."""

    def __init__(
        self,
        syntax: CallSyntax | None,
        tools: Sequence[Tool],
        tags: ReasoningTags | None,
        has_begun_to_reason: bool,
        *,
        is_after_reasoning: bool,
        is_formatted: bool,
        must_call: bool,
    ) -> None:
        """`syntax`: None if there are no calls. `has_begun_to_reason`: the prompt ends with the opening tag.
        `is_after_reasoning`: the prompt ends with the closing tag. `is_formatted`: a response format holds for the
        text. `must_call`: the answer has calls and no text."""
        self._syntax = syntax
        self._tags = tags
        self._has_begun_to_reason = has_begun_to_reason
        self._is_after_reasoning = is_after_reasoning
        self._is_formatted = is_formatted
        self._must_call = must_call
        self._has_text = False
        """Whether text has begun; spaces do not count."""
        super().__init__(may_reason=tags is not None)
        self._calls = CallWriter(tools, self._events.append, must_call=must_call)

    def _run(self) -> Steps[None]:
        if self._tags is not None:
            yield from self._reason(self._tags)
            self.may_reason = False
        elif self._is_after_reasoning:
            yield from self._reader.skip_spaces()
        if self._syntax is None:
            yield from self._reader.until(Markers(()), self._text)
        else:
            yield from self._text_and_calls(self._syntax)

    def _reason(self, tags: ReasoningTags) -> Steps[None]:
        if not self._has_begun_to_reason:
            self._reader.begin_attempt()
            yield from self._reader.skip_spaces()
            if not (yield from self._reader.skip(tags.begin)):
                self._reader.rewind()
                if self._must_call:
                    self._reader.drop_unfinished()
                return
            self._reader.commit()
        self.part = AnswerPart.REASONING
        yield from self._reader.skip_spaces()
        num_spaces, length = yield from self._reader.until(Markers((tags.end,)), self._reasoning)
        self.part = AnswerPart.TEXT
        self._reader.read_arrived(num_spaces + length)
        yield from self._reader.skip_spaces()

    def _text_and_calls(self, syntax: CallSyntax) -> Steps[None]:
        markers = Markers(syntax.markers)
        if self._must_call:
            yield from self._reader.skip_spaces()
            yield from self._reader.drop_beginning(markers)
        if syntax.bare_beginning is not None:
            self._reader.begin_attempt()
            yield from self._reader.skip_spaces()
            yield from self._section(syntax, markers)
        while True:
            num_spaces, length = yield from self._reader.until(markers, self._text)
            if not length:
                return
            if self._is_formatted and self._has_text:
                markers = Markers(())
                continue
            self._reader.begin_attempt()
            self._reader.read_arrived(num_spaces + length)
            if not (yield from self._section(syntax, markers)):
                self._text(self._reader.read_arrived(num_spaces + 1))

    def _section(self, syntax: CallSyntax, markers: Markers) -> Steps[bool]:
        """Reads a section. False: there is no call; then the attempt ends, and its text will be read
        again."""
        self.part = AnswerPart.CALL
        is_call = yield from syntax.read(self._reader, self._calls)
        self.part = AnswerPart.TEXT
        if not is_call:
            self._reader.rewind()
        if self._calls.has_begun or self._must_call:
            self._reader.drop_unfinished()
        if is_call:
            yield from self._reader.skip_spaces()
            yield from self._reader.drop_beginning(markers)
        return is_call

    def _text(self, text: str) -> None:
        if text:
            self._has_text |= not text.isspace()
            self._events.append(Text(text))

    def _reasoning(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))
