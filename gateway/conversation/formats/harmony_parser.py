"""Harmony's tokens, and HarmonyParser, which turns a turn's messages into events while they arrive.

harmony.py shows the format. Content without a head, or on an unknown channel, is text. The format's tokens are always
dropped; ordinary text with the same characters stays. An answer may be cut off in a head, or in a token that follows a
message. This unfinished part is dropped, too. A line end separates two messages of the same kind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.conversation.answer_format import SPECIAL
from gateway.conversation.answer_parser import AnswerParser
from gateway.conversation.call_syntax import CallWriter, is_tool_name
from gateway.conversation.events import AnswerPart, Reasoning, Text
from gateway.conversation.messages import Tool
from gateway.conversation.reader import Markers, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
HEADS = (START, CHANNEL)
"""Each of these tokens begins the head of a message."""
ENDS = (END, CALL, RETURN)
"""Each of these tokens ends a message."""
TOKENS = (*HEADS, *ENDS, MESSAGE, CONSTRAIN)

ASSISTANT = "assistant"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
RECIPIENT = "to="
FUNCTIONS = "functions."

_WORD_ENDS = f"{SPECIAL}< \t\r\n"
_MAX_WORD = 200


@dataclass(frozen=True, slots=True)
class HarmonyHead:
    """The part of a message before its content."""

    channel: str
    recipient: str


class HarmonyParser(AnswerParser):
    """Parses one turn. While a message's head arrives, `part` is TEXT. `may_reason` is always True, since any message
    may be reasoning."""

    def __init__(self, tools: Sequence[Tool], prefix: str) -> None:
        """`tools`: the tools that the model may call. If it is empty, there are no calls. `prefix`: the text
        before each of the format's tokens."""
        self._has_calls = bool(tools)
        self._prefix = prefix
        self._tokens = Markers([prefix + token for token in TOKENS])
        super().__init__(may_reason=True)
        self._calls = CallWriter(tools, self._events.append)
        self._has_shown: set[AnswerPart] = set()
        self._is_new_message = False

    def _run(self) -> Steps[None]:
        while (yield from self._reader.peek()):
            self._reader.begin_attempt()
            head = yield from self._head()
            if head is not None:
                self._reader.commit()
                yield from self._message(head)
            elif self._reader.has_met_end and (yield from self._begins_like_head()):
                return  # the answer ended within a head, which is dropped
            else:
                self._reader.rewind()
                yield from self._read_stray()

    def _head(self) -> Steps[HarmonyHead | None]:
        """Reads a head, within an attempt. None: there is no head, or it is not complete."""
        reader, recipient = self._reader, ""
        yield from reader.skip_spaces()
        if (yield from self._skip_if_next(START)):
            yield from reader.word(_WORD_ENDS, _MAX_WORD)
            yield from reader.skip_spaces()
        if (yield from reader.skip_if_next(RECIPIENT)):
            recipient = yield from reader.word(_WORD_ENDS, _MAX_WORD)
            yield from reader.skip_spaces()
        if (yield from self._skip_if_next(MESSAGE)):
            return HarmonyHead("", recipient)
        if not (yield from self._skip_if_next(CHANNEL)):
            return None
        channel = yield from reader.word(_WORD_ENDS, _MAX_WORD)
        while True:
            yield from reader.skip_spaces()
            if (yield from self._skip_if_next(MESSAGE)):
                return HarmonyHead(channel, recipient)
            if (yield from reader.skip_if_next(RECIPIENT)):
                recipient = yield from reader.word(_WORD_ENDS, _MAX_WORD)
            elif not (yield from self._skip_if_next(CONSTRAIN)) and not (
                # This word is a type of content, such as `json`, which is ignored.
                yield from reader.word(_WORD_ENDS, _MAX_WORD)
            ):
                return None

    def _begins_like_head(self) -> Steps[bool]:
        """Whether the text of the attempt begins like a head. Begins the attempt again."""
        self._reader.rewind()
        self._reader.begin_attempt()
        yield from self._reader.skip_spaces()
        for token in HEADS:
            if (yield from self._skip_if_next(token)):
                return True
        return (yield from self._reader.skip_if_next(RECIPIENT + FUNCTIONS))

    def _message(self, head: HarmonyHead) -> Steps[None]:
        self._is_new_message = True
        if (name := self._function(head.recipient)) is not None:
            self.part = AnswerPart.CALL
            is_call = yield from self._call(name)
            self.part = AnswerPart.TEXT
            if is_call:
                yield from self._reader.skip_spaces()
                yield from self._reader.drop_beginning(self._tokens)
            yield from self._content(self._text)
        elif head.channel == ANALYSIS and not head.recipient:
            self.part = AnswerPart.REASONING
            yield from self._content(self._reasoning)
            self.part = AnswerPart.TEXT
        else:
            yield from self._content(self._text)
        yield from self._reader.drop_beginning(self._tokens)

    def _function(self, recipient: str) -> str | None:
        """The function to which a message is addressed; None if there is none."""
        name = recipient.removeprefix(FUNCTIONS)
        is_function = name in self._calls.tools or (name != recipient and is_tool_name(name))
        return name if self._has_calls and is_function else None

    def _call(self, name: str) -> Steps[bool]:
        """Reads the arguments of a call. False: the content is neither arguments nor empty, so it is text."""
        reader = self._reader
        yield from reader.skip_spaces()
        if (yield from reader.peek()) == "{":
            self._calls.begin(name)
            if (yield from reader.json_container(self._arguments)):
                self._calls.end()
            return True
        reader.begin_attempt()
        for token in ENDS:
            if (yield from self._skip_if_next(token)):
                self._calls.begin(name)
                self._calls.add("{}")
                self._calls.end()
                reader.rewind()
                return True
        reader.rewind()
        return False

    def _content(self, show: Callable[[str], None]) -> Steps[None]:
        """Passes a message's content to `show`, and reads the token at its end. A new head also ends the
        content."""
        reader = self._reader
        while True:
            num_spaces, length = yield from reader.until(self._tokens, show)
            show(reader.read_arrived(num_spaces))
            if not length:
                return
            reader.begin_attempt()
            token = reader.read_arrived(length).removeprefix(self._prefix)
            if token in HEADS:
                reader.rewind()
                return
            reader.commit()
            if token in ENDS:
                return

    def _read_stray(self) -> Steps[None]:
        """Reads and drops a token in a wrong place. If there is no such token, reads text without a head."""
        reader = self._reader
        reader.begin_attempt()
        for token in TOKENS:
            if (yield from self._skip_if_next(token)):
                reader.commit()
                return
        reader.rewind()
        yield from self._content(self._text)

    def _skip_if_next(self, token: str) -> Steps[bool]:
        """Reads this token of the format if it comes next, within an attempt."""
        return self._reader.skip_if_next(self._prefix + token)

    def _arguments(self, json: str) -> None:
        self._calls.add(json.replace(SPECIAL, ""))

    def _text(self, text: str) -> None:
        if text := text.replace(SPECIAL, ""):
            self._events.append(Text(self._separated(AnswerPart.TEXT, text)))

    def _reasoning(self, text: str) -> None:
        if text := text.replace(SPECIAL, ""):
            self._events.append(Reasoning(self._separated(AnswerPart.REASONING, text)))

    def _separated(self, part: AnswerPart, text: str) -> str:
        is_next = self._is_new_message and part in self._has_shown
        self._is_new_message = False
        self._has_shown.add(part)
        return f"\n{text}" if is_next else text
