"""CallSyntax: how one family of models writes calls; and what a parser does with a call that it reads."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.conversation.events import AnswerEvent, ArgumentsDelta, CallBegins, CallEnds
from gateway.conversation.lark import Lark
from gateway.conversation.messages import Tool
from gateway.conversation.reader import Reader, Steps

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def is_tool_name(name: str) -> bool:
    """A name that every syntax can write; what else stands where a name should be makes no call."""
    return _NAME.fullmatch(name) is not None


class CallWriter:
    """Turns what a syntax reads into events."""

    def __init__(self, tools: Sequence[Tool], emit: Callable[[AnswerEvent], None]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.num_misread = 0
        """Values so far that a syntax had to read twice."""
        self._emit = emit
        self._index = -1

    @property
    def has_begun(self) -> bool:
        """There was a call."""
        return self._index >= 0

    def begin(self, name: str) -> None:
        self._index += 1
        self._emit(CallBegins(self._index, name))

    def add(self, json: str) -> None:
        """More of the arguments."""
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
    """The tool whose schema this is; None: its arguments may be any object."""
    is_beside_json: bool = False
    """JSON that is no call may stand in a call's place, without a mark. Literals of both must end alike, since a lexer
    does not go back from a longer one."""


class CallSyntax(Protocol):
    """Stateless. A `section` is a marker and the call or calls behind it."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Each begins a section, wherever it stands in an answer. The model is guided to the first one."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Further markers within a section. Those of all markers that are one token are kept in the text."""

    @property
    def bare_beginning(self) -> str | None:
        """Calls may also begin the answer without a marker, and are guided so: a regular expression of how they begin,
        for grammars."""

    @property
    def repeats(self) -> str | None:
        """What the model writes between two sections; None: a section holds all calls of a turn."""

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        """Reads a section behind its marker, or a bare one. False: there is no call. It began an attempt, which is
        committed with the first call."""

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:
        """The section behind its marker, as an expression of Lark."""
