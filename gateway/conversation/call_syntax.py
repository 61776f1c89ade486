"""CallSyntax: how a family of models writes calls. CallWriter: turns the calls that a syntax reads into events."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.conversation.events import AnswerEvent, ArgumentsDelta, CallBegins, CallEnds
from gateway.conversation.lark import Lark
from gateway.conversation.messages import Tool
from gateway.conversation.reader import Reader, Steps

MAX_MISREAD = 8
"""A syntax reads at most this many texts of an answer twice: texts that begin like a value or a call, but are none."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def is_tool_name(name: str) -> bool:
    """Whether every syntax can write this name. If the text in the place of a name is not such a name, there
    is no call."""
    return _NAME.fullmatch(name) is not None


class CallWriter:
    """Turns the calls that a syntax reads into events."""

    def __init__(
        self, tools: Sequence[Tool], emit: Callable[[AnswerEvent], None], *, must_call: bool = False
    ) -> None:
        """`must_call`: the answer has calls and no text, and their arguments match the schemas of their tools."""
        self.tools = {tool.name: tool for tool in tools}
        self.num_misread = 0
        """Number of texts so far that the syntax had to read twice. In Python's notation, only long texts count."""
        self.types: dict[int, frozenset[str] | None] = {}
        """What ArgumentTags knows about the values of an argument, by the `id()` of the argument's schema. The schema
        is a part of `tools`, so its id stays valid."""
        self._emit = emit
        self._must_call = must_call
        self._index = -1

    @property
    def has_begun(self) -> bool:
        """True once a call has begun."""
        return self._index >= 0

    def is_guided(self, name: str) -> bool:
        """Whether a grammar makes the arguments of this tool match their schema."""
        return name in self.tools and (self._must_call or self.tools[name].strict)

    def begin(self, name: str) -> None:
        self._index += 1
        self._emit(CallBegins(self._index, name))

    def add(self, json: str) -> None:
        """Adds a part of the call's arguments."""
        if json:
            self._emit(ArgumentsDelta(self._index, json))

    def end(self) -> None:
        self._emit(CallEnds(self._index))


@dataclass(frozen=True, slots=True)
class GuidedTool:
    """A tool that may be called, and the schema that its arguments must match."""

    name: str
    schema: str
    """JSON, ready for Lark's `%json`."""
    tool: Tool | None
    """The tool to which `schema` belongs. None: the arguments may be any object."""
    is_beside_json: bool = False
    """True if the answer may also be JSON that is no call, and no marker distinguishes a call from that JSON. Then the
    grammar must divide a call into the same literals as that JSON: the lexer prefers the longest literal, and does not
    go back to a shorter one."""


class CallSyntax(Protocol):
    """How one family of models writes calls. Stateless. A section is a marker and the calls after it."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Each marker begins a section, anywhere in an answer. Grammars use the first marker."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Further markers within a section. All markers that are special tokens are kept in the text."""

    @property
    def bare_beginning(self) -> str | None:
        """For grammars: a regular expression for the beginning of a call without a marker. If it is not None,
        such a call may begin the answer, and the grammar makes the model write calls in this way."""

    @property
    def between_sections(self) -> str | None:
        """The text that the model writes between two sections; a newline may also come before the first section. None:
        one section contains all calls of a turn."""

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        """Reads a section after its marker, or a section without a marker. False: there is no call. The
        caller has begun an attempt; this method commits it when the first call begins."""

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:
        """The section after its marker, as a Lark expression."""
